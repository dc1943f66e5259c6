"""Steps a native batched environment (a gymnasium VectorEnv that resets in the next step) as one group."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.check import EnvContractError, check_vector_env
from penstock.envs.contract import describe_violation
from penstock.envs.make import EnvConfig
from penstock.envs.pool import carry_over
from penstock.envs.spaces import env_spec

_CHECK_EVERY = 64


def makes_vector_env(config: EnvConfig) -> bool:
    """True if the settings make a batched environment; one is made and closed to find out, but for registered ids."""
    if isinstance(config.env, str) and ":" not in config.env:
        return False
    env = config.make()
    env.close()
    return isinstance(env, gym.vector.VectorEnv)


class VectorPool:
    """An `EnvPool` over one VectorEnv, whose `num_envs` is B.

    It takes one seed for all its environments, so its batches depend on B and a resumed run cannot bring its
    episodes back: it stands outside placement invariance and exact resume.
    """

    def __init__(self, config: EnvConfig, seed: int, B: int) -> None:
        env = config.make()
        if not isinstance(env, gym.vector.VectorEnv):
            raise ConfigError(f"{config.name} made {type(env).__name__}; expected a gymnasium.vector.VectorEnv")
        self._env: gym.vector.VectorEnv[Any, Any, Any] | None = env
        try:
            check_vector_env(env)
            if env.num_envs != B:
                raise ConfigError(f"{config.name} has num_envs={env.num_envs}; sampler.B={B}: make them equal")
        except BaseException:
            self.close()
            raise
        self.spec = env_spec(env)
        self.groups = (slice(0, B),)
        self.info_keys = tuple(dict.fromkeys((*config.info_keys, "is_success")))
        self._config, self._seed = config, seed
        self._ended = np.zeros(B, bool)
        self._out: SampleBatch | None = None
        self._episode = 0
        self._tick = 0
        self._clips = [
            (leaf.bound("low").astype(leaf.dtype), leaf.bound("high").astype(leaf.dtype))
            if leaf.kind == "box"
            else None
            for leaf in tree_leaves(self.spec.action)
        ]

    def bind(self, out: SampleBatch) -> None:
        previous, self._out = self._out, out
        out.first[1:] = False
        for column in tree_leaves(out.info.get("env")) if isinstance(out.info, dict) else []:
            column[...] = np.nan
        if previous is not None:
            carry_over(previous, out)
            return
        assert self._env is not None
        # 31 bits, since native libraries keep the seed in a C int.
        obs, _ = self._env.reset(seed=env_seed(self._seed, 0, self._episode) >> 1)
        self._store(obs, 0)
        out.first[0] = True
        self._ended[:] = False

    def send(self, group: int, row: int) -> None:
        out, env = self._out, self._env
        assert out is not None and env is not None
        clips = iter(self._clips)

        def to_env(x: Any) -> Any:
            clip = next(clips)
            return x[row].copy() if clip is None else np.clip(x[row], *clip)

        action = tree_map(to_env, out.action)
        try:
            obs, reward, terminated, truncated, info = env.step(action)
        except Exception as error:
            raise EnvWorkerError(f"{self._config.name} in step() of {len(self._ended)} environments: "
                                 f"{type(error).__name__}: {error}") from error  # fmt: skip
        reset = self._ended
        self._tick += 1
        self._store(obs, row + 1)
        out.first[row + 1] = reset
        out.valid[row] = ~reset
        out.reward[row] = reward
        out.reward[row][reset] = 0.0
        out.terminated[row] = terminated & ~reset
        out.truncated[row] = truncated & ~reset
        self._ended = out.terminated[row] | out.truncated[row]
        if info and isinstance(out.info, dict):
            for key, column in out.info.get("env", {}).items():
                if key in info:
                    known = info.get(f"_{key}", True)
                    column[row] = np.where(known, info[key], np.nan)
        if not np.isfinite(out.reward[row]).all():
            b = int(np.argmin(np.isfinite(out.reward[row])))
            raise EnvContractError(
                f"slot {b} of {self._config.name}: reward is {out.reward[row, b]}; expected a finite number"
            )

    def recv(self) -> int:
        return 0

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def get_state(self) -> dict[str, Any]:
        return {"episode": self._episode}

    def set_state(self, state: dict[str, Any], row: SampleBatch, journal: list[Tree | None]) -> list[int]:
        """Native environments cannot be restored: all start anew under another seed, and every slot counts as cut."""
        self._episode = state["episode"] + 1
        self._out = None
        return list(range(len(self._ended)))

    def _store(self, obs: Tree, row: int) -> None:
        assert self._out is not None
        if self._tick < 2 or self._tick % _CHECK_EVERY == 0:
            self._check(obs)
        tree_map(lambda x, y: x.__setitem__(row, y), self._out.obs, obs)

    def _check(self, obs: Tree) -> None:
        for b in range(len(self._ended)):
            message = describe_violation(tree_map(lambda x, b=b: x[b], obs), self.spec.obs, "obs")
            if message:
                raise EnvContractError(f"slot {b} of {self._config.name}: {message}")
