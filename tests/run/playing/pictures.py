"""Environments that draw, or do not, in a module that worker processes import quickly."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Pictures(gym.Env[Any, Any]):
    """Renders, and ends after 5 steps."""

    metadata: Any = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.t = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 5, False, {}

    def render(self) -> Any:
        return np.full((32, 48, 3), 40 * self.t, np.uint8) if self.render_mode else None


class Blind(Pictures):
    """Draws nothing."""

    def render(self) -> Any:
        return None
