"""TD3's target actions by hand and the schedule of its noise; the rest is in test_off_policy_conformance.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.algos.td3 import postprocess_fn
from penstock.core.batch import TrainBatch
from tests.algos.filled import trained
from tests.algos.off_policy_slow import TD3


def test_target_actions_by_hand() -> None:
    """mu' = 0.2, 0.9, 0.2, noise 0.2 z with z = 1, 1, 10: 0.4, 1 (the box), 0.7 (clipped at 0.5)."""
    seen: list[torch.Tensor] = []
    points = torch.tensor([[0.2], [0.9], [0.2]])

    class Fixed:
        target_point = staticmethod(lambda following: points)
        scaled_reward = staticmethod(lambda reward: reward)

        def target_q(self, following: Any, action: torch.Tensor) -> torch.Tensor:
            seen.append(action)
            return torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])

    z = torch.tensor([[1.0], [1.0], [4.0]], dtype=torch.float64)
    rows = {"next": None, "noise": torch.distributions.Normal(0.0, 1.0).cdf(z), "return": torch.ones(3),
            "discount": torch.tensor([0.5, 0.0, 0.5])}  # fmt: skip
    agent: Any = Fixed()
    ready = postprocess_fn(agent, TrainBatch(None, rows, None), TD3.cfg)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(seen[0].float(), torch.tensor([[0.4], [1.0], [0.7]]))
    assert ready["target"].tolist() == [1.5, 1.0, 2.0]


def test_exploration_noise_is_a_schedule() -> None:
    policy, _ = trained(replace(TD3.cfg, exploration_noise="linear(0.5, 0.1, steps=16)"), TD3.env, 1)
    agent: Any = policy.agent
    assert policy.replay_schedule is not None
    steps = policy.replay_schedule.collected
    assert 0 < steps < 16 and float(agent.spread) == pytest.approx(0.5 - 0.4 * steps / 16)
