"""Steps a native batched environment (a gymnasium VectorEnv that resets in the next step) as one group."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from penstock.core.batch import SampleBatch, carry_over
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_structure
from penstock.envs.check import check_vector_env
from penstock.envs.contract import describe_violation, value_limits
from penstock.envs.make import EnvConfig
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

    def __init__(self, config: EnvConfig, seed: int, B: int, evaluation: bool = False) -> None:
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
        self._config, self._evaluation = config, evaluation
        self._structure = tree_structure(self.spec.obs)
        self._ended = np.zeros(B, bool)
        self._tick = 0
        self._limits = [
            value_limits(leaf)[1:] if leaf.kind == "box" else (None, None) for leaf in tree_leaves(self.spec.action)
        ]
        self.restart(seed)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with a reset of all environments, which play on without limit."""
        self._seed, self._restarts = seed, 0
        self._out: SampleBatch | None = None

    def bind(self, out: SampleBatch) -> None:
        previous, self._out = self._out, out
        if previous is None:
            self._open(out)
        else:
            carry_over(previous, out)
        for column in tree_leaves(out.info.get("env")) if isinstance(out.info, dict) else []:
            column[...] = np.nan

    def send(self, group: int, row: int) -> None:
        out, env = self._out, self._env
        assert out is not None
        assert env is not None
        limits = iter(self._limits)

        def to_env(x: Any) -> Any:
            low, high = next(limits)
            return x[row].copy() if low is None and high is None else np.clip(x[row], low, high)

        action = tree_map(to_env, out.action)
        try:
            obs, reward, terminated, truncated, info = env.step(action)
        except (Exception, SystemExit) as error:
            self._fail("step", error)
        for name, x in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if np.shape(x) != (len(self._ended),):
                raise EnvContractError(f"{self._where('step')}: {name}: got shape {list(np.shape(x))}, expected "
                                       f"[{len(self._ended)}], one for each environment")  # fmt: skip
        reset = self._ended
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
                    known = ~reset & info.get(f"_{key}", True)
                    column[row] = np.where(known, info[key], np.nan)
        if not np.isfinite(out.reward[row]).all():
            b = int(np.argmin(np.isfinite(out.reward[row])))
            raise EnvContractError(
                f"slot {b} of {self._where('step')}: reward is {out.reward[row, b]}; expected a finite number"
            )
        self._tick += 1

    def recv(self) -> int:
        return 0

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        """Nothing happens before the first batch."""
        return [([], [])] * len(self._ended)

    def get_state(self) -> dict[str, Any]:
        return {"restarts": self._restarts}

    def set_state(self, state: dict[str, Any], row: SampleBatch, journal: list[Tree | None]) -> list[int]:
        """Native environments cannot be restored: all start anew under another seed, and every slot counts as cut."""
        self._restarts, self._out = state["restarts"] + 1, None
        return list(range(len(self._ended)))

    def _open(self, out: SampleBatch) -> None:
        """Row 0 is a reset of every slot, with nothing before it."""
        assert self._env is not None
        try:
            # 31 bits, since native libraries keep the seed in a C int.
            obs, _ = self._env.reset(seed=env_seed(self._seed, 0, self._restarts, self._evaluation) >> 1)
        except (Exception, SystemExit) as error:
            self._fail("reset", error)
        self._tick = 0
        self._ended = np.zeros_like(self._ended)
        self._store(obs, 0)
        out.first[0], out.prev_reward[0] = True, 0.0
        tree_map(lambda leaf, x: x.__setitem__(0, leaf.null()), self.spec.action, out.prev_action)

    def _store(self, obs: Tree, row: int) -> None:
        assert self._out is not None
        if tree_structure(obs) != self._structure:
            raise EnvContractError(f"{self._where('step')}: the observation's structure is {tree_structure(obs)}; "
                                   f"expected {self._structure}")  # fmt: skip
        for x, y in zip(tree_leaves(self._out.obs), tree_leaves(obs)):
            if np.shape(y) != x.shape[1:] or getattr(y, "dtype", None) != x.dtype:
                seen = f"{getattr(y, 'dtype', type(y).__name__)}{list(np.shape(y))}"
                raise EnvContractError(f"{self._where('step')}: an observation of {seen}; expected "
                                       f"{x.dtype}{list(x.shape[1:])}")  # fmt: skip
            x[row] = y
        if self._config.checks == "always" or self._tick < 2 or self._tick % _CHECK_EVERY == 0:
            self._check(obs)

    def _check(self, obs: Tree) -> None:
        if self._config.checks in ("finite", "off"):
            return
        for b in range(len(self._ended)):
            message = describe_violation(tree_map(lambda x, b=b: x[b], obs), self.spec.obs, "obs")
            if message:
                raise EnvContractError(f"slot {b} of {self._where('step')}: {message}")

    def _where(self, phase: str) -> str:
        return f"{self._config.name} in {phase}(), {self._tick} steps after the reset of all environments"

    def _fail(self, phase: str, error: BaseException) -> NoReturn:
        text = "".join(traceback.format_exception(error))
        raise EnvWorkerError(f"{self._where(phase)}: {type(error).__name__}: {error}\n{text}") from error
