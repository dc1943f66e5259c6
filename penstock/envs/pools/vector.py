"""Steps a native batched environment (a gymnasium VectorEnv that resets in the next step) as one group."""

from __future__ import annotations

import gymnasium as gym

from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import resized
from penstock.envs.pools.native_groups import NativeGroups


def makes_vector_env(config: EnvConfig) -> bool:
    """True if the settings make a batched environment; one is made and closed to find out, but for registered ids."""
    if isinstance(config.env, str) and ":" not in config.env:
        return False
    env = resized(config, 1).make()
    env.close()
    return isinstance(env, gym.vector.VectorEnv)


class VectorPool(NativeGroups):
    """An `EnvPool` over one VectorEnv of B environments, each step of which is a single call of its `step`."""

    def __init__(self, config: EnvConfig, seed: int, B: int, evaluation: bool = False) -> None:
        super().__init__(config, seed, B, 1, evaluation)
