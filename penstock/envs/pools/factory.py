"""`pool_for`: the pool in this process that fits an environment, of one agent or of many."""

from __future__ import annotations

from typing import TypeAlias

from penstock.envs.make import EnvConfig
from penstock.envs.pools.serial import SerialPool
from penstock.envs.pools.settings import DEFAULTS, PoolSettings
from penstock.envs.pools.simultaneous import SimultaneousPool
from penstock.envs.pools.turns import TurnPool

LocalPool: TypeAlias = SerialPool | SimultaneousPool | TurnPool


def pool_for(config: EnvConfig, seed: int, slots: slice, settings: PoolSettings = DEFAULTS) -> LocalPool:
    """The pool for these environments: by `config.seating` one of many agents, else a SerialPool."""
    if config.seating is None:
        return SerialPool(config, seed, slots, settings)
    cls = TurnPool if config.seating.turns else SimultaneousPool
    return cls(config, seed, slots, settings)
