import functools
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import EnvWorkerError
from penstock.core.spec import BatchSpec
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native_groups import NativeGroups
from tests.params import slow_but


class Misbehaves(gym.Env):
    """Dies or hangs, in its second reset or in its third step."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def __init__(self, what: str, where: str) -> None:
        self.what, self.left = what, {"reset": 2, "step": 3}
        self.where = where

    def _go(self, where: str) -> None:
        self.left[where] -= 1
        if where == self.where and not self.left[where]:
            if self.what == "dies":
                os._exit(1)
            time.sleep(1000)

    def reset(self, **_: Any) -> Any:
        self._go("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._go("step")
        return np.zeros(1, np.float32), 0.0, False, False, {}


def in_processes(num_envs: int, what: str, where: str) -> AsyncVectorEnv:
    return AsyncVectorEnv([functools.partial(Misbehaves, what, where)] * num_envs)


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("what", "text"),
    slow_but("dies", {"dies": ("dies", "EOFError|BrokenPipe|ConnectionReset"), "hangs": ("hangs", "TimeoutError")}),
)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.timeout(300)  # less than it hangs
def test_a_process_of_gymnasium_that_dies_or_hangs_is_an_error_in_time(groups: int, what: str, text: str, where: str):
    limit_s = 2.0 if what == "hangs" else 100.0
    pool = NativeGroups(EnvConfig(in_processes, {"what": what, "where": where}), 0, 2, groups, step_timeout_s=limit_s)
    out = allocate_batch(pool.spec, BatchSpec(4, 2), env_info=pool.info_keys)
    processes = [process for env in pool._envs for process in env._env.processes]  # pyright: ignore
    pool.bind([out])
    with pytest.raises(EnvWorkerError, match=text):
        for t in range(4):
            if where == "reset":
                pool.restart(1)
                pool.bind([out])
            for g in range(groups):
                pool.send(g, t)
            for _ in range(groups):
                pool.recv()
    pool.close()
    assert not any(process.is_alive() for process in processes)


def filled(pool: NativeGroups, T: int) -> SampleBatch:
    """T rows of null actions."""
    out = allocate_batch(pool.spec, BatchSpec(T, pool.groups[-1].slots.stop), env_info=pool.info_keys)
    pool.bind([out])
    for t in range(T):
        for g in range(len(pool.groups)):
            pool.send(g, t)
        for _ in pool.groups:
            pool.recv()
    return out


class Succeeds(gym.Env):
    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {"is_success": np.array([True])}


def test_one_element_in_an_info_is_a_number():
    pool = NativeGroups(EnvConfig(lambda num_envs: gym.vector.SyncVectorEnv([Succeeds] * num_envs)), 0, 3, 1)
    success: Any = filled(pool, 2).info["env"]["is_success"]
    assert success.tolist() == [[1.0] * 3] * 2
    pool.close()
