"""The native kernel: bits that depend neither on the rows beside a row nor on the instructions, and torch's gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.agents.critics import StackedMLP, least
from penstock.agents.mlp import MLP, through
from penstock.core.errors import ConfigError
from penstock.native import dense, library
from penstock.native.library import VARIABLE, kernel, loaded
from penstock.processes.serialization import require_same_versions, versions

pytestmark = pytest.mark.timeout(120)
SIZES = [(4, 64, 64, 2), (17, 256, 256, 6), (3, 400, 300, 1), (5, 7, 13), (1, 1), (33, 15, 31, 17)]
ROWS = 493


def network(sizes: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    g = torch.Generator().manual_seed(sum(sizes))
    shapes = [shape for n, m in zip(sizes, sizes[1:]) for shape in ((m, n), (m,))]
    # without torch's functions, whose bits hang on the processor
    parameters = [torch.randint(-(2**20), 2**20, shape, generator=g).float() / 2**21 for shape in shapes]
    return torch.randint(-(2**20), 2**20, (ROWS, sizes[0]), generator=g).float() / 2**19, parameters


def everything(sizes: tuple[int, ...], activation: str, rows: int) -> list[Tensor]:
    """All outputs and gradients of a network."""
    x, parameters = network(sizes)
    x = x[:rows]
    outputs = dense.forward(x, parameters, activation, len(sizes) - 2)
    into = [torch.empty_like(p) for p in parameters]
    how = parameters[::2], activation, len(sizes) - 2, outputs, outputs[-1], into, True
    for_x = dense.backward(x, *how)
    assert for_x is not None
    return [*outputs, *into, for_x]


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("activation", ["none", "tanh", "relu", "elu"])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_in_groups_have_the_bits_of_the_whole(sizes: tuple[int, ...], activation: str) -> None:
    x, parameters = network(sizes)
    for activated in {len(sizes) - 2, len(sizes) - 1}:
        whole = dense.forward(x, parameters, activation, activated)[-1]
        for n in (1, 2, 3, 5, 7, 13, 16, 33):
            parts = [dense.forward(x[i : i + n], parameters, activation, activated)[-1] for i in range(0, ROWS, n)]
            assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("activation", ["none", "tanh", "relu", "elu"])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_set_of_instructions_gives_the_same_bits(sizes: tuple[int, ...], activation: str) -> None:
    found: dict[str, list[Tensor]] = {}
    try:
        for name in (b"avx512", b"avx2", b"neon", b"scalar"):
            if library.found.choose(name) is not None:
                found[name.decode()] = everything(sizes, activation, 61)
    finally:
        library.found.choose(b"")
    assert {"scalar"} < {*found}
    for tensors in found.values():
        assert all(torch.equal(a, b) for a, b in zip(tensors, found["scalar"], strict=True))


def in_both_ways(function: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's results are torch's to 1e-6 of the largest."""
    by_kernel = function()
    with monkeypatch.context() as m:
        m.setattr(library, "found", None)
        by_torch = function()
    for a, b in zip(by_kernel, by_torch, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1.5e-6 * b.detach().abs().max().item() if b.numel() else 0.0)


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("rows", [0, 1, 7, 70])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("with_out", [True, False])
def test_gradients_of_chains_are_torchs(
    rows: int, activation: Any, with_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    body, out = MLP(5, (32, 48), activation), nn.Linear(48, 3) if with_out else None
    x = torch.randn(rows, 5, requires_grad=True)
    parameters = [*body.parameters(), *([] if out is None else out.parameters())]

    def found() -> list[Tensor]:
        y = through(body, x, out)
        return [y, *torch.autograd.grad((y**2).sum(), [*parameters, x])]

    in_both_ways(found, monkeypatch)


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("hidden", [(), (32,), (64, 48)])
def test_gradients_of_critics_are_torchs(k: int, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    stack = StackedMLP(k, 7, hidden)
    x = torch.randn(90, 7, requires_grad=True)
    features, action = torch.randn(90, 4), torch.randn(90, 3, requires_grad=True)

    def found() -> list[Tensor]:
        y, lowest = stack(x), least(stack, features, action)
        return [
            *(y, lowest, *torch.autograd.grad((y**2).sum(), [*stack.parameters(), x])),
            *torch.autograd.grad((lowest**2).sum(), [action]),
        ]

    in_both_ways(found, monkeypatch)


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_not_a_number_and_infinity_go_through_as_in_torch(activation: str) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan], [inf], [-inf], [0.0], [-0.0], [1e-42], [3e38]])
    one = [torch.ones(1, 1), torch.zeros(1)]
    found = dense.forward(x, one, activation, 1)[0]
    expected = nn.functional.elu(x) if activation == "elu" else getattr(torch, activation)(x)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("by_kernel")
def test_what_the_kernel_does_not_take_goes_to_torch() -> None:
    x, weights = torch.zeros(2, 3), [torch.zeros(4, 3), torch.zeros(4)]
    assert dense.takes(x, weights)
    assert not dense.takes(x.double(), weights)
    assert not dense.takes(x[0], weights)
    assert not dense.takes(x, [weights[0].double(), weights[1]])
    assert not dense.takes(x, [torch.zeros(3, 4).t(), weights[1]])
    assert not dense.takes(x.to("meta"), weights)


def test_the_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    found, reason = loaded.__wrapped__()
    assert found is None
    assert f"{VARIABLE}=0" in reason


@pytest.mark.usefixtures("by_kernel")
def test_a_library_of_another_version_or_a_torn_one_is_left_aside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "_FUNCTIONS", 99)
    found, reason = loaded.__wrapped__()
    assert found is None
    assert "another version: install penstock again" in reason
    (tmp_path / "_kernel.so").write_bytes(b"\x7fELF and no more")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    found, reason = loaded.__wrapped__()
    assert found is None
    assert "_kernel.so cannot be loaded" in reason


def test_instructions_that_are_not_here_are_refused_without_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "altivec")
    found, reason = loaded.__wrapped__()
    assert found is None
    assert "altivec" in reason or "not built" in reason


def test_a_process_with_another_kernel_is_refused() -> None:
    theirs = {**versions(("numpy",)), "kernel": "native 99"}
    with pytest.raises(ConfigError, match=rf"runner 3 on far computes by kernel 'native 99'.*{VARIABLE}"):
        require_same_versions("runner 3", "far", theirs, ("numpy",))


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_every_sampler_gives_the_same_batch_by_the_kernel(activation: Any) -> None:
    """Workers take the variable over from the process that starts them."""
    found: list[Tensor] = []
    samplers: list[Any] = [ps.SerialSampler(T=8, B=6), ps.CpuSampler(T=8, B=6, workers=2), ps.GpuSampler(T=8, B=6)]
    for settings in samplers:
        sampler = settings.build("CartPole-v1", 1)
        net = ps.Net(hidden=(24, 13), activation=activation)
        sampler.initialize(ps.PPO(net=net).build(sampler.spec, seed=1).agent)
        batch, _ = sampler.obtain_samples(0)
        found.append(torch.cat([torch.as_tensor(batch.obs).flatten(), torch.as_tensor(batch.info["logp"]).flatten()]))
        sampler.shutdown()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_run_that_began_with_another_kernel_is_refused(tmp_path: Path) -> None:
    run = ps.RunConfig(steps=64, dir=str(tmp_path / "run"), eval_episodes=0, progress="off")
    ps.train(ps.Experiment("CartPole-v1", ps.PPO(net=ps.Net(hidden=(4,))), ps.SerialSampler(T=16, B=2), run))
    meta = tmp_path / "run" / "meta.json"
    assert f'"kernel": "{kernel()}"' in meta.read_text()
    meta.write_text(meta.read_text().replace(f'"kernel": "{kernel()}"', '"kernel": "native 99"'))
    with pytest.raises(ConfigError, match=r"began with kernel 'native 99'.*--init"):
        ps.resume(tmp_path / "run", {"run.steps": 128})
