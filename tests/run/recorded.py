"""What tests of recording share: short settings, and a check that an episode happened as it says."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

QUIET = (
    "--sampler.T", "16", "--sampler.B", "4", "--run.steps", "128", "--run.eval-episodes", "1",
    "--run.progress", "off",
)  # fmt: skip


def replayed(episode: Any) -> None:
    """Raises AssertionError unless CartPole answers the episode's actions as it says."""
    env: Any = gym.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    env.state = episode.obs[0].astype(np.float64)
    for t, action in enumerate(episode.action):
        obs, reward, terminated, _, _ = env.step(action)
        assert obs == pytest.approx(episode.obs[t + 1], abs=1e-3)
        assert (float(reward), terminated) == (episode.reward[t], episode.terminated and t + 1 == len(episode))
