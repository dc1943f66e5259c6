"""A small DQN whose training from replay is looked into."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import penstock as ps
from penstock.algos.dqn import DQN
from penstock.core.tree import tree_leaves
from penstock.envs.toy import ThreeStep
from penstock.learn.policy import Policy
from penstock.replay.replay import ReplaySettings
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler

UNIFORM = ReplaySettings(capacity=400)
PRIORITIZED = ReplaySettings(capacity=400, index="prioritized")
CFG = DQN(lr=1e-3, batch_size=8, replay_ratio=4.0, learning_starts=20, target_interval=3, replay=UNIFORM,
          net=ps.Net(hidden=(8,), activation="relu"))  # fmt: skip


def built(cfg: DQN, env: Any = ThreeStep, T: int = 4, B: int = 4, seed: int = 2) -> tuple[Policy, LiveSampler, Any]:
    sampler = SerialSampler(T=T, B=B).build(env, 1)
    policy = cfg.build(sampler.spec, seed)
    sampler.initialize(policy.agent)
    return policy, sampler, policy.replay_schedule


def parameters(policy: Policy) -> list[Tensor]:
    return [x.clone() for x in tree_leaves(policy.agent.state_dict()) if isinstance(x, Tensor)]
