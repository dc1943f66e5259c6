"""PQN: targets and losses by hand, tasks of known answers, and what does not fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.agents.q_agent import QAgent
from penstock.algos import pqn
from penstock.core.batch import Inputs, SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs import toy
from penstock.learn.train_ops import train_one_step

SPEC = EnvSpec(LeafSpec("box", (1,), "float32", -9.0, 9.0), LeafSpec("discrete", (), "int64", sizes=(2,)))
FAST = ps.PQN(lr="linear(2e-2, 0)", discount=0.9, q_lambda=0.5, epsilon=1.0, minibatch=64, net=ps.Net(
    hidden=(32,), activation="relu", norm="layer"))  # fmt: skip


class Table(nn.Module):
    """Q(s) = (s, 2 s - 3)."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.cat([obs, 2.0 * obs - 3.0], 1)


def agent(cfg: ps.PQN) -> QAgent:
    found: Any = ps.q_agent(SPEC, cfg, network=Table())
    return found


def batch(obs: list[float], reward: list[float], ends: dict[int, str] | None = None) -> SampleBatch:
    """One slot; `ends` says at which rows an episode ends and how, "reset" that a row is one."""
    T, ends = len(reward), ends or {}
    flags = {
        kind: torch.tensor([[ends.get(t) == kind] for t in range(T)]) for kind in ("terminated", "truncated", "reset")
    }
    zeros = torch.zeros(T + 1, 1)
    first = torch.cat([torch.tensor([[True]]), flags["reset"]])
    return SampleBatch(
        obs=torch.tensor(obs).reshape(-1, 1, 1), first=first, prev_action=zeros.long(),
        prev_reward=torch.cat([zeros[:1], torch.tensor(reward).unsqueeze(1)]),
        terminated=flags["terminated"], truncated=flags["truncated"], valid=~flags["reset"], info={}, state=None,
        version=torch.zeros(T, 1, dtype=torch.int64),
    )  # fmt: skip


def test_targets_by_hand() -> None:
    """max Q of s = 1, 4, 2, 6 is 1, 5, 2, 9; discount 1/2 and lambda 1/4, from the last row back."""
    cfg = ps.PQN(discount=0.5, q_lambda=0.25)
    x = pqn.postprocess_fn(agent(cfg), batch([1.0, 4.0, 2.0, 6.0], [10.0, 20.0, 30.0]), cfg)
    last = 30.0 + 0.5 * 9.0
    middle = 20.0 + 0.5 * (0.75 * 2.0 + 0.25 * last)
    first = 10.0 + 0.5 * (0.75 * 5.0 + 0.25 * middle)
    assert x["target"].squeeze(1).tolist() == pytest.approx([first, middle, last])


def test_targets_stop_at_terminals_and_bootstrap_at_truncations() -> None:
    cfg = ps.PQN(discount=0.5, q_lambda=1.0)
    x = pqn.postprocess_fn(
        agent(cfg), batch([1.0, 4.0, 2.0, 6.0], [10.0, 20.0, 30.0], {1: "terminated", 2: "reset"}), cfg
    )
    assert x["target"].squeeze(1)[:2].tolist() == pytest.approx([10.0 + 0.5 * 20.0, 20.0])
    x = pqn.postprocess_fn(
        agent(cfg), batch([1.0, 4.0, 2.0, 6.0], [10.0, 20.0, 30.0], {1: "truncated", 2: "reset"}), cfg
    )
    assert x["target"].squeeze(1)[:2].tolist() == pytest.approx([10.0 + 0.5 * 21.0, 20.0 + 0.5 * 2.0])


def test_the_loss_by_hand_and_its_gradient() -> None:
    """Half the squared error over valid rows: Q(4, 1) = 5 and Q(2, 0) = 2 for targets 7 and 1."""
    cfg = ps.PQN()
    obs = torch.tensor([[4.0], [2.0], [9.0]], requires_grad=True)
    inputs = Inputs(obs, None, None, None)  # pyright: ignore[reportArgumentType]
    rows = {"action": torch.tensor([1, 0, 0]), "target": torch.tensor([7.0, 1.0, 1e30])}
    loss = pqn.loss_fn(agent(cfg), TrainBatch(inputs, rows, torch.tensor([True, True, False])), cfg)
    assert float(loss.total.detach()) == pytest.approx(0.5 * (4.0 + 1.0) / 2)  # pyright: ignore
    assert float(loss.metrics["q"]) == pytest.approx(3.5)
    (slope,) = torch.autograd.grad(loss.total, obs)  # pyright: ignore
    assert slope.squeeze(1).tolist() == pytest.approx([2 * -2.0 / 2, 1.0 / 2, 0.0])


def trained(env: Any, algo: ps.PQN, batches: int = 12) -> tuple[Any, Any]:
    sampler = ps.SerialSampler(T=32, B=8).build(env, 0)
    policy = algo.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy, sampler


def q(policy: Any, *obs: float) -> Any:
    with torch.no_grad():
        rows = torch.tensor(obs).unsqueeze(1)
        return policy.agent(Inputs(rows, None, None, None)).numpy()  # pyright: ignore[reportArgumentType]


def test_the_better_arm_is_pulled() -> None:
    policy, sampler = trained(toy.Bandit, FAST)
    np.testing.assert_allclose(q(policy, 0.0), [[-1, 1]], atol=0.05)
    assert sampler.evaluate_agent(0, 16).mean_return == 1.0


def test_a_step_of_delay_costs_the_discount() -> None:
    policy, _ = trained(toy.TwoStep, FAST, 20)
    np.testing.assert_allclose(q(policy, 0.0, 1.0).max(-1), [0.9, 1.0], atol=0.07)


@pytest.mark.slow
def test_memory_keeps_what_was_seen() -> None:
    net = ps.Net(hidden=(32,), activation="relu", norm="layer", recurrent="lstm", recurrent_size=32)
    algo = ps.PQN(lr="linear(3e-3, 1e-4)", discount=0.5, q_lambda=0.5, epsilon="linear(1.0, 0.05, 0.5)", minibatch=64,
                  net=net)  # fmt: skip
    sampler = ps.SerialSampler(T=16, B=16).build("penstock.envs.toy:RepeatPrevious", 0)
    policy = algo.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    for itr in range(120):
        policy.set_progress(itr / 120)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(0, 16).mean_return > 0.8 * 14.0  # the first 2 of 16 steps pay nothing


def test_there_is_no_target_network_and_no_replay() -> None:
    policy = ps.PQN().build(SPEC)
    assert policy.replay_schedule is None
    assert not any(name.startswith("target") for name in policy.agent.state_dict())
    assert any("norms" in name for name in policy.agent.state_dict())


def test_epsilon_is_by_schedule_and_by_slot() -> None:
    policy: Any = ps.PQN(epsilon="linear(1.0, 0.2, 0.5)", ladder="ape-x").build(SPEC)
    policy.agent.set_slots(3)
    policy.set_progress(0.5, 100)
    np.testing.assert_allclose(policy.agent.epsilon, [0.2, 0.2**4.5, 0.2**8], rtol=1e-5)


def test_boxes_are_refused_by_what_fits() -> None:
    box = EnvSpec(SPEC.obs, LeafSpec("box", (2,), "float32", -1.0, 1.0))
    with pytest.raises(ConfigError, match=r"one discrete action.*use SAC, TD3 or DDPG for boxes"):
        ps.PQN().build(box)


@pytest.mark.slow
@pytest.mark.parametrize(
    "net", [FAST.net, *(ps.Net(hidden=(8,), norm="layer", recurrent=x, recurrent_size=8) for x in ("lstm", "gru"))]
)
def test_every_sampler_trains_the_same_bits(net: ps.Net) -> None:
    samplers = [ps.SerialSampler(T=8, B=6), ps.CpuSampler(T=8, B=6, workers=2), ps.GpuSampler(T=8, B=6, device="cpu")]
    found: list[list[torch.Tensor]] = []
    for settings in samplers:
        live = settings.build("CartPole-v1", 1)
        policy = ps.PQN(minibatch=24, epochs=2, epsilon=0.3, net=net).build(live.spec, seed=1)
        live.initialize(policy.agent)
        for itr in range(3):
            train_one_step(policy, live.obtain_samples(itr)[0])
        live.shutdown()
        found.append([p.detach().clone() for p in policy.agent.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def experiment(name: str, steps: int) -> ps.Experiment:
        run = ps.RunConfig(steps=steps, dir=str(tmp_path / name), eval_episodes=0, progress="off", seed=3)
        return ps.Experiment("CartPole-v1", ps.PQN(minibatch=16, epsilon=0.2), ps.SerialSampler(T=8, B=4), run)

    whole = ps.train(experiment("whole", 128))
    ps.train(experiment("parts", 64))
    parts = ps.resume(tmp_path / "parts", {"run.steps": 128})
    both = [x.policy.agent.state_dict() for x in (whole, parts)]
    assert all(torch.equal(x, both[1][name]) for name, x in both[0].items())
