"""CrossQ: batch renorm by hand, the joint forward, moments that only training moves, and what does not fit it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.algos import crossq
from penstock.algos.crossq import BatchRenorm, RenormedMLP
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs import toy
from penstock.learn.optimizers import take_step
from penstock.learn.train_ops import train_one_step
from penstock.testing import check_agent

SPEC = EnvSpec(LeafSpec("box", (3,), "float32", -9.0, 9.0), LeafSpec("box", (2,), "float32", -1.0, 1.0))
CFG = ps.CrossQ(alpha=0.5, warmup_updates=0, net=ps.Net(hidden=(8,), activation="relu"))


def inputs(n: int) -> Inputs:
    return Inputs(torch.randn(n, 3), None, None, None)  # pyright: ignore[reportArgumentType]


def test_batch_renorm_is_algorithm_1_of_its_paper() -> None:
    """Of the numbers 1 and 5: mean 3, variance 4; running mean 2 and variance 1."""
    norm = BatchRenorm(1, 1)
    for p, value in ((norm.gain, 2.0), (norm.shift, 1.0), (norm.mean, 2.0), (norm.variance, 1.0)):
        p.data.fill_(value)
    x = torch.tensor([[[1.0], [5.0]]])
    y, loss = norm.trained(x, False)
    z = 2.0 / 4.001**0.5
    assert y.flatten().tolist() == pytest.approx([1.0 - 2.0 * z, 1.0 + 2.0 * z])
    r, d = (4.001 / 1.001) ** 0.5, 1.0 / 1.001**0.5
    y, _ = norm.trained(x, True)
    assert y.flatten().tolist() == pytest.approx([1.0 + 2.0 * (-z * r + d), 1.0 + 2.0 * (z * r + d)])
    found = torch.autograd.grad(loss, [norm.mean, norm.variance])
    assert [float(g) for g in found] == pytest.approx([2.0 - 3.0, 1.0 - 4.0])
    assert norm(x).flatten().tolist() == pytest.approx([1.0 + 2.0 * (v - 2.0) / 1.001**0.5 for v in (1.0, 5.0)])


def test_corrections_are_bounded() -> None:
    norm, x = BatchRenorm(1, 1), 1e4 * torch.tensor([[[1.0], [5.0]]])
    y, _ = norm.trained(x, True)
    assert y.flatten().tolist() == pytest.approx([-3.0 + 5.0, 3.0 + 5.0], rel=1e-4)


def test_moments_move_by_a_hundredth_of_the_way() -> None:
    norm = BatchRenorm(1, 1)
    optimizer = crossq.RunningAverage([norm.mean, norm.variance])
    _, loss = norm.trained(torch.tensor([[[1.0], [5.0]]]), False)
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    optimizer.step()
    assert float(norm.mean.detach()) == pytest.approx(0.03)
    assert float(norm.variance.detach()) == pytest.approx(1.03)


def test_a_refused_step_leaves_moments_and_nothing_waits_to_know() -> None:
    moment = torch.nn.Parameter(torch.ones(2))
    optimizer = crossq.RunningAverage([moment])
    for refused, value in ((True, math.nan), (False, 1.0)):
        moment.grad = torch.full((2,), value)
        take_step(optimizer, torch.tensor(refused))
        assert moment.tolist() == pytest.approx([1.0 if refused else 0.99] * 2)
    assert optimizer.found_inf is None and optimizer._step_supports_amp_scaling  # pyright: ignore


def rows(n: int, update: int = 2) -> dict[str, Any]:
    return {
        "action": torch.rand(n, 2), "return": torch.randn(n), "discount": torch.full((n,), 0.9), "update": update,
        "noise": torch.rand(n, 2), "next": inputs(n), "next_action": torch.rand(n, 2), "next_logp": torch.randn(n),
    }  # fmt: skip


def test_both_pairs_are_one_batch_and_targets_pass_no_gradient() -> None:
    torch.manual_seed(0)
    agent: Any = CFG.build(SPEC).agent
    agent.set_exploration(CFG, 10**6)
    x = TrainBatch(inputs(6), rows(6), None)
    loss = crossq.loss_fn(agent, x, CFG)
    totals: Any = loss.total
    stack: RenormedMLP = agent.critics.stack
    pairs = torch.cat([torch.cat([x.inputs.obs, x["action"]], 1), torch.cat([x["next"].obs, x["next_action"]], 1)])  # pyright: ignore
    both = stack.trained(pairs, True)[0].squeeze(-1)
    y = x["return"] + 0.9 * (both[:, 6:].detach().amin(0) - 0.5 * x["next_logp"])
    expected = 0.5 * ((both[:, :6] - y) ** 2).mean(1).sum()
    torch.testing.assert_close(totals["critic"], expected)
    weights = [*stack.weights]
    for a, b in zip(torch.autograd.grad(totals["critic"], weights, retain_graph=True),
                    torch.autograd.grad(expected, weights), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b)
    alone = stack.trained(pairs[:6], True)[0].squeeze(-1)
    assert not torch.allclose(alone, both[:, :6], atol=1e-3)


def test_output_layers_are_float32_in_bf16() -> None:
    """Networks without hidden layers are their output layers alone."""
    torch.manual_seed(0)
    stack, agent = RenormedMLP(2, 5, (), "relu", 1), ps.CrossQ(net=ps.Net(hidden=())).build(SPEC).agent
    x = TrainBatch(inputs(6), rows(6), None)

    def found() -> list[torch.Tensor]:
        loss: Any = crossq.loss_fn(agent, x, CFG)  # pyright: ignore[reportArgumentType]
        return [stack.trained(x.inputs.obs.repeat(1, 2)[:, :5], False)[0], loss.total["actor"]]  # pyright: ignore

    full = found()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(found(), full, rtol=1e-5, atol=1e-5)


def test_actor_and_temperature_wait_for_their_turn() -> None:
    cfg = ps.CrossQ(policy_delay=3, net=CFG.net)
    agent: Any = cfg.build(SPEC).agent
    totals = [crossq.loss_fn(agent, TrainBatch(inputs(4), rows(4, update), None), cfg).total for update in range(3)]
    assert [sorted(total) for total in totals] == [["critic", "moments"]] * 2 + [
        ["actor", "alpha", "critic", "moments"]
    ]


def test_acting_is_pure_and_only_training_moves_moments() -> None:
    sampler = ps.SerialSampler(T=4, B=4).build(toy.ContinuousBandit, 0)
    cfg = ps.CrossQ(batch_size=8, replay_ratio=2.0, learning_starts=8, net=CFG.net)
    policy = cfg.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    moments = {name: x for name, x in policy.agent.state_dict().items() if name.endswith(("mean", "variance"))}
    before = {name: x.clone() for name, x in moments.items()}
    batch, _ = sampler.obtain_samples(0)
    assert all(torch.equal(x, before[name]) for name, x in moments.items())
    for itr in range(3):
        train_one_step(policy, batch)
        batch, _ = sampler.obtain_samples(itr + 1)
    assert all(not torch.equal(x, before[name]) for name, x in moments.items() if "critics" in name)
    check_agent(CFG.build(SPEC, 0).agent, SPEC, explores=False)


def test_there_are_no_target_networks() -> None:
    policy: Any = CFG.build(SPEC)
    assert not any(name.startswith("target") for name in policy.agent.state_dict())
    assert {"critic", "actor", "moments"} <= policy.optimizers.keys()
    for kind in ("adam", "radam"):
        policy = replace(CFG, optimizer=kind).build(SPEC)
        betas = [group["betas"] for name in ("critic", "actor") for group in policy.optimizers[name].param_groups]
        assert betas == [(0.5, 0.999)] * 2
    assert replace(CFG, optimizer="rmsprop").beta1 == 0.5  # of no effect


@pytest.mark.slow
def test_the_best_action_is_found() -> None:
    cfg = ps.CrossQ(lr="linear(1e-2, 0)", discount=0.9, batch_size=32, replay_ratio=12.0, learning_starts=100, alpha=0.005,
                    policy_delay=1, replay=ps.ReplaySettings(capacity=4_000), net=ps.Net(hidden=(32,)))  # fmt: skip
    sampler = ps.SerialSampler(T=32, B=8).build(toy.ContinuousBandit, 0)
    policy = cfg.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    for itr in range(30):
        policy.set_progress(itr / 30)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(0, 16).mean_return > -0.02


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def experiment(name: str, steps: int) -> ps.Experiment:
        run = ps.RunConfig(steps=steps, dir=str(tmp_path / name), eval_episodes=0, progress="off", seed=3)
        algo = ps.CrossQ(learning_starts=8, batch_size=8, replay_ratio=8.0, net=CFG.net)
        return ps.Experiment("Pendulum-v1", algo, ps.SerialSampler(T=2, B=2), run)

    whole = ps.train(experiment("whole", 48))
    ps.train(experiment("parts", 24))
    parts = ps.resume(tmp_path / "parts", {"run.steps": 48})
    both = [x.policy.agent.state_dict() for x in (whole, parts)]
    assert all(torch.equal(x, both[1][name]) for name, x in both[0].items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 0.01}, r"tau=0.01.*CrossQ, which has no target networks; leave them out, or use SAC"),
        ({"target_interval": 2}, r"target_interval=2 with CrossQ, which has no target networks"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1.0 with CrossQ, whose moments it would scale; use None"),
        ({"net": ps.Net(norm="layer")}, r"CrossQ with net.norm='layer'.*batch renorm"),
        ({"net": ps.Net(use_sde=True)}, r"CrossQ with .*net.use_sde=True"),
        ({"net": ps.Net(init="orthogonal")}, r"CrossQ with .*net.init='orthogonal'"),
        ({"beta1": 1.0}, r"beta1=1.0, by which running gradients would never move; expected less"),
        (
            {"beta1": 0.7, "optimizer": "rmsprop"},
            r"beta1=0.7 with optimizer='rmsprop', which averages no gradients; leave",
        ),
        ({"beta1": "linear(0.9, 0.5)"}, r"beta1='linear.*expected float"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.CrossQ(**settings)


def test_networks_of_ones_own_are_refused() -> None:
    cfg = ps.CrossQ(agent=lambda spec, cfg: ps.control_agent(spec, cfg, actor=torch.nn.Linear(3, 4)))
    with pytest.raises(ConfigError, match="CrossQ with networks of your own, which have no batch renorm; use SAC"):
        cfg.build(SPEC)


def test_beta1_is_that_of_the_settings_after_a_change_and_in_a_resumed_run() -> None:
    policy, twin = CFG.build(SPEC), replace(CFG, beta1=0.9).build(SPEC)
    twin.load_state_dict(policy.state_dict())
    assert {name: x.param_groups[0].get("betas") for name, x in twin.optimizers.items()} == {
        "critic": (0.9, 0.999),
        "actor": (0.9, 0.999),
        "moments": None,
    }
    policy.taking_settings_of(twin)()
    assert policy.optimizers["critic"].param_groups[0]["betas"] == (0.9, 0.999)
