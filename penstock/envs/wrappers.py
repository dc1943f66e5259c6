"""Wrappers that change what one environment shows."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.spec import MASK_KEY


class ActionMask(gym.Wrapper[Any, Any, Any, Any]):
    """Shows `info[key]` as `obs["action_mask"]`, an int8 array [sum of action sizes] in which 1 is a legal action.

    The observation becomes `{"obs": obs, "action_mask": mask}`; a Dict observation keeps its keys and gains the mask.
    A MultiDiscrete mask is the concatenation over its dimensions; the info may also hold a tuple of arrays.

    Raises:
        ConfigError: the action space is neither Discrete nor MultiDiscrete, or "action_mask" is observed already.
        EnvWorkerError: a reset or step gave no `info[key]`, or one of another length.
    """

    def __init__(self, env: gym.Env[Any, Any], key: str = MASK_KEY) -> None:
        super().__init__(env)
        self._key = key
        self._size = _choices(env.action_space)
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
        return self._shown(obs, info, "step"), reward, terminated, truncated, info

    def _shown(self, obs: Any, info: dict[str, Any], method: str) -> dict[str, Any]:
        if self._key not in info:
            raise EnvWorkerError(
                f"{method} gave no info[{self._key!r}]; its keys are {sorted(map(str, info))}; give the action mask "
                "there in reset and in every step, or name its key in mask_key"
            )
        mask = _flat(info[self._key])
        if mask.size != self._size:
            raise EnvWorkerError(
                f"{method} gave info[{self._key!r}] of {mask.size} elements; expected {self._size}, one for each "
                "choice of the action space"
            )
        return {**(obs if self._merge else {"obs": obs}), MASK_KEY: mask}


def _choices(space: Any) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    raise ConfigError(f"ActionMask on the action space {space!r}; expected Discrete or MultiDiscrete")


def _flat(mask: Any) -> npt.NDArray[np.int8]:
    parts = mask if isinstance(mask, (tuple, list)) else (mask,)
    return np.concatenate([np.ravel(part) for part in parts]).astype(np.int8)
