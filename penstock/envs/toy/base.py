"""Base of all toy environments: seeding, the step counter, and the results of `reset` and `step`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces


class Toy(gym.Env[Any, Any]):
    """A small environment: `begin` opens an episode, `observe` shows it, `act` advances it; `t` counts its steps."""

    t = 0

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = action_space

    def begin(self) -> None:
        """Draws the hidden values of an episode; called at each reset."""

    def observe(self) -> Any:
        """The observation at step `t`, in new memory."""
        raise NotImplementedError

    def act(self, action: Any) -> tuple[float, bool, bool]:
        """Reward, terminated, truncated of a step that `t` does not count yet."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation of an episode, and an empty info."""
        super().reset(seed=seed)
        self.t = 0
        self.begin()
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step by Gymnasium's API, with an empty info."""
        reward, terminated, truncated = self.act(action)
        self.t += 1
        return self.observe(), reward, terminated, truncated, {}

    def sign(self) -> float:
        """-1.0 or 1.0, each with probability one half."""
        return 1.0 if self.np_random.random() < 0.5 else -1.0


def box(low: float, high: float, size: int = 1) -> spaces.Box:
    """A float32 vector space."""
    return spaces.Box(low, high, (size,), np.float32)


def vector(*values: float) -> npt.NDArray[np.float32]:
    """A new float32 vector."""
    return np.array(values, np.float32)


def one_hot(index: int, size: int) -> npt.NDArray[np.float32]:
    """A new float32 vector with a 1 at `index`, all zeros if that lies outside."""
    out = np.zeros(size, np.float32)
    if 0 <= index < size:
        out[index] = 1.0
    return out
