"""An environment whose observations are stacks of the last four frames, for runs in processes of their own; no test module."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Dot(gym.Env[Any, Any]):
    """A dot that the action moves, drawn on 36 x 36; [4, 36, 36] uint8, the first frame of an episode repeated."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._at, self._left = int(self.np_random.integers(1, 35)), int(self.np_random.integers(5, 20))
        self._stack = np.repeat(self._frame()[None], 4, 0)
        return self._stack, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._at = min(max(self._at + 2 * int(action) - 1, 0), 35)
        self._left -= 1
        self._stack = np.concatenate([self._stack[1:], self._frame()[None]])
        return self._stack, self._at / 35, self._at in (0, 35), self._left == 0, {}

    def _frame(self) -> Any:
        frame = np.zeros((36, 36), np.uint8)
        frame[self._at, self._left % 36] = 255
        return frame


class Blank(Dot):
    """The frames before an episode are zeros."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._stack[:-1] = 0
        return self._stack, {}
