"""LayerNorm between layers and activations: the equation, by the kernel and by torch, rows alone, and all that nets do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.agents.critics import StackedMLP, least
from penstock.agents.mlp import MLP, SimBa, through
from penstock.agents.noisy import NoisyMLP
from penstock.core.batch import Inputs
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.native import dense, library
from penstock.testing import check_agent

VECTOR = LeafSpec("box", (3,), "float32", -1.0, 1.0)
CHOICES = EnvSpec(VECTOR, LeafSpec("discrete", (), "int64", sizes=(4,), start=2))
BOXES = EnvSpec(VECTOR, LeafSpec("box", (2,), "float32", -1.0, 1.0))
WAYS = ["kernel", "torch"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the kernel, where there is one, and by torch."""
    if request.param == "torch":
        monkeypatch.setattr(library, "found", None)
    elif library.found is None:
        pytest.skip("the kernel was not built")
    return request.param


def by_hand(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Ba et al. 2016, equation 4, in float64."""
    x = x.double()
    off = x - x.mean(-1, keepdim=True)
    return gain.double() * off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt() + shift.double()


def moved(module: nn.Module) -> nn.Module:
    """The module with parameters that are nowhere 0 or 1."""
    generator = torch.Generator().manual_seed(5)
    for p in module.parameters():
        p.data.add_(0.3 * torch.randn(p.shape, generator=generator))
    return module


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
@pytest.mark.parametrize("with_out", [True, False])
@pytest.mark.parametrize("hidden", [(1,), (13, 33), (64, 64, 16)])
def test_an_mlp_with_norms_is_the_equation(activation: Any, with_out: bool, hidden: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mlp: Any = moved(MLP(5, hidden, activation, norm=True))
    out = nn.Linear(hidden[-1], 3) if with_out else None
    x = torch.randn(37, 5, requires_grad=True)
    act = {"tanh": torch.tanh, "relu": torch.relu, "gelu": nn.functional.gelu}[activation]
    y = x.double()
    for layer, norm in zip(mlp.layers, mlp.norms):
        y = act(by_hand(y @ layer.weight.double().t() + layer.bias.double(), norm.weight, norm.bias))
    y = y if out is None else y @ out.weight.double().t() + out.bias.double()
    found = through(mlp, x, out)
    torch.testing.assert_close(found.double(), y, rtol=1e-4, atol=1e-5)
    wanted = [x, *mlp.parameters(), *([] if out is None else out.parameters())]
    expected = torch.autograd.grad(y.square().sum(), wanted)
    for a, b in zip(torch.autograd.grad(found.square().sum(), wanted), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * max(1.0, float(b.abs().max())))
    with torch.no_grad():
        assert torch.equal(through(mlp, x, out), found)


@pytest.mark.usefixtures("way")
def test_noisy_layers_take_norms_too() -> None:
    torch.manual_seed(0)
    noisy: Any = moved(NoisyMLP(5, (8, 7), norm=True))
    noisy.layers[0].renew(np.random.default_rng(1))
    x = y = torch.randn(9, 5)
    for layer, norm in zip(noisy.layers, noisy.norms):
        y = by_hand(layer(y.float()), norm.weight, norm.bias).relu()
    torch.testing.assert_close(noisy(x).double(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("k", [1, 3])
def test_critics_side_by_side_have_norms_of_their_own(activation: Any, k: int) -> None:
    torch.manual_seed(0)
    stack: Any = moved(StackedMLP(k, 7, (24, 40), activation=activation, norm=True))
    x = torch.randn(50, 7, requires_grad=True)
    w, norms, act = stack.weights(), stack.norms(), {"relu": torch.relu, "tanh": torch.tanh}[activation]
    y = x.double()
    for i in (0, 2):
        y = act(by_hand(y @ w[i].double() + w[i + 1].double(), norms[i], norms[i + 1]))
    y = y @ w[4].double() + w[5].double()
    found, parameters = stack(x), [*stack.parameters()]
    torch.testing.assert_close(found.double(), y, rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(y.square().sum(), [x, *parameters], retain_graph=True)
    for a, b in zip(torch.autograd.grad(found.square().sum(), [x, *parameters]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4 * max(1.0, float(b.abs().max())))
    action = x[:, 4:].detach().requires_grad_()
    lowest = least(stack, x[:, :4].detach(), action)
    torch.testing.assert_close(lowest.double(), y.squeeze(-1).amin(0), rtol=1e-4, atol=1e-5)
    (slope,) = torch.autograd.grad(lowest.sum(), action)
    (of_x,) = torch.autograd.grad(y.squeeze(-1).amin(0).sum(), x)
    torch.testing.assert_close(slope, of_x[:, 4:], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("hidden", [(64, 64), (1,), (15, 31), (256,)])
def test_rows_in_groups_have_the_bits_of_the_whole(hidden: tuple[int, ...]) -> None:
    mlp = moved(MLP(17, hidden, "relu", norm=True))
    x = 3.0 * torch.randn(493, 17)
    with torch.inference_mode():
        norms: Any = mlp.norms
        whole = norms[0](mlp.layers[0](x)) if library.found is None else mlp(x)  # pyright: ignore
        inputs = mlp.layers[0](x) if library.found is None else x  # pyright: ignore
        for n in (1, 2, 3, 5, 7, 13, 16, 33):
            module: Callable[[Tensor], Tensor] = norms[0] if library.found is None else mlp
            parts = [module(inputs[i : i + n]) for i in range(0, len(x), n)]
            assert torch.equal(torch.cat(parts), whole)


def test_every_set_of_instructions_gives_the_same_bits() -> None:
    if library.found is None:
        pytest.skip("the kernel was not built")
    torch.manual_seed(1)
    for hidden in ((64, 64), (15, 31), (1,), (33, 17, 5)):
        widths = (6, *hidden, 2)
        parameters = [torch.randn(shape) for n, m in zip(widths, widths[1:]) for shape in ((m, n), (m,))]
        norms, x = [torch.randn(m) for m in hidden for _ in range(2)], torch.randn(61, 6)
        found: dict[str, list[Tensor]] = {}
        try:
            for name in (b"avx512", b"avx2", b"neon", b"scalar"):
                if library.found.choose(name) is not None:
                    kept = dense.room(61, norms)
                    outputs = dense.forward(x, parameters, "tanh", len(hidden), norms=norms, kept=kept)
                    into = [torch.empty_like(p) for p in (*parameters, *norms)]
                    how = parameters[::2], "tanh", len(hidden), outputs, outputs[-1], into, True
                    back: Any = dense.backward(x, *how, norms=norms, kept=kept)
                    assert torch.equal(dense.last(x, parameters, "tanh", len(hidden), norms), outputs[-1])
                    found[name.decode()] = [*outputs, *kept, *into, back]
        finally:
            library.found.choose(b"")
        assert {"scalar"} < {*found}
        for tensors in found.values():
            assert all(torch.equal(a, b) for a, b in zip(tensors, found["scalar"], strict=True))


ALGOS: dict[str, tuple[Any, EnvSpec]] = {
    "ppo": (ps.PPO(), CHOICES),
    "ppo lstm": (ps.PPO(net=ps.Net(recurrent="lstm", actor_hidden=(8,))), CHOICES),
    "a2c": (ps.A2C(), BOXES),
    "dqn": (ps.DQN(), CHOICES),
    "dueling": (ps.DQN(dueling=True), CHOICES),
    "noisy": (ps.DQN(noisy=True), CHOICES),
    "r2d1": (ps.R2D1(), CHOICES),
    "discrete-sac": (ps.DiscreteSAC(), CHOICES),
    "sac": (ps.SAC(), BOXES),
    "td3": (ps.TD3(), BOXES),
    "cql": (ps.CQL(), BOXES),
    "pqn": (ps.PQN(net=ps.Net()), CHOICES),
    "pqn gru": (ps.PQN(net=ps.Net(recurrent="gru")), CHOICES),
    "tqc": (ps.TQC(quantiles=5), BOXES),
}


def normed(algo: Any) -> Any:
    return replace(algo, net=replace(algo.net, norm="layer"))


def with_blocks(algo: Any) -> Any:
    return replace(algo, net=replace(algo.net, block="simba", hidden=(8, 8)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("change", [normed, with_blocks])
@pytest.mark.parametrize("name", ALGOS)
def test_agents_of_every_algorithm_hold_to_their_contract_with_norms(name: str, change: Any) -> None:
    algo, spec = ALGOS[name]
    if name == "noisy" and change is with_blocks:
        with pytest.raises(ConfigError, match=r"noisy=True with net.block='simba'.*use epsilon"):
            change(algo).build(spec, 0)
        return
    policy, plain = change(algo).build(spec, 0), algo.build(spec, 0)
    assert any("norm" in x for x, _ in policy.agent.named_parameters())
    assert not any("norm_" in x or "norms" in x for x, _ in plain.agent.named_parameters())
    check_agent(policy.agent, spec, explores=name not in ("noisy", "sac", "td3", "cql", "tqc"))


@pytest.mark.parametrize("change", [normed, with_blocks])
@pytest.mark.parametrize("name", [name for name in ALGOS if name != "noisy"])
def test_parameters_without_norms_do_not_load_into_a_net_with_them(name: str, change: Any) -> None:
    algo, spec = ALGOS[name]
    plain, policy = algo.build(spec, 0), change(algo).build(spec, 0)
    has, has_no = ("which has .*norm", "which has no .*norm") if change is normed else ("do not fit", "do not fit")
    with pytest.raises(CheckpointError, match=rf"{has}.*net.norm, net.block"):
        policy.load_parameters(plain.agent.state_dict())
    with pytest.raises(CheckpointError, match=rf"{has_no}.*net.norm, net.block"):
        plain.load_parameters(policy.agent.state_dict())


def test_networks_of_crossq_and_of_sac_do_not_load_into_each_other() -> None:
    cross, sac = (algo(net=ps.Net(hidden=(8,))).build(BOXES, 0) for algo in (ps.CrossQ, ps.SAC))
    for policy, other in ((cross, sac), (sac, cross)):
        with pytest.raises(CheckpointError, match=r"do not fit this agent, .*the algorithm changed"):
            policy.load_parameters(other.agent.state_dict())


def test_unknown_norms_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"net.norm='batch'.*layer"):
        ps.Net(norm="batch")  # pyright: ignore[reportArgumentType]


def test_hooks_on_norms_are_called() -> None:
    mlp: Any = MLP(3, (4,), norm=True)
    x = torch.randn(2, 3)
    before, seen = mlp(x), []
    mlp.norms[0].register_forward_hook(lambda *given: seen.append(given[2]))
    torch.testing.assert_close(mlp(x), before)
    assert len(seen) == 1


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["ppo", "sac", "dqn"])
def test_transforms_and_the_compiler_see_the_same_function(name: str) -> None:
    algo, spec = ALGOS[name]
    agent = normed(algo).build(spec, 0).agent
    body: Any = agent.online.mlp if name == "dqn" else agent.actor.mlp
    x = torch.randn(6, 3)
    with torch.no_grad():
        expected = body(x)
        torch.testing.assert_close(torch.func.functional_call(body, dict(body.named_parameters()), (x,)), expected)
        torch.testing.assert_close(torch.vmap(body)(x.unsqueeze(1)).squeeze(1), expected)
        exported: Any = torch.export.export(body, (x,)).module()
        torch.testing.assert_close(exported(x), expected)


@pytest.mark.usefixtures("way")
def test_blocks_of_simba_are_the_equations() -> None:
    """x = Wx + b, then x + W2 relu(W1 LN(x) + b1) + b2 by block, then LN (Lee et al. 2024, section 4.2)."""
    torch.manual_seed(0)
    body: Any = moved(SimBa(5, 24, 2))
    x = torch.randn(37, 5, requires_grad=True)
    y = x.double() @ body.embedding.weight.double().t() + body.embedding.bias.double()
    for block in body.blocks:
        z = by_hand(y, block.norm.weight, block.norm.bias) @ block.up.weight.double().t() + block.up.bias.double()
        y = y + z.relu() @ block.down.weight.double().t() + block.down.bias.double()
    y = by_hand(y, body.norm.weight, body.norm.bias)
    found = body(x)
    torch.testing.assert_close(found.double(), y, rtol=1e-4, atol=1e-4)
    wanted = [x, *body.parameters()]
    expected = torch.autograd.grad(y.square().mean(), wanted)
    for a, b in zip(torch.autograd.grad(found.square().mean(), wanted), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    if library.found is not None:
        with torch.inference_mode():
            whole = body(x)
            for n in (1, 3, 5, 16):
                assert torch.equal(torch.cat([body(x[i : i + n]) for i in range(0, len(x), n)]), whole)


def test_blocks_start_as_in_the_authors_code() -> None:
    torch.manual_seed(0)
    body: Any = SimBa(64, 64, 1)
    square = body.embedding.weight.detach() @ body.embedding.weight.detach().t()
    torch.testing.assert_close(square, torch.eye(64), rtol=0, atol=1e-4)
    assert float(body.blocks[0].up.weight.detach().std()) == pytest.approx((2 / 64) ** 0.5, rel=0.05)
    assert float(body.blocks[0].down.weight.detach().std()) == pytest.approx((2 / 256) ** 0.5, rel=0.05)
    assert body.blocks[0].up.weight.shape == (256, 64)


def test_critics_of_blocks_differ_and_pass_their_slope_to_the_action() -> None:
    agent: Any = with_blocks(ps.SAC()).build(BOXES, 0).agent
    inputs = Inputs(torch.randn(5, 3), None, None, None)  # pyright: ignore[reportArgumentType]
    action = torch.randn(5, 2, requires_grad=True)
    q = agent.q(inputs, action)
    assert q.shape == (2, 5)
    assert not torch.equal(q[0], q[1])
    (a,) = torch.autograd.grad(agent.smallest_q(inputs, action).sum(), action)
    torch.testing.assert_close(a, torch.autograd.grad(q.amin(0).sum(), action)[0])


@pytest.mark.usefixtures("way")
def test_the_least_of_blocks_has_the_same_slope_and_none_for_their_weights() -> None:
    agent: Any = with_blocks(ps.SAC()).build(BOXES, 0).agent
    stack, features = agent.critics.stack, torch.randn(6, 3)
    actions = [torch.randn(6, 2, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    found = least(stack, features, actions[0])
    expected = stack(torch.cat([features, actions[1]], -1)).squeeze(-1).amin(0)
    assert torch.equal(found, expected) and all(p.requires_grad for p in stack.parameters())
    slopes = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for x, y in zip(actions, (found, expected))]
    assert torch.equal(*slopes)
    unused = torch.autograd.grad(found.sum(), [*stack.parameters(), actions[0]], allow_unused=True)
    assert all(g is None for g in unused[:-1])


@pytest.mark.parametrize(
    ("net", "message"),
    [
        ({"block": "simba", "hidden": (8, 16)}, r"net.hidden=\(8, 16\).*equal widths.*\(8, 8\)"),
        ({"block": "simba", "critic_hidden": (8, 16)}, r"net.critic_hidden=\(8, 16\).*equal widths"),
        ({"block": "simba", "norm": "layer"}, r"net.block='simba' with net.norm='layer'; blocks have norms"),
    ],
)
def test_blocks_that_cannot_be_made_are_refused(net: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.Net(**net)


BLOCKS = ps.SAC(learning_starts=8, replay_ratio=32, net=ps.Net(hidden=(16, 16), block="simba", normalize_obs=True))


OFTEN: dict[str, Any] = {"learning_starts": 8, "replay_ratio": 32}
BATCH_NORMED = ps.CrossQ(**OFTEN, policy_delay=2, warmup_updates=2, net=ps.Net(hidden=(16,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo", [ps.PPO(epochs=2, minibatch=16), ps.SAC(**OFTEN), BLOCKS, ps.TQC(**OFTEN, quantiles=5), BATCH_NORMED]
)
def test_every_sampler_trains_the_same_bits(algo: Any) -> None:
    algo = algo if algo in (BLOCKS, BATCH_NORMED) else normed(algo)
    env = "CartPole-v1" if isinstance(algo, ps.PPO) else "Pendulum-v1"
    found: list[list[Tensor]] = []
    for settings in (ps.SerialSampler(T=8, B=6), ps.CpuSampler(T=8, B=6, workers=2), ps.GpuSampler(T=8, B=6)):
        live = settings.build(env, 1)
        policy = algo.build(live.spec, seed=1)
        live.initialize(policy.agent)
        for itr in range(3):
            ps.train_one_step(policy, live.obtain_samples(itr)[0])
        live.shutdown()
        found.append([p.detach().clone() for p in policy.agent.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_run_with_norms_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def experiment(name: str, steps: int) -> ps.Experiment:
        run = ps.RunConfig(steps=steps, dir=str(tmp_path / name), eval_episodes=0, progress="off", seed=3)
        return ps.Experiment("Pendulum-v1", normed(ps.SAC(learning_starts=8)), ps.SerialSampler(T=2, B=2), run)

    whole = ps.train(experiment("whole", 96))
    ps.train(experiment("parts", 48))
    parts = ps.resume(tmp_path / "parts", {"run.steps": 96})
    both = [x.policy.agent.state_dict() for x in (whole, parts)]
    assert all(torch.equal(x, both[1][name]) for name, x in both[0].items())
