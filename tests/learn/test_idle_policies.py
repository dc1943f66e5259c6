"""Policies that nobody is sent to: a batch without a valid row leaves networks and normalisers as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.envs.toy import TeamBits

NET = ps.Net(hidden=(4,), normalize_obs=True, normalize_reward=True)
IDLE = {
    "ppo": ps.PPO(net=NET),
    "mappo": ps.MAPPO(net=NET),
    "a2c": ps.A2C(net=NET),
    "lstm": ps.PPO(net=ps.Net(hidden=(4,), recurrent="lstm")),
    "dqn": ps.DQN(net=NET, learning_starts=0),
    "sac": ps.DiscreteSAC(net=NET, learning_starts=0),
}


def late(agent: str, episode: int, seed: int) -> str:
    """Everybody to the first policy until episode 3, then to the second until episode 7."""
    return "busy" if episode < 3 or episode >= 7 else "idle"


def state(policy: Any) -> list[torch.Tensor]:
    """Parameters and statistics; of buffers as wide as the batch nothing."""
    return [x.clone() for name, x in policy.agent.state_dict().items() if not name.endswith("_extra_state")]


@pytest.mark.parametrize("name", IDLE)
def test_who_plays_nobody_learns_nothing_and_then_learns(name: str) -> None:
    algo = ps.Policies({"busy": ps.PPO(net=NET), "idle": IDLE[name]}, late, {"busy": 2, "idle": 2})
    sampler = ps.SerialSampler(T=8, B=2).build(algo.seat(TeamBits), 0)
    policies = algo.build(sampler.specs, 0)
    sampler.initialize(policies.agents)
    idle, rows, sat, learned = policies["idle"], 0, 0, False
    try:
        for itr in range(10):
            before = state(idle)
            batch, _ = sampler.obtain_samples(itr)
            count = int(batch["idle"].valid.sum())
            assert sum(int(part.valid.sum()) for part in batch.values()) == batch.agent_steps
            metrics: dict[str, Any] = ps.train_one_step(policies, batch)
            after = state(idle)
            assert all(bool(torch.isfinite(x).all()) for x in after if x.is_floating_point())
            assert all(np.isfinite(x) for x in metrics.values()), metrics
            rows += count
            if rows == 0:
                sat += 1
                assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
                assert idle.updates == 0
            elif count:
                learned = learned or any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
    finally:
        sampler.shutdown()
    assert sat and rows and learned
