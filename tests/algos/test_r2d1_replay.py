"""What R2D1 keeps: priorities of fresh sequences against a slow loop, stored state, a uniform replay, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos.r2d1 import R2D1
from penstock.core.batch import SampleBatch
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.toy import RepeatPrevious, TMaze
from penstock.learn.experience import samples
from penstock.learn.policy import Policy
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import Replay, ReplaySettings
from penstock.run.trainer import Trainer
from penstock.samplers.serial import SerialSampler

BY_AGENT = ReplaySettings(
    capacity=4_000, index="prioritized", priority_alpha=0.7, priority_beta=0.5, fresh_priority="agent"
)
NET = ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8, prev_action=True, prev_reward=True)
SMALL = R2D1(
    lr=1e-3, discount=0.9, batch_size=6, replay_ratio=2.0, learning_starts=0, n_step=3, burn_in=4, train_length=8, state_interval=4,
    epsilon=0.3, target_interval=3, replay=BY_AGENT, net=NET,
)  # fmt: skip


def h(x: float, eps: float = 1e-3) -> float:
    """Pohlen et al. 2018, proposition A.2, as it stands there."""
    return math.copysign(1.0, x) * (math.sqrt(abs(x) + 1.0) - 1.0) + eps * x


def h_inverse(y: float, eps: float = 1e-3) -> float:
    """By bisection."""
    low, high = -1e6, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle, eps) < y else (low, middle)
    return low


def slow_target(reward: Any, value: Any, terminated: Any, truncated: Any, valid: Any, t: int, cfg: R2D1) -> float:
    """The target of row t of one slot, reward by reward."""
    forth, back = (h, h_inverse) if cfg.value_rescale else (float, float)
    total = 0.0
    for k in range(cfg.n_step):
        total += cfg.discount**k * float(reward[t + k])
        if terminated[t + k]:
            return forth(total)
        ends = truncated[t + k] or t + k + 1 == len(valid) or not valid[t + k + 1]
        if ends or k == cfg.n_step - 1:
            return forth(total + cfg.discount ** (k + 1) * back(float(value[t + k + 1])))
    raise AssertionError


def slow_priority(errors: list[float], eta: float) -> float:
    return eta * max(errors) + (1 - eta) * sum(errors) / len(errors) if errors else 0.0


def trained(env: Any, cfg: R2D1, batches: int, T: int = 4, B: int = 4) -> tuple[Policy, list[SampleBatch]]:
    """The policy after some training steps, and copies of their batches."""
    sampler = SerialSampler(T=T, B=B).build(env, 1)
    policy = cfg.build(sampler.spec, 2)
    sampler.initialize(policy.agent)
    kept: list[SampleBatch] = []
    for itr in range(batches):
        batch = sampler.obtain_samples(itr)[0]
        kept.append(batch.copy())
        train_one_step(policy, batch)
    return policy, kept


def replay_of(policy: Policy) -> Any:
    assert policy.experience is not None and isinstance(policy.experience.replay, Replay)
    return policy.experience.replay


def drawn(policy: Policy) -> Any:
    """(drawing, sample) of the policy's replay."""
    return next(samples(policy, 1, np.random.default_rng(0)))


@pytest.mark.parametrize("env", [lambda: TMaze(3), lambda: RepeatPrevious(length=5)], ids=["terminated", "truncated"])
def test_fresh_sequences_have_the_priority_of_what_the_agent_saw(env: Any) -> None:
    cfg = replace(SMALL, learning_starts=3_000)
    policy, kept = trained(env, cfg, 12)
    replay = replay_of(policy)
    rows = {
        name: np.concatenate([getattr(x, name) for x in kept])
        for name in ("reward", "terminated", "truncated", "valid")
    }
    q, q_max = (np.concatenate([x.info[name] for x in kept]) for name in ("q", "q_max"))
    assert replay.index.head == (48 - (4 + 8 + 3)) // 4 + 1
    mass = replay.index.arrays()["mass"]
    for unit in range(replay.index.head):
        for b in range(4):
            start = 4 * unit + cfg.burn_in
            own = [
                rows["reward"][:, b],
                q_max[:, b],
                *(rows[name][:, b] for name in ("terminated", "truncated", "valid")),
            ]
            errors = [abs(q[t, b] - slow_target(*own, t, cfg)) for t in range(start, start + 8) if rows["valid"][t, b]]
            assert mass[unit, b] == pytest.approx((slow_priority(errors, cfg.eta) + 1e-6) ** 0.7, rel=1e-4)
    error = np.array([slow_priority([0.25], cfg.eta)])
    replay.index.update(np.array([0]), np.array([0]), error)
    assert replay.index.arrays()["mass"][0, 0] == pytest.approx((0.25 + 1e-6) ** 0.7)


def test_a_sequence_begins_with_the_state_that_was_recorded_there() -> None:
    """Also after a batch that does not go on where the last one ended, as after a resume that lost a slot."""
    cfg = replace(SMALL, replay=replace(BY_AGENT, index="uniform"), learning_starts=3_000)
    sampler = SerialSampler(T=2, B=3).build(lambda: TMaze(3), 1)
    policy = cfg.build(sampler.spec, 2)
    sampler.initialize(policy.agent)
    recorded: dict[bytes, Any] = {}
    last = np.zeros(3, np.float32)
    for itr in range(40):
        batch = sampler.obtain_samples(itr)[0].copy()
        if itr in (0, 19):  # lost: nothing follows on batch 18
            continue
        batch.reward[:] = np.random.default_rng(itr).random(batch.reward.shape)  # tells which row a sample begins at
        batch.prev_reward[0], last = last, batch.reward[-1].copy()
        for b in range(3):
            recorded[batch.reward[:, b].tobytes()] = tree_map(lambda s, b=b: s[b], batch.state)
        train_one_step(policy, batch)
    head, units = replay_of(policy).storage.head, replay_of(policy).index
    assert head == 38 * 2 + 4 and len(units) > 20
    for _ in range(20):
        _, x = drawn(policy)
        for n in range(cfg.batch_size):
            state = recorded[x["reward"][:2, n].numpy().tobytes()]
            assert all(np.array_equal(a[n].numpy(), b) for a, b in zip(tree_leaves(x.state), tree_leaves(state)))


def test_a_uniform_replay_needs_no_priorities() -> None:
    policy, _ = trained(RepeatPrevious, replace(SMALL, replay=replace(BY_AGENT, index="uniform")), 20)
    _, x = drawn(policy)
    assert policy.updates > 5 and "weight" not in x.rows


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    exp = ps.Experiment(
        "penstock.envs.toy:RepeatPrevious", SMALL, SerialSampler(T=4, B=4), ps.RunConfig(steps=10_000, seed=3)
    )

    def steps(trainer: Trainer, count: int) -> list[dict[str, float]]:
        rows = [trainer.train() for _ in range(count)]
        return [{k: v for k, v in row.items() if k.startswith(("train/", "replay/", "rollout/"))} for row in rows]

    with Trainer(exp, tmp_path / "whole") as whole:
        steps(whole, 15)
        expected = steps(whole, 15)
    with Trainer(exp, tmp_path / "part") as first:
        steps(first, 15)
        first.save()
    with Trainer(exp, tmp_path / "part") as second:
        second.restore()
        assert steps(second, 15) == expected
    pairs = zip(whole.policy.agent.state_dict().items(), second.policy.agent.state_dict().items())
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs) and whole.policy.updates > 10
