"""`batched_pool`: the pool in this process of a batched environment, of numpy arrays or of tensors."""

from __future__ import annotations

from typing import Any

from penstock.envs.check import tensor_device
from penstock.envs.ids import is_simulator_id
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import made_batched, resized
from penstock.envs.pools.native_groups import NativeGroups
from penstock.envs.shutdown import close_env
from penstock.tensor_envs.pool import TensorPool


def batched_pool(
    config: EnvConfig, seed: int, B: int, first_slot: int = 0, activity: Any = None, max_age: int = 0
) -> NativeGroups | TensorPool | None:
    """The pool of the batched environment that the settings make; None if they make one for a slot.

    One is made to find out. One of tensors is kept if it has B slots, since making it may take minutes.

    Args:
        max_age: of the first episodes of one of tensors, as in `TensorPool`.

    Raises:
        ConfigError: the environment does not fit.
    """
    if config.seating is None and isinstance(config.env, str) and is_simulator_id(config.env):
        # Known without one, of which a process may hold one alone.
        return TensorPool(config, seed, B, first_slot=first_slot, max_age=max_age)
    found = made_batched(config, first_slot)
    if found is None:
        return None
    if tensor_device(found) is None:
        close_env(found, config.name)
        return NativeGroups(config, seed, B, first_slot=first_slot, activity=activity)
    fixed = resized(config, B) is config
    if found.num_envs != B and not fixed:
        close_env(found, config.name)
        return TensorPool(config, seed, B, first_slot=first_slot, max_age=max_age)
    return TensorPool(config, seed, B, first_slot=first_slot, env=found, max_age=max_age)
