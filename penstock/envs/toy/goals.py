"""A task whose goal random actions hardly ever reach."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.envs.toy.base import Toy


class BitFlip(Toy):
    """n bits, and n bits to be reached; action i flips bit i (Andrychowicz et al. 2017, section 3.1).

    The reward is -1 for each step that does not end at the goal, and 0 for the one that does, which terminates; after
    n steps the episode is truncated. From d bits apart the best return is 1 - d, so -(n / 2 - 1) on average. Random
    actions find the goal in about n of 2^n episodes; with 8 bits and more, learning needs hindsight.
    """

    def __init__(self, n: int = 8) -> None:
        bits = spaces.Box(0, 1, (n,), np.float32)
        names = ("observation", "achieved_goal", "desired_goal")
        super().__init__(spaces.Dict(dict.fromkeys(names, bits)), spaces.Discrete(n))
        self.n = n

    @staticmethod
    def compute_reward(achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Rewards [...] of goals [..., n], as Gymnasium-Robotics defines it."""
        return np.all(achieved_goal == desired_goal, -1).astype(np.float32) - 1

    @staticmethod
    def reward_and_end(achieved_goal: Any, desired_goal: Any, info: Any) -> tuple[Any, Any]:
        """float32 rewards [...], and bools [...]: the episode terminates."""
        reward = BitFlip.compute_reward(achieved_goal, desired_goal, info)
        return reward, reward == 0

    def begin(self) -> None:
        self._bits = self.np_random.integers(0, 2, self.n).astype(np.float32)
        self._goal = self._bits
        while np.array_equal(self._goal, self._bits):
            self._goal = self.np_random.integers(0, 2, self.n).astype(np.float32)

    def observe(self) -> Any:
        return {"observation": self._bits.copy(), "achieved_goal": self._bits.copy(), "desired_goal": self._goal.copy()}

    def act(self, action: Any) -> tuple[float, bool, bool]:
        self._bits[action] = 1 - self._bits[action]
        reward, terminated = self.reward_and_end(self._bits, self._goal, {})
        return float(reward), bool(terminated), self.t + 1 >= self.n
