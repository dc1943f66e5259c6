"""One native batched environment: made, reset, stepped in two halves; its answers are written to its slots."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.config import import_object
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, words_of
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map, tree_structure
from penstock.envs.check import check_vector_env, tensor_device
from penstock.envs.contract import describe_violation, refused_values, value_limits
from penstock.envs.envpool import is_envpool_id
from penstock.envs.ids import VECTORIZED, is_simulator_id
from penstock.envs.make import EnvConfig, factory_slot
from penstock.envs.pettingzoo import is_pettingzoo_id
from penstock.envs.pools.settings import CHECK_EVERY
from penstock.envs.shutdown import close_env
from penstock.envs.spaces import action_dtypes


class SplitStep(NamedTuple):
    """A step in two: `begin(actions)` starts it, `finish()` waits for it and returns the answer of `step`."""

    begin: Callable[[Any], Any]
    finish: Callable[[], Any]


class NativeEnv:
    """One VectorEnv that plays the slots `slots` of a batch.

    Args:
        first_slot: number of the batch's first slot, for messages.
        overlapped: a step must return before it is done, so that other groups can be served meanwhile.

    Raises:
        ConfigError: the environment is no VectorEnv that resets in the next step, has another number of slots, or
            cannot step in two halves although it should.
    """

    def __init__(
        self,
        config: EnvConfig,
        seed: int,
        slots: slice,
        B: int,
        overlapped: bool = False,
        step_timeout_s: float = 60.0,
        first_slot: int = 0,
        evaluation: bool = False,
    ) -> None:
        self._number, self._evaluation = first_slot + slots.start, evaluation
        self.slots, self.num_envs = slots, slots.stop - slots.start
        self._config, self._B, self._overlapped, self._timeout_s = config, B, overlapped, step_timeout_s
        self._env: gym.vector.VectorEnv[Any, Any, Any] | None = None
        self._make()
        self._ended = np.zeros(self.num_envs, bool)
        self._tick, self._underway, self._failed = 0, False, False
        self._structure = tree_structure(self.spec.obs)
        assert self._env is not None
        dtypes = action_dtypes(self._env.single_action_space)
        limits = [value_limits(x)[1:] if x.kind == "box" else (None, None) for x in tree_leaves(self.spec.action)]
        self._limits = [(*limit, dtype) for limit, dtype in zip(limits, dtypes)]

    def open(self, out: SampleBatch, seed: int) -> None:
        """Row 0 is a reset of every slot, with nothing before it."""
        self._drain()
        env, slots = self._env, self.slots
        assert env is not None
        try:
            obs, _ = self._reset(env, seed)
        except (Exception, SystemExit) as error:
            self._fail("reset", error)
        self._tick = 0
        self._ended = np.zeros_like(self._ended)
        self._store(out, obs, 0)
        out.first[0, slots], out.prev_reward[0, slots] = True, 0.0
        tree_assign(out.prev_action, (0, slots), self.spec.null_action)

    def begin(self, out: SampleBatch, row: int) -> None:
        """Starts the step with the actions of this row, which it copies."""
        limits, slots = iter(self._limits), self.slots

        def to_env(x: Any) -> Any:
            low, high, dtype = next(limits)
            return x[row, slots].astype(dtype) if low is None and high is None else np.clip(x[row, slots], low, high)

        actions = tree_map(to_env, out.action)
        try:
            self._halves.begin(actions)
        except (Exception, SystemExit) as error:
            self._fail("step", error)
        self._underway = True

    def finish(self, out: SampleBatch, row: int) -> None:
        """Waits for the step and writes the row that answers it."""
        self._underway = False
        try:
            obs, reward, terminated, truncated, info = self._halves.finish()
        except (Exception, SystemExit) as error:
            self._fail("step", error)
        for name, x in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if np.shape(x) != (self.num_envs,):
                raise EnvContractError(
                    f"{self._where('step')}: {name}: got shape {list(np.shape(x))}, expected "
                    f"[{self.num_envs}], one for each environment"
                )
        reset, slots = self._ended, self.slots
        self._store(out, obs, row + 1)
        out.first[row + 1, slots] = reset
        out.valid[row, slots] = ~reset
        rewards = out.reward[row, slots]
        rewards[...] = reward
        rewards[reset] = 0.0
        out.terminated[row, slots] = terminated & ~reset
        out.truncated[row, slots] = truncated & ~reset
        self._ended = out.terminated[row, slots] | out.truncated[row, slots]
        if info and isinstance(out.info, dict):
            for key, column in out.info.get("env", {}).items():
                if key in info:
                    known = ~reset & info.get(f"_{key}", True)
                    x = np.asarray(info[key])
                    column[row, slots] = np.where(known, x.ravel() if x.size == known.size else x, np.nan)
        if not np.isfinite(rewards).all():
            b = int(np.argmin(np.isfinite(rewards)))
            raise EnvContractError(
                f"slot {self._number + b} of {self._where('step')}: reward is {rewards[b]}; expected a finite number"
            )
        self._tick += 1

    def close(self) -> None:
        """Ends the environments. A second call does nothing."""
        if self._env is None:
            return
        env, self._env = self._env, None
        if not hasattr(env, "step_wait"):
            self._drain()
            close_env(env, self._config.name)
            return
        with contextlib.suppress(Exception):  # gymnasium's processes: one that died or hangs is asked again here
            env.close(terminate=self._failed or self._underway)
        for process in getattr(env, "processes", ()):
            process.terminate()
            process.join(self._timeout_s)
        env.closed = True

    def _make(self) -> None:
        config = resized(self._config, self.num_envs, self._B)
        env = config.make(factory_slot(self._number, self._evaluation))
        if not isinstance(env, gym.vector.VectorEnv):
            close_env(env, config.name)
            raise ConfigError(f"{config.name} made {type(env).__name__}; expected a gymnasium.vector.VectorEnv")
        try:
            if (device := tensor_device(env)) is not None:
                raise ConfigError(
                    f"{config.name} answers with tensors on {device}, which stay there with SerialSampler alone; use "
                    "ps.SerialSampler(T, B), --sampler serial"
                )
            self.spec = check_vector_env(env).spec
            if env.num_envs != self.num_envs:
                share = "" if self.num_envs == self._B else f" gives this group {self.num_envs}"
                fix = "make them equal" if not share else "let the factory accept num_envs"
                raise ConfigError(f"{config.name} has num_envs={env.num_envs}; sampler.B={self._B}{share}: {fix}")
            in_two = self._overlapped or type(env) is gym.vector.AsyncVectorEnv  # whose halves take a deadline
            self._halves = two_halves(env, config.name, self._timeout_s) if in_two else at_once(env)
        except BaseException:
            close_env(env, config.name)
            raise
        self._env = env

    def _reset(self, env: gym.vector.VectorEnv[Any, Any, Any], seed: int) -> Any:
        if type(env) is not gym.vector.AsyncVectorEnv:
            return env.reset(seed=seed)
        env.reset_async(seed=seed)
        return env.reset_wait(timeout=self._timeout_s)

    def _drain(self) -> None:
        """Discards the pending answer to a step, which a reset would otherwise receive instead of its own."""
        if self._underway:
            self._underway = False
            with contextlib.suppress(Exception):
                self._halves.finish()

    def _store(self, out: SampleBatch, obs: Tree, row: int) -> None:
        if tree_structure(obs) != self._structure:
            raise EnvContractError(
                f"{self._where('step')}: the observation's structure is {tree_structure(obs)}; "
                f"expected {self._structure}"
            )
        for x, y in zip(tree_leaves(out.obs), tree_leaves(obs)):
            expected = (self.num_envs, *x.shape[2:])
            if np.shape(y) != expected or getattr(y, "dtype", None) != x.dtype:
                seen = f"{getattr(y, 'dtype', type(y).__name__)}{list(np.shape(y))}"
                raise EnvContractError(
                    f"{self._where('step')}: an observation of {seen}; expected {x.dtype}{list(expected)}"
                )
            x[row, self.slots] = y
        if self._config.checks == "always" or self._tick < 2 or self._tick % CHECK_EVERY == 0:
            self._check(obs)

    def _check(self, obs: Tree) -> None:
        refused = refused_values(self._config.checks)
        if refused == "any":
            return
        for b in range(self.num_envs):
            message = describe_violation(tree_map(lambda x, b=b: x[b], obs), self.spec.obs, "obs", refused)
            if message:
                raise EnvContractError(f"slot {self._number + b} of {self._where('step')}: {message}")

    def _where(self, phase: str) -> str:
        return f"{self._config.name} in {phase}(), {self._tick} steps after the reset of all environments"

    def _fail(self, phase: str, error: BaseException) -> NoReturn:
        self._failed = True
        text = "".join(traceback.format_exception(error))
        raise EnvWorkerError(f"{self._where(phase)}: {words_of(error)}\n{text}") from error


def require_next_step(sampler: Any) -> None:
    """Raises ConfigError for settings of a sampler that mean nothing to a native batched environment."""
    if sampler.reset != "next_step" or sampler.max_decorrelation_steps:
        raise ConfigError(
            "a native batched environment resets by itself, in the step after an end or in that of the end; use "
            "reset='next_step', by which nothing else is done, and max_decorrelation_steps=0"
        )


def resized(config: EnvConfig, num_envs: int, B: int | None = None) -> EnvConfig:
    """Settings with a factory that is called for `num_envs` environments, if it takes the argument.

    It can if it names such a parameter, or if the settings give it already. A number that was given and is not `B`,
    that of all groups together, stays.
    """
    factory = _factory(config)
    named: inspect.Parameter | None = None
    if factory is not None:
        with contextlib.suppress(TypeError, ValueError):
            named = inspect.signature(factory).parameters.get("num_envs")
    given = config.kwargs.get("num_envs")
    if given is None and isinstance(factory, functools.partial):
        given = factory.keywords.get("num_envs")
    asked = named is not None or given is not None or _vectorized(config)
    if not asked or (given is not None and given != B):
        return config
    return replace(config, kwargs={**config.kwargs, "num_envs": num_envs})


def makes_vector_env(config: EnvConfig, slot: int = 0) -> bool:
    """True if the settings make a batched environment; one is made and closed to find out, but for registered ids.

    Args:
        slot: that a factory is told which asks for it.
    """
    if _by_id(config):
        return _vectorized(config)
    env = made_batched(config, slot)
    if env is not None:
        close_env(env, config.name)
    return env is not None


def made_batched(config: EnvConfig, slot: int = 0) -> gym.vector.VectorEnv[Any, Any, Any] | None:
    """The batched environment that the settings make, of one slot if it can be asked; None if they make no such one."""
    if config.seating is not None or (_by_id(config) and not _vectorized(config)):
        return None
    env = resized(config, 1).make(slot)
    if isinstance(env, gym.vector.VectorEnv):
        return env
    close_env(env, config.name)
    return None


def is_batched_id(env: str) -> bool:
    """True for an id that always is of a batched environment."""
    return is_envpool_id(env) or is_simulator_id(env)


def _by_id(config: EnvConfig) -> bool:
    """True if the kind of environment is known without calling a callable."""
    return config.seating is not None or (
        isinstance(config.env, str)
        and (":" not in config.env or is_pettingzoo_id(config.env) or is_batched_id(config.env))
    )


def _vectorized(config: EnvConfig) -> bool:
    """True for an id that is of a batched environment, or whose keyword arguments ask for one."""
    if not isinstance(config.env, str):
        return False
    return is_batched_id(config.env) or (bool(config.kwargs.get(VECTORIZED)) and _factory(config) is None)


def at_once(env: gym.vector.VectorEnv[Any, Any, Any]) -> SplitStep:
    """SplitStep of which the first does everything."""
    answers: list[Any] = []
    return SplitStep(lambda actions: answers.append(env.step(actions)), answers.pop)


def two_halves(env: gym.vector.VectorEnv[Any, Any, Any], name: str, timeout_s: float) -> SplitStep:
    """The asynchronous halves that the library offers; ALE and EnvPool wait for as long as a step takes.

    Raises:
        ConfigError: it has none, a class or wrapper above them would be left out, or it returns whichever
            environments are ready first.
    """
    config: Any = getattr(env, "config", None)
    ready = getattr(env, "batch_size", None) or (config.get("batch_size") if isinstance(config, dict) else None)
    if ready not in (None, env.num_envs):
        raise ConfigError(
            f"{name} returns the first batch_size={ready} of num_envs={env.num_envs} that are ready, so its "
            "rows are not those of the slots; leave batch_size out"
        )
    made = type(env)
    for first, second in (("send", "recv"), ("step_async", "step_wait")):
        if callable(getattr(made, first, None)) and callable(getattr(made, second, None)):
            if _depth(made, "step") < max(_depth(made, first), _depth(made, second)):
                raise ConfigError(
                    f"{made.__name__} overrides step() and not {first}() and {second}(), by which two or more "
                    "groups step; override those, or use groups=1"
                )
            begin: Any = getattr(env, first)
            finish: Any = getattr(env, second)
            return SplitStep(begin, functools.partial(finish, timeout=timeout_s) if second == "step_wait" else finish)
    why = "a wrapper hides its halves" if isinstance(env, gym.vector.VectorWrapper) else "it steps in one call only"
    raise ConfigError(
        f"{name} made {made.__name__}, which cannot step beside another group: {why}; use one group "
        "(SerialSampler), or AtariVectorEnv, EnvPool or gymnasium's AsyncVectorEnv"
    )


def _depth(cls: type, method: str) -> int:
    """Where in the line of base classes the method is defined; 0 for the class itself."""
    return next((i for i, base in enumerate(cls.__mro__) if method in vars(base)), len(cls.__mro__))


def _factory(config: EnvConfig) -> Callable[..., Any] | None:
    """The callable that the settings name; None for a registered id."""
    if callable(config.env):
        return config.env
    with contextlib.suppress(ConfigError, ImportError):
        found = import_object(config.env) if not _by_id(config) else None
        return found if callable(found) else None
    return None
