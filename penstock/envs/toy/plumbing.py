"""Environments whose rows tell slot, episode and step they come from, for tests of the record."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.core.tree import tree_leaves
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
        """The whole state of the environment."""
        return {"episode": self.episode, "t": self.t}

    def set_state(self, state: dict[str, int]) -> None:
        """Inverse of `get_state`."""
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


class SeedEcho(Toy):
    """Observation (high, low, t): the two 16-bit halves of the seed it was reset with, and the steps so far.

    All else follows from these and the action, by static functions of whole arrays, so that any row can be checked,
    in whichever process it was written. Without a seed one is drawn. `info["echo"]` is t on every other step and -1
    in `reset`; `info["is_success"]` comes with the end.

    With `nested`, observation and action are trees of every kind of leaf. Raises AssertionError on an action that
    is not in the action space, and if the one before was changed after it was given.
    """

    longest = 9
    """Steps of the longest episode; the shortest has 1."""

    def __init__(self, nested: bool = False) -> None:
        seen: spaces.Space[Any] = box(0, np.inf, 3)
        taken: spaces.Space[Any] = spaces.Discrete(4)
        if nested:
            when = spaces.Tuple((spaces.Discrete(16, start=5), spaces.MultiBinary(4)))
            seen = spaces.Dict({"seed": spaces.MultiDiscrete([1 << 16, 1 << 16]), "when": when})
            pick = spaces.Tuple((spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 4], start=[1, -2])))
            taken = spaces.Dict({"arm": box(-1, 1, 2), "pick": pick, "bits": spaces.MultiBinary(2)})
        super().__init__(seen, taken)
        self.nested, self.seed = nested, 0
        self._given: tuple[Any, Any] = None, None

    @staticmethod
    def obs_of(seed: Any, t: Any, nested: bool) -> Any:
        """The observation at step t of the episode of this seed, for integers or [...] of them."""
        seed, t = np.asarray(seed, np.int64), np.asarray(t, np.int64)
        halves = np.stack([seed >> 16, seed & 0xFFFF], -1)
        if not nested:
            return np.concatenate([halves, t[..., None]], -1).astype(np.float32)
        bits = (t[..., None] >> np.arange(4)) & 1
        return {"seed": halves, "when": (t + 5, bits.astype(np.int8))}

    @staticmethod
    def place_of(obs: Any) -> tuple[Any, Any]:
        """Seed and step that an observation shows, or [...] of them, as int64."""
        if isinstance(obs, dict):
            halves, t = np.asarray(obs["seed"]), np.asarray(obs["when"][0]) - 5
        else:
            halves, t = np.asarray(obs)[..., :2].astype(np.int64), np.asarray(obs)[..., 2].astype(np.int64)
        return (halves[..., 0] << 16) + halves[..., 1], t

    @staticmethod
    def reward_of(seed: Any, t: Any, action: Any) -> Any:
        """float64 reward of an action, as the agent chose it, at step t; a weighted sum, boxes clipped."""
        total = np.asarray(seed, np.int64) % 509 + np.asarray(t) / 2
        if not isinstance(action, dict):
            return total + np.asarray(action) / 8
        arm = np.clip(action["arm"], np.float32(-1), np.float32(1))
        one, many = action["pick"]
        for x, weight in ((arm, 0.5), (action["bits"], 100.0), (np.asarray(one)[..., None], 3.0), (many, 7.0)):
            for i in range(np.shape(x)[-1]):
                total = total + np.asarray(x, np.float64)[..., i] * weight * (1 + i)
        return total

    @staticmethod
    def length_of(seed: Any) -> Any:
        """Steps of the episode of this seed."""
        seed = np.asarray(seed)
        return 1 + ((seed >> 16) + seed) % SeedEcho.longest

    @staticmethod
    def end_of(seed: Any) -> tuple[Any, Any]:
        """(terminated, truncated) of the last step of this seed's episode; one of them is True, or both."""
        kind = (np.asarray(seed) >> 4) % 4
        return kind != 2, kind >= 2

    def observe(self) -> Any:
        obs = self.obs_of(self.seed, self.t, self.nested)
        return {**obs, "when": (int(obs["when"][0]), obs["when"][1])} if self.nested else obs

    def act(self, action: Any) -> tuple[float, bool, bool]:
        given, then = self._given
        if any(not np.array_equal(x, y) for x, y in zip(tree_leaves(given), tree_leaves(then))):
            raise AssertionError(f"the action of the step before was {then} and is {given}; it was overwritten")
        if not self.action_space.contains(action):
            raise AssertionError(f"got the action {action!r}, which is not in {self.action_space}")
        self._given = action, deepcopy(action)
        terminated, truncated = self.end_of(self.seed)
        last = self.t + 1 == self.length_of(self.seed)
        return float(self.reward_of(self.seed, self.t, action)), bool(last and terminated), bool(last and truncated)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seed = 0
        super().reset(seed=seed, options=options)
        self.seed = int(self.np_random.integers(1 << 32)) if seed is None else seed
        return self.observe(), {"echo": -1.0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {"echo": float(self.t - 1)} if self.t % 2 else {}
        if terminated or truncated:
            info["is_success"] = bool(self.seed % 2)
        return obs, reward, terminated, truncated, info
