"""Critics side by side against as many networks one by one, the least of them, and the box of actions."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.agents.critics import ActionBox, StackedMLP, least
from penstock.agents.mlp import by_onednn
from penstock.core.errors import ConfigError
from penstock.core.spec import LeafSpec


def one_by_one(stack: StackedMLP, x: Tensor) -> Tensor:
    """[k, N, outputs] by layers of torch's own, from the stack's parameters."""
    parameters = list(stack.parameters())
    out = []
    for k in range(len(parameters[0])):
        y = x
        for i in range(0, len(parameters), 2):
            y = F.linear(y, parameters[i][k].t(), parameters[i + 1][k, 0])
            y = y if i == len(parameters) - 2 else torch.relu(y)
        out.append(y)
    return torch.stack(out)


def made(k: int, hidden: tuple[int, ...], outputs: int) -> tuple[StackedMLP, Tensor]:
    return StackedMLP(k, 5, hidden, outputs).double(), torch.randn(17, 5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("hidden", [(), (7,), (8, 6)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_side_by_side_is_one_by_one(k: int, hidden: tuple[int, ...], outputs: int) -> None:
    """Values, and gradients of parameters and inputs."""
    stack, x = made(k, hidden, outputs)
    weight = torch.randn(k, 17, outputs, dtype=torch.float64)
    wanted = [x, *stack.parameters()]
    assert stack(x).shape == (k, 17, outputs)
    seen = torch.autograd.grad((stack(x) * weight).sum(), wanted)
    slow = torch.autograd.grad((one_by_one(stack, x) * weight).sum(), wanted)
    torch.testing.assert_close(stack(x), one_by_one(stack, x))
    for a, b in zip(seen, slow):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(stack(x), one_by_one(stack, x))


def test_each_network_starts_as_torchs_linear_layers_do() -> None:
    """Uniform within 1 / sqrt(inputs), and no two alike."""
    stack = StackedMLP(2, 16, (64,), 1)
    bounds = [0.25, 0.25, 0.125, 0.125]
    for p, bound in zip(stack.parameters(), bounds):
        assert 0.5 * bound < float(p.detach().abs().max()) <= bound or p.numel() < 4
        assert not torch.equal(p[0], p[1])


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("hidden", [(), (7,), (8, 6)])
def test_the_least_of_them(k: int, hidden: tuple[int, ...]) -> None:
    """Its gradient runs through the network that gave it and reaches actions alone, here the last two inputs."""
    stack, x = made(k, hidden, 1)
    weight = torch.randn(17, dtype=torch.float64)
    for of in (None, 1, max(k - 1, 1)):
        expected = one_by_one(stack, x)[:of].squeeze(-1).amin(0)
        lowest = least(stack, x[:, :3], x[:, 3:], of)
        torch.testing.assert_close(lowest, expected)
        parameters = list(stack.parameters())
        (gradient, *others) = torch.autograd.grad((lowest * weight).sum(), [x, *parameters], allow_unused=True)
        torch.testing.assert_close(gradient[:, 3:], torch.autograd.grad((expected * weight).sum(), x)[0][:, 3:])
        assert not gradient[:, :3].any() and all(g is None for g in others)
        with torch.no_grad():
            torch.testing.assert_close(least(stack, x[:, :3], x[:, 3:], of), expected)
    if k > 1:
        which = one_by_one(stack, x).squeeze(-1).argmin(0)
        assert len(which.unique()) > 1


@pytest.fixture(params=["onednn", "mkl"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library of large products, whatever the processor is."""
    for module in ("mlp", "critics"):
        monkeypatch.setattr(f"penstock.agents.{module}.onednn_is_faster", lambda: request.param == "onednn")
    return request.param


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99, 1.0])
def test_every_row_runs_back_through_its_network_however_few_have_the_same(share: float) -> None:
    """With oneDNN another row comes along now and then, so that products are of few sizes, and counts for nothing."""
    stack = StackedMLP(3, 5, (8, 6)).double()
    x = torch.randn(100, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():  # the share of rows in which each of the last two networks is the least
        q = one_by_one(stack, x).squeeze(-1)
        biases = list(stack.parameters())[-1]
        biases[1] += torch.quantile(q[0] - q[1], share) - 1e-6  # no row is in balance: there either slope is right
        biases[2] += torch.quantile(q[0] - q[2], share / 2) - 1e-6
    weight = torch.randn(100, dtype=torch.float64)
    (seen,) = torch.autograd.grad((least(stack, x[:, :0], x) * weight).sum(), x)
    slow = torch.autograd.grad((one_by_one(stack, x).squeeze(-1).amin(0) * weight).sum(), x)[0]
    torch.testing.assert_close(seen, slow)


def test_large_networks_are_the_same_ones() -> None:
    """Large products go to another library."""
    stack = StackedMLP(2, 128, (256, 256), 1)
    x = torch.randn(300, 128, requires_grad=True)
    wanted = [x, *stack.parameters()]
    for seen, slow in (
        (stack(x).square().sum(), one_by_one(stack, x).square().sum()),
        (least(stack, x[:, :0], x).sum(), one_by_one(stack, x).squeeze(-1).amin(0).sum()),
    ):
        torch.testing.assert_close(seen, slow, rtol=1e-4, atol=1e-3)
        found = torch.autograd.grad(seen, wanted, allow_unused=True)
        for a, b in zip(found, torch.autograd.grad(slow, wanted)):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_rows_do_not_touch_each_other() -> None:
    """The gradient of a row's least value is that of the row alone."""
    stack, x = made(2, (8, 6), 1)
    (whole,) = torch.autograd.grad(least(stack, x[:, :0], x).sum(), x)
    for i in range(len(x)):
        row = x[i : i + 1].detach().clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(least(stack, row[:, :0], row).sum(), row)[0][0], whole[i])


def test_a_copy_has_parameters_of_its_own() -> None:
    stack, x = made(2, (8,), 1)
    other = copy.deepcopy(stack)
    before = stack(x)
    for p in other.parameters():
        p.data += 1.0
    assert torch.equal(stack(x), before)
    torch.testing.assert_close(other(x), one_by_one(other, x))
    other.load_state_dict(stack.state_dict())
    assert torch.equal(other(x), before)
    nn.Module.requires_grad_(other, False)
    assert torch.autograd.grad(other(x).sum(), x)[0].any()


def box(low: Any, high: Any, shape: tuple[int, ...] = (1,), dtype: str = "float32") -> ActionBox:
    return ActionBox(LeafSpec("box", shape, dtype, low, high), "SAC")


def test_the_golden_rescaling() -> None:
    own = box(-3.0, 5.0)
    unit = torch.tensor([[-1.0], [0.0], [0.75], [1.0]])
    assert own.to_env(unit).flatten().tolist() == [-3.0, 1.0, 4.0, 5.0]
    assert torch.equal(own.to_unit(own.to_env(unit)), unit)


def test_every_dimension_has_bounds_of_its_own() -> None:
    low, high = (-1.0, 0.0, -8.0, 1e-3, -1e6, 3.0), (1.0, 0.5, -7.0, 2e-3, 1e6, 300.0)
    own = box(low, high, (2, 3))
    unit = torch.rand(50, 6) * 2 - 1
    action = own.to_env(unit)
    assert action.shape == (50, 2, 3)
    for j in range(6):
        expected = low[j] + (unit[:, j].double() + 1) / 2 * (high[j] - low[j])
        torch.testing.assert_close(
            action.flatten(1)[:, j].double(), expected, rtol=1e-5, atol=1e-4 * (high[j] - low[j])
        )
    torch.testing.assert_close(own.to_unit(action), unit, rtol=0, atol=2e-4)
    ends = own.to_env(torch.stack([-torch.ones(6), torch.ones(6)])).flatten(1).tolist()
    assert ends[0] == pytest.approx(low, rel=1e-5, abs=1e-3) and ends[1] == pytest.approx(high, rel=1e-5, abs=1e-3)


def test_scalars_and_actions_out_of_bounds() -> None:
    own = box(0.0, 4.0, ())
    assert own.size == 1 and own.to_env(torch.tensor([[0.5], [-1.0]])).tolist() == [3.0, 0.0]
    assert own.to_unit(torch.tensor([3.0, 9.0, -9.0])).tolist() == [[0.5], [1.0], [-1.0]]
    assert box(0.0, 4.0, (), "float64").to_unit(torch.tensor([3.0], dtype=torch.float64)).dtype == torch.float32


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (LeafSpec("box", (2,), "float32"), ["finite action bounds", "inf", "TransformAction"]),
        (LeafSpec("box", (2,), "float32", (0.0, -math.inf), (1.0, 1.0)), ["finite action bounds", "-inf"]),
        (LeafSpec("box", (2,), "float32", (0.0, 2.0), (1.0, 2.0)), ["low < high", "2.0"]),
        (LeafSpec("box", (2,), "int32", 0.0, 4.0), ["one box of floats", "int32"]),
        (LeafSpec("discrete", (), "int64", sizes=(3,)), ["one box of floats", "discrete(3)", "DQN", "DiscreteSAC"]),
        ((LeafSpec("box", (1,), "float32", 0.0, 1.0),) * 2, ["one box of floats", "PPO"]),
    ],
    ids=["unbounded", "half bounded", "degenerate", "integers", "choice", "two boxes"],
)
def test_what_is_no_finite_box_is_refused(leaf: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        ActionBox(leaf, "SAC")
    assert all(word in str(error.value) for word in ["SAC", *words] if word != "SAC" or "low < high" not in words)


def test_bounds_are_no_part_of_what_is_stored() -> None:
    assert list(box(-1.0, 1.0).state_dict()) == []
    assert np.isfinite(box(-1e30, 1e30).to_env(torch.ones(1, 1)).numpy()).all()


def test_large_stacks_are_the_same_function_in_other_roundings(library: str) -> None:
    torch.manual_seed(0)
    stack = StackedMLP(2, 150, (160, 128))
    x, weight = torch.randn(256, 150, requires_grad=True), torch.randn(2, 256, 1)
    assert by_onednn(x, 160) == (library == "onednn")
    wanted = [x, *stack.parameters()]
    seen = [
        *torch.autograd.grad((stack(x) * weight).sum(), wanted),
        *torch.autograd.grad(least(stack, x[:, :0], x).sum(), [x]),
    ]
    stack, x = stack.double(), x.detach().double().requires_grad_()
    wanted = [x, *stack.parameters()]
    slow = [*torch.autograd.grad((one_by_one(stack, x) * weight).sum(), wanted),
            *torch.autograd.grad(one_by_one(stack, x).amin(0).sum(), [x])]  # fmt: skip
    for a, b in zip(seen, slow):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)
