"""What the tests of R2D1 compare with: its formulas reward by reward and row by row, and a small policy that was trained."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import penstock as ps
from penstock.algos.r2d1 import R2D1
from penstock.core.batch import SampleBatch
from penstock.learn.policy import Policy
from penstock.learn.train_ops import samples, train_one_step
from penstock.replay.replay import Replay, ReplaySettings
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
    assert policy.replay_schedule is not None and isinstance(policy.replay_schedule.replay, Replay)
    return policy.replay_schedule.replay


def drawn(policy: Policy) -> Any:
    """(drawing, sample) of the policy's replay."""
    return next(samples(policy, 1, np.random.default_rng(0)))
