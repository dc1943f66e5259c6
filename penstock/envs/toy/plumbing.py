"""Environments that say where a row came from, for tests of the record."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.envs.toy.base import Toy, box, vector


class Echo(Toy):
    """Observation (slot, episode, t): the `slot` it was made with, resets before this one, steps so far.

    The reward is `Echo.reward_of(obs, action)` of the observation acted on, exact in float32. Episodes of `length`
    steps end by truncation where `truncate`, else by termination. The episode number is carried over from one reset to
    the next, so a fresh instance does not reproduce an old one: `get_state` and `set_state` do.
    """

    def __init__(self, slot: int = 0, length: int = 7, truncate: bool = False, actions: int = 4) -> None:
        super().__init__(box(-np.inf, np.inf, 3), spaces.Discrete(actions))
        self.slot, self.length, self.truncate = slot, length, truncate
        self.episode = -1

    @staticmethod
    def reward_of(obs: Any, action: Any) -> Any:
        """64 slot + 8 (episode mod 8) + (t mod 8) + action / 8, for one observation or [..., 3] of them."""
        obs = np.asarray(obs)
        return 64 * obs[..., 0] + 8 * (obs[..., 1] % 8) + obs[..., 2] % 8 + np.asarray(action) / 8

    def get_state(self) -> dict[str, int]:
        """All that the environment is at this moment."""
        return {"episode": self.episode, "t": self.t}

    def set_state(self, state: dict[str, int]) -> None:
        """Makes it what it was when `get_state` was called."""
        self.episode, self.t = state["episode"], state["t"]

    def begin(self) -> None:
        self.episode += 1

    def observe(self) -> Any:
        return vector(self.slot, self.episode, self.t)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        end = self.t + 1 >= self.length
        return float(self.reward_of(self.observe(), action)), end and not self.truncate, end and self.truncate


class Counter(Toy):
    """Observation: steps so far; reward: the observation acted on, so a return of n steps is n (n - 1) / 2.

    Terminates at `terminate_at` steps and is truncated at `truncate_at`; None is never, and both may come together.
    """

    def __init__(self, terminate_at: int | None = 5, truncate_at: int | None = None) -> None:
        super().__init__(box(0, np.inf), spaces.Discrete(2))
        self.terminate_at, self.truncate_at = terminate_at, truncate_at

    def observe(self) -> Any:
        return vector(self.t)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return float(self.t), self.t + 1 == self.terminate_at, self.t + 1 == self.truncate_at
