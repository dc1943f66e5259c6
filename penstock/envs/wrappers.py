"""Wrappers that change the observations of one environment, or its reset."""

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
from penstock.core.tree import tree_without
from penstock.envs.agents_wrappers import WeightedAgents, WeightedTurns, weighted_sum
from penstock.envs.conform.agents import ConformParallel, ConformTurns
from penstock.envs.conform.observations import conform_space, conformer
from penstock.envs.conform.values import conform_flag, conform_info, conform_reward
from penstock.envs.envpool import EnvPoolVectorEnv
from penstock.envs.pettingzoo import is_agents_env, takes_turns
from penstock.envs.spaces import is_text, space_to_spec


class DropKeys(gym.ObservationWrapper[Any, Any, Any]):
    """Shows a Dict observation without some of its keys; `a/b` is the key b of the Dict a.

    Raises:
        ConfigError: the observation is no Dict, has no such key, or would be empty.
    """

    def __init__(self, env: gym.Env[Any, Any], keys: Sequence[str]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            raise ConfigError(f"drop={tuple(keys)} with the observation space {space!r}; expected a Dict")
        known = key_paths(space)
        for key in keys:
            if key not in known:
                raise ConfigError(f"drop={tuple(keys)}: the observation has no {key!r}; {nearest(key, known)}")
        self._keys = tuple(keys)
        self.observation_space = shown = without_keys(space, keys)
        if not shown.spaces:
            raise ConfigError(f"drop={tuple(keys)} leaves nothing of the observation; keep one of its keys")

    def observation(self, observation: Any) -> dict[str, Any]:
        """The keys that are kept."""
        return tree_without(observation, self._keys)


class TextBytes(gym.ObservationWrapper[Any, Any, Any]):
    """Shows every text in the observation as its bytes in UTF-8, an uint8 array [size] with zeros behind.

    Raises:
        ConfigError: the observation holds no text.
        EnvWorkerError: a text is longer than `size` bytes.
    """

    def __init__(self, env: gym.Env[Any, Any], size: int) -> None:
        super().__init__(env)
        self._size = size
        self.observation_space = text_as_bytes(env.observation_space, size)
        if self.observation_space == env.observation_space:
            raise ConfigError(f"text={size} with the observation space {env.observation_space!r}, which has no text")

    def observation(self, observation: Any) -> Any:
        """The observation with bytes instead of text."""
        if isinstance(observation, str):
            return bytes_of(observation.encode(), self._size)
        if isinstance(observation, dict):
            return {key: self.observation(below) for key, below in observation.items()}
        return tuple(map(self.observation, observation)) if isinstance(observation, tuple) else observation


def bytes_of(text: bytes, size: int, of_dataset: str = "") -> npt.NDArray[np.uint8]:
    """[size] uint8 of a text in UTF-8, zeros behind.

    Args:
        of_dataset: the place in a dataset that it is from; else it is an environment's.

    Raises:
        ConfigError, EnvWorkerError: the text is longer, in a dataset or of an environment.
    """
    if len(text) > size:
        message = f"text {text.decode(errors='replace')!r} is {len(text)} bytes long; set text={len(text)} or more"
        raise (ConfigError if of_dataset else EnvWorkerError)(f"{of_dataset}{message} (--env-text {len(text)})")
    return np.frombuffer(text.ljust(size, b"\0"), np.uint8).copy()


def text_as_bytes(space: Any, size: int) -> Any:
    """The space in which every text is an uint8 array [size]; 0 leaves texts as they are."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: text_as_bytes(below, size) for key, below in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([text_as_bytes(below, size) for below in space.spaces])
    return spaces.Box(0, 255, (size,), np.uint8) if size and is_text(space) else space


def without_keys(space: Any, keys: Sequence[str]) -> Any:
    """The space of an observation of which `tree_without` leaves out these keys."""
    kept = tree_without(_as_dict(space), keys)
    return _as_space(kept) if isinstance(kept, dict) else kept


def key_paths(space: spaces.Dict, before: str = "") -> list[str]:
    """Its keys and those of Dicts in it, as `drop` names them: `a`, `a/b`."""
    out: list[str] = []
    for key, below in space.spaces.items():
        out.append(f"{before}{key}")
        out += key_paths(below, f"{before}{key}/") if isinstance(below, spaces.Dict) else []
    return out


def _as_dict(space: Any) -> Any:
    return {key: _as_dict(below) for key, below in space.spaces.items()} if isinstance(space, spaces.Dict) else space


def _as_space(tree: Any) -> Any:
    return spaces.Dict({key: _as_space(below) for key, below in tree.items()}) if isinstance(tree, dict) else tree


class WeightedReward(gym.Wrapper[Any, Any, Any, Any]):
    """Rewards of several objectives as one number, their weighted sum; of many agents each agent's.

    Args:
        weights: one for each objective; None for the plain sum. `wrappers=("WeightedReward((1, 0.1))",)`.

    Raises:
        EnvWorkerError: a step gave another number of rewards.
    """

    def __new__(cls, env: Any, weights: Sequence[float] | None = None) -> Any:
        if is_agents_env(env):
            return (WeightedTurns if takes_turns(env) else WeightedAgents)(env, _as_weights(weights))
        return super().__new__(cls)

    def __init__(self, env: gym.Env[Any, Any], weights: Sequence[float] | None = None) -> None:
        super().__init__(env)
        self._weights = _as_weights(weights)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As the environment's, the reward being one number."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, weighted_sum(reward, self._weights), terminated, truncated, info


def _as_weights(weights: Sequence[float] | None) -> npt.NDArray[np.float64] | None:
    return None if weights is None else np.asarray(weights, np.float64)


class ActionMask(gym.Wrapper[Any, Any, Any, Any]):
    """Shows `info[key]` as `obs["action_mask"]`, an int8 array [sum of action sizes] in which 1 is a legal action.

    Without a key it shows what the environment's method `action_masks()` returns, as sb3-contrib's MaskablePPO calls
    it. The observation becomes `{"obs": obs, "action_mask": mask}`; a Dict observation keeps its keys and gains the
    mask. A MultiDiscrete mask is the concatenation over its dimensions, a MultiBinary one has two elements for each bit
    (off, on), and that of a Dict or Tuple is the concatenation over its parts, boxes left out; the info may also hold a
    tuple or dict of arrays. An episode's last step may give none.

    Raises:
        ConfigError: the action space has no choices, or "action_mask" is observed already.
        EnvWorkerError: a reset or step gave no mask, or one of another length.
    """

    def __init__(self, env: gym.Env[Any, Any], key: str | None = MASK_KEY) -> None:
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
        if self._key is None:
            mask, place = flat_mask(self.env.get_wrapper_attr("action_masks")()), "action_masks()"
        elif self._key in info:
            mask, place = flat_mask(info[self._key]), f"info[{self._key!r}]"
        elif over:
            mask, place = np.ones(self._size, np.int8), ""
        else:
            raise EnvWorkerError(
                f"{method} gave no info[{self._key!r}]; its keys are {sorted(map(str, info))}; give the action mask "
                "there in reset and in every step, or name its key in mask_key"
            )
        if mask.size != self._size:
            raise EnvWorkerError(
                f"{method} gave {place} of {mask.size} elements; expected {self._size}, one for each choice of the "
                "action space"
            )
        return {**(obs if self._merge else {"obs": obs}), MASK_KEY: mask}


class Conform(gym.Wrapper[Any, Any, Any, Any]):
    """Brings a third-party environment into the form that the contract requires.

    Rewards and flags in arrays, lists or tensors become a float and bools (flags that are 0 or 1), lists arrays, and
    arrays the space's dtype and shape where that changes no value but by the rounding of floats. Observations are
    copies; an info that is None is {}. Where `step` still returns `done`, `TimeLimit.truncated` of the info says which
    end it was. Keys of Dicts are text. With many agents it is a `ConformAgents`: names of agents become text, and late
    rewards are dropped. Other violations stay, for the contract to refuse.

    Raises:
        ConfigError: a vector environment.
    """

    def __new__(cls, env: Any) -> Any:
        if is_agents_env(env):
            return ConformTurns(env) if takes_turns(env) else ConformParallel(env)
        return super().__new__(cls)

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        if isinstance(env, gym.vector.VectorEnv):
            raise ConfigError(f"Conform around {type(env).__name__}, a batch of environments; wrap each inside it")
        super().__init__(env)
        self.observation_space = conform_space(env.observation_space)
        self._conform = conformer(env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """The conformed observation and the info, {} where the environment returns the observation alone."""
        result: Any = self.env.reset(seed=seed, options=options)
        pair = isinstance(result, (tuple, list)) and len(result) == 2
        if pair and (result[1] is None or isinstance(result[1], Mapping)):
            return self._conform(result[0]), conform_info(result[1])
        bare = not isinstance(result, tuple) or isinstance(self.observation_space, spaces.Tuple)
        return (self._conform(result), {}) if bare else result

    def step(self, action: Any) -> Any:
        """The five values, conformed."""
        result: Any = self.env.step(action)
        if isinstance(result, (tuple, list)) and len(result) == 4:
            obs, reward, done, info = result
            cut = bool(conform_info(info).get("TimeLimit.truncated", False)) and bool(done)
            result = obs, reward, conform_flag(done) if not cut else False, cut, info
        if not isinstance(result, (tuple, list)) or len(result) != 5:
            return result
        obs, reward, terminated, truncated, info = result
        flags = conform_flag(terminated), conform_flag(truncated)
        return self._conform(obs), conform_reward(reward), *flags, conform_info(info)


def masks_itself(env: gym.Env[Any, Any]) -> bool:
    """True for an environment, or a wrapper, with a method `action_masks()`."""
    return env.has_wrapper_attr("action_masks") and callable(env.get_wrapper_attr("action_masks"))


def why_unmasked(env: gym.Env[Any, Any]) -> str:
    """The reason for which what `action_masks()` returns cannot be shown; "" if it can be."""
    space = env.observation_space
    if isinstance(space, spaces.Dict) and MASK_KEY in space.spaces:
        return f"the observation has a key {MASK_KEY!r} already"
    if not any(map(sum, choices(space_to_spec(env.action_space, "action")))):
        return f"masks are not known of the action space {env.action_space!r}"
    return ""


def give_options(env: Any, options: Mapping[str, Any]) -> None:
    """Has every `reset` of an environment, of one agent, of many or batched, get a copy of these options.

    Options that a caller of `reset` gives himself come on top.

    Raises:
        ConfigError: Gymnasium's AsyncVectorEnv and EnvPool, which reset their environments themselves, without options.
    """
    inner = env.unwrapped if isinstance(env, gym.vector.VectorEnv) else env
    if isinstance(inner, (gym.vector.AsyncVectorEnv, EnvPoolVectorEnv)):
        other = "use vectorized=sync, or " if isinstance(inner, gym.vector.AsyncVectorEnv) else ""
        raise ConfigError(
            f"options={dict(options)} with {type(inner).__name__}, which resets its environments without options; "
            f"{other}give them to the environment's constructor (env_kwargs)"
        )
    for part in getattr(inner, "envs", ()) if isinstance(inner, gym.vector.SyncVectorEnv) else ():
        part.reset = _with_options(part.reset, options)
    env.reset = _with_options(env.reset, options)


def _with_options(call: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    def reset(seed: Any = None, options: Any = None) -> Any:
        return call(seed=seed, options={**deepcopy(fixed), **(options or {})})

    fixed = dict(options)
    return reset


def copy_obs(env: Any) -> Any:
    """The environment of many agents itself, changed to return copies of observations.

    For one that changes an observation after it was returned, such as SuperSuit's frame_stack_v1.
    """
    for name in ("reset", "step", "last", "observe"):
        if callable(call := getattr(env, name, None)):
            setattr(env, name, _copying(call, bare=name == "observe"))
    return env


def _copying(call: Callable[..., Any], bare: bool) -> Callable[..., Any]:
    """The call with a copy of the observation that it returns, `bare` or as the first of several."""

    def copying(*args: Any, **kwargs: Any) -> Any:
        answer = call(*args, **kwargs)
        if bare:
            return deepcopy(answer)
        return (deepcopy(answer[0]), *answer[1:]) if isinstance(answer, tuple) and answer else answer

    return copying


def flat_mask(mask: Any) -> npt.NDArray[np.int8]:
    """The mask of an action as one array [choices]; parts of a dict stand in the order of their keys."""
    if isinstance(mask, Mapping):
        mask = [mask[key] for key in sorted(mask)]
    if isinstance(mask, (tuple, list)):
        return np.concatenate([flat_mask(part) for part in mask])
    return np.ravel(mask).astype(np.int8)
