"""`give_options`: options that an environment gets at every reset, whoever resets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import gymnasium as gym

from penstock.core.errors import ConfigError


def give_options(env: Any, options: Mapping[str, Any]) -> None:
    """Has every `reset` of an environment, of one agent, of many or batched, get a copy of these options.

    Options that a caller of `reset` gives himself come on top.

    Raises:
        ConfigError: Gymnasium's AsyncVectorEnv, whose processes reset their environments themselves, without options.
    """
    inner = env.unwrapped if isinstance(env, gym.vector.VectorEnv) else env
    if isinstance(inner, gym.vector.AsyncVectorEnv):
        raise ConfigError(
            f"options={dict(options)} with AsyncVectorEnv, whose processes reset their environments without options; "
            "use vectorized=sync, or give them to the environment's constructor (env_kwargs)"
        )
    for part in getattr(inner, "envs", ()) if isinstance(inner, gym.vector.SyncVectorEnv) else ():
        part.reset = _with_options(part.reset, options)
    env.reset = _with_options(env.reset, options)


def _with_options(call: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    def reset(seed: Any = None, options: Any = None) -> Any:
        return call(seed=seed, options={**deepcopy(fixed), **(options or {})})

    fixed = dict(options)
    return reset
