import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.agents.mlp import (
    MLP,
    affine,
    by_onednn,
    linear,
    onednn_is_faster,
    orthogonal,
    product,
    through,
)


def orthogonal_error(weight: Tensor, gain: float) -> float:
    w = weight.detach().flatten(1)
    square = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    return float((square - gain**2 * torch.eye(len(square))).abs().max())


def plain(mlp: MLP, x: Tensor, activation: str) -> Tensor:
    for layer in mlp.layers:
        x = getattr(F if activation == "elu" else torch, activation)(F.linear(x, layer.weight, layer.bias))  # pyright: ignore
    return x


def test_without_a_gain_layers_start_as_torchs() -> None:
    torch.manual_seed(3)
    mlp = MLP(4, (6, 5), gain=None)
    torch.manual_seed(3)
    for layer, its in zip((nn.Linear(4, 6), nn.Linear(6, 5)), mlp.layers, strict=True):
        assert torch.equal(layer.weight, its.weight) and torch.equal(layer.bias, its.bias)  # pyright: ignore


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("hidden", [(), (5,), (16, 7), (2, 16, 64)])
def test_an_mlp_is_linear_layers_and_activations(activation: Any, hidden: tuple[int, ...]):
    mlp = MLP(3, hidden, activation).double()
    for p in mlp.parameters():
        nn.init.normal_(p)
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(9, mlp.size, dtype=torch.float64)
    assert mlp.size == (hidden[-1] if hidden else 3)
    expected, got = plain(mlp, x, activation), mlp(x)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected, rtol=1e-9, atol=1e-9)
    wanted = [x, *mlp.parameters()]
    for a, b in zip(
        torch.autograd.grad((got * weights).sum(), wanted), torch.autograd.grad((expected * weights).sum(), wanted)
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_an_mlp_leaves_its_input_alone_and_keeps_its_gradients_apart():
    mlp = MLP(4, (8,))
    x = torch.randn(5, 4)
    before = x.clone()
    first = mlp(x)
    second = mlp(x)
    assert torch.equal(x, before)
    (first.sum() + second.sum()).backward()
    once = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
    for p, g in zip(mlp.parameters(), once):
        torch.testing.assert_close(p.grad, 2 * g)


def test_a_copied_or_loaded_mlp_computes_with_its_own_parameters():
    mlp, other, x = MLP(3, (8, 8)), MLP(3, (8, 8)), torch.randn(4, 3)
    before = mlp(x)
    twin = copy.deepcopy(mlp)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(mlp(x), before)
    assert not twin(x).any()
    other.load_state_dict(mlp.state_dict())
    assert torch.equal(other(x), before)
    torch.optim.SGD(mlp.parameters(), lr=0.1).step()
    mlp.double()
    assert mlp(x.double()).dtype == torch.float64


@pytest.mark.parametrize("width", [16, 64, 13, 5])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_a_rows_bits_do_not_depend_on_its_neighbours(width: int, activation: Any):
    mlp, x = MLP(6, (width, width), activation), torch.randn(96, 6) * 3
    with torch.no_grad():
        whole = mlp(x)
        for size in (4, 8, 12, 16, 32):
            for start in range(0, 96 - size + 1, size):
                assert torch.equal(mlp(x[start : start + size]), whole[start : start + size])
    torch.testing.assert_close(mlp(x), whole, rtol=0, atol=0)  # with gradients too


def test_layers_start_orthogonal():
    mlp = MLP(3, (8, 5))
    for layer in mlp.layers:
        assert orthogonal_error(layer.weight, math.sqrt(2)) < 1e-5  # pyright: ignore
        assert not layer.bias.any()  # pyright: ignore
    conv = nn.Conv2d(2, 4, 3)
    orthogonal(conv, 0.5)
    assert orthogonal_error(conv.weight, 0.5) < 1e-6
    assert conv.bias is not None
    assert not conv.bias.any()


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that is not Intel's."""
    monkeypatch.setattr("penstock.agents.mlp.onednn_is_faster", lambda: True)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_large_products_of_training_are_the_same_function_in_other_roundings(activation: Any):
    torch.manual_seed(0)
    mlp, head = MLP(300, (160, 130), activation), nn.Linear(130, 128)
    x = torch.randn(256, 300, requires_grad=True)
    weights = torch.randn(256, 128)
    assert by_onednn(x, 160) and by_onednn(x[:, :160], 130) and by_onednn(x[:, :130], 128)
    parameters = [x, *mlp.parameters(), *head.parameters()]
    got = through(mlp, x, head)
    gradients = torch.autograd.grad((got * weights).sum(), parameters)
    mlp, head, x = mlp.double(), head.double(), x.detach().double().requires_grad_()
    expected = head(plain(mlp, x, activation))
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    parameters = [x, *mlp.parameters(), *head.parameters()]
    for a, b in zip(gradients, torch.autograd.grad((expected * weights).sum(), parameters)):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("onednn")
def test_what_is_no_number_stays_none_behind_a_relu():
    x, weight = torch.ones(256, 256), torch.ones(256, 256)
    weight[0, 0] = math.nan
    assert by_onednn(x, 256)
    for y in (linear(x, weight, x[0], "relu"), affine(x, weight.t(), x[:1], "relu")):
        assert y[:, 0].isnan().all() and y[:, 1:].isfinite().all()


@pytest.mark.usefixtures("onednn")
def test_acting_keeps_a_rows_bits_whatever_lies_beside_it_and_training_repeats_itself():
    mlp, x = MLP(64, (256, 256), "relu"), torch.randn(512, 64)
    with torch.inference_mode():
        assert not by_onednn(x, 256)
        assert torch.equal(mlp(x)[128:192], mlp(x[128:192]))
    with torch.no_grad():
        assert by_onednn(x, 256)
        assert torch.equal(mlp(x), mlp(x.clone()))


@pytest.mark.usefixtures("onednn")
def test_products_of_other_numbers_stay_where_they_were():
    x = torch.randn(512, 512)
    assert by_onednn(x, 512) and not by_onednn(x, 7) and not by_onednn(x.double(), 512)
    assert not by_onednn(torch.empty(512, 512, device="meta"), 512)
    torch.testing.assert_close(product(x, x.t()), x @ x.t(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(product(x[:, :300], x[:300]), x[:, :300] @ x[:300], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(linear(x, x, x[0]), F.linear(x, x, x[0]), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("vendor", "family", "faster"),
    [("GenuineIntel", 6, False), ("AuthenticAMD", 25, False), ("AuthenticAMD", 26, True), ("", 0, True)],
)
def test_onednn_multiplies_where_mkl_keeps_to_narrow_registers(
    monkeypatch: pytest.MonkeyPatch, vendor: str, family: int, faster: bool
):
    monkeypatch.setattr("penstock.agents.mlp.cpu_family", lambda: (vendor, family))
    assert onednn_is_faster.__wrapped__() is faster
