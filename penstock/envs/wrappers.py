"""Wrappers that change what one environment shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.errors import ConfigError, EnvWorkerError, nearest
from penstock.core.spec import MASK_KEY, choices
from penstock.envs.spaces import is_text, space_to_spec


class DropKeys(gym.ObservationWrapper[Any, Any, Any]):
    """Shows a Dict observation without some of its keys.

    Raises:
        ConfigError: the observation is no Dict, has no such key, or would be empty.
    """

    def __init__(self, env: gym.Env[Any, Any], keys: Sequence[str]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            raise ConfigError(f"drop={tuple(keys)} with the observation space {space!r}; expected a Dict")
        for key in keys:
            if key not in space.spaces:
                raise ConfigError(f"drop={tuple(keys)}: the observation has no {key!r}; {nearest(key, space.spaces)}")
        self._kept = [key for key in space.spaces if key not in keys]
        if not self._kept:
            raise ConfigError(f"drop={tuple(keys)} leaves nothing of the observation; keep one of its keys")
        self.observation_space = spaces.Dict({key: space.spaces[key] for key in self._kept})

    def observation(self, observation: Any) -> dict[str, Any]:
        """The keys that are kept."""
        return {key: observation[key] for key in self._kept}


class TextBytes(gym.ObservationWrapper[Any, Any, Any]):
    """Shows every text in the observation as its bytes in UTF-8, an uint8 array [size] with zeros behind.

    Raises:
        ConfigError: the observation holds no text.
        EnvWorkerError: a text is longer than `size` bytes.
    """

    def __init__(self, env: gym.Env[Any, Any], size: int) -> None:
        super().__init__(env)
        self._size = size
        self.observation_space = self._shown_space(env.observation_space)
        if self.observation_space == env.observation_space:
            raise ConfigError(f"text={size} with the observation space {env.observation_space!r}, which has no text")

    def observation(self, observation: Any) -> Any:
        """The observation with bytes in place of text."""
        if isinstance(observation, str):
            code = observation.encode()
            if len(code) > self._size:
                raise EnvWorkerError(f"text {observation!r} is {len(code)} bytes long; set text={len(code)} or more")
            return np.frombuffer(code.ljust(self._size, b"\0"), np.uint8).copy()
        if isinstance(observation, dict):
            return {key: self.observation(below) for key, below in observation.items()}
        return tuple(map(self.observation, observation)) if isinstance(observation, tuple) else observation

    def _shown_space(self, space: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: self._shown_space(below) for key, below in space.spaces.items()})
        if isinstance(space, spaces.Tuple):
            return spaces.Tuple([self._shown_space(below) for below in space.spaces])
        return spaces.Box(0, 255, (self._size,), np.uint8) if is_text(space) else space


class WeightedReward(gym.Wrapper[Any, Any, Any, Any]):
    """Rewards of several objectives as one number, their weighted sum.

    Args:
        weights: one for each objective; None for the plain sum. `functools.partial(WeightedReward, weights=(1, 0.1))`.

    Raises:
        EnvWorkerError: a step gave another number of rewards.
    """

    def __init__(self, env: gym.Env[Any, Any], weights: Sequence[float] | None = None) -> None:
        super().__init__(env)
        self._weights = weights if weights is None else np.asarray(weights, np.float64)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As the environment's, the reward being one number."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        rewards = np.asarray(reward, np.float64)
        if self._weights is not None and rewards.shape != self._weights.shape:
            raise EnvWorkerError(f"rewards {rewards.tolist()} with weights {self._weights.tolist()}; make them fit")
        one = rewards.sum() if self._weights is None else rewards @ self._weights
        return obs, float(one), terminated, truncated, info


class ActionMask(gym.Wrapper[Any, Any, Any, Any]):
    """Shows `info[key]` as `obs["action_mask"]`, an int8 array [sum of action sizes] in which 1 is a legal action.

    The observation becomes `{"obs": obs, "action_mask": mask}`; a Dict observation keeps its keys and gains the mask.
    A MultiDiscrete mask is the concatenation over its dimensions, a MultiBinary one has two elements for each bit (off,
    on), and that of a Dict or Tuple is the concatenation over its parts, boxes left out; the info may also hold a tuple
    or dict of arrays. An episode's last step may give none.

    Raises:
        ConfigError: the action space has no choices, or "action_mask" is observed already.
        EnvWorkerError: a reset or step gave no `info[key]`, or one of another length.
    """

    def __init__(self, env: gym.Env[Any, Any], key: str = MASK_KEY) -> None:
        super().__init__(env)
        self._key = key
        self._size = sum(map(sum, choices(space_to_spec(env.action_space, "action"))))
        if not self._size:
            raise ConfigError(
                f"ActionMask on the action space {env.action_space!r}, which has no choices to mask; expected "
                "Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple with one of them"
            )
        shown = env.observation_space
        self._merge = isinstance(shown, spaces.Dict)
        below = dict(shown.spaces) if isinstance(shown, spaces.Dict) else {"obs": shown}
        if MASK_KEY in below:
            raise ConfigError(f"the observation has a key {MASK_KEY!r} already; drop ActionMask (mask_key=None)")
        self.observation_space = spaces.Dict({**below, MASK_KEY: spaces.MultiBinary(self._size)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The observation with its mask, and the info."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._shown(obs, info, "reset"), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As the environment's, the observation with its mask."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        over = bool(terminated or truncated)
        return self._shown(obs, info, "step", over), reward, terminated, truncated, info

    def _shown(self, obs: Any, info: dict[str, Any], method: str, over: bool = False) -> dict[str, Any]:
        if self._key not in info and not over:
            raise EnvWorkerError(
                f"{method} gave no info[{self._key!r}]; its keys are {sorted(map(str, info))}; give the action mask "
                "there in reset and in every step, or name its key in mask_key"
            )
        mask = flat_mask(info[self._key]) if self._key in info else np.ones(self._size, np.int8)
        if mask.size != self._size:
            raise EnvWorkerError(
                f"{method} gave info[{self._key!r}] of {mask.size} elements; expected {self._size}, one for each "
                "choice of the action space"
            )
        return {**(obs if self._merge else {"obs": obs}), MASK_KEY: mask}


def copy_obs(env: Any) -> Any:
    """The environment of many agents itself, whose observations are copies from now on.

    For one that changes an observation after it was returned, such as SuperSuit's frame_stack_v1.
    """
    for name in ("reset", "step", "last", "observe"):
        if callable(call := getattr(env, name, None)):
            setattr(env, name, _copying(call, bare=name == "observe"))
    return env


def _copying(call: Callable[..., Any], bare: bool) -> Callable[..., Any]:
    """The call with a copy of the observation that it returns, `bare` or as the first of several."""

    def copying(*args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        if bare:
            return deepcopy(found)
        return (deepcopy(found[0]), *found[1:]) if isinstance(found, tuple) and found else found

    return copying


def flat_mask(mask: Any) -> npt.NDArray[np.int8]:
    """The mask of an action as one array [choices]; parts of a dict stand in the order of their keys."""
    if isinstance(mask, Mapping):
        mask = [mask[key] for key in sorted(mask)]
    if isinstance(mask, (tuple, list)):
        return np.concatenate([flat_mask(part) for part in mask])
    return np.ravel(mask).astype(np.int8)
