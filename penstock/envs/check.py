"""`check_env`: plays a throw-away environment before training and reports whether it keeps the contract.

The contract itself, as functions of single values, is in `contract.py`, which pools ask at every step as well.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, PenstockError, words_of
from penstock.core.noise import Purpose, env_seed, uniform
from penstock.core.spec import MASK_KEY, EnvSpec, choices
from penstock.core.tree import Tree, tree_leaves, tree_paths, tree_structure, tree_unflatten
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.agent_observations import read_agents
from penstock.envs.check_agents import check_agents
from penstock.envs.conform.notes import mask_note, stateful_note
from penstock.envs.conform.values import NOT_YOURS
from penstock.envs.contract import (
    Checks,
    describe_reset_violation,
    describe_step_violation,
    describe_violation,
    refused_values,
)
from penstock.envs.make import AnyEnv, EnvConfig, as_env_config
from penstock.envs.pettingzoo import is_agents_env
from penstock.envs.seats import AgentSpecs
from penstock.envs.shutdown import close_env
from penstock.envs.spaces import action_dtypes, env_spec

_PRELUDE_STEPS = 3
"""Steps of another episode before the replay, so that state carried over from one episode to the next shows."""


@dataclass(frozen=True)
class EnvReport:
    """The findings of `check_env` about an environment."""

    spec: EnvSpec
    """Observation and action of one slot; of many agents those of the first."""
    reproducible: bool
    """True if a second instance, with the same seeds and actions, returned the same bits."""
    has_state: bool
    """True if it has `get_state` and `set_state`."""
    steps: int
    """Steps taken and checked; 0 for a vector environment, of which only spaces and settings are looked at."""
    reset_s: float
    """Median duration of a reset."""
    step_s: float
    """Median duration of a step."""
    out_of_bounds: str | None = None
    """The first value seen outside its space, as a message; None if there was none, or `checks` looks at no bounds."""
    agents: AgentSpecs | None = None
    """Observations and actions of each agent; None in an environment of one."""
    note: str = ""
    """Remark for the first lines of a run: how actions are masked by the environment's `action_masks()`, or ""."""
    warning: str = ""
    """Warning about wrappers with running statistics, which neither checkpoints nor evaluations have; may be ""."""
    device: str = ""
    """Where the tensors of a batched environment of tensors are; "" for arrays."""


@dataclass
class _Record:
    """One play of an environment: its actions, and all that was returned, as bytes."""

    actions: list[Tree] = field(default_factory=list)
    returned: list[bytes] = field(default_factory=list)
    reset_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    out_of_bounds: str | None = None


def check_env(env: EnvConfig | str | Callable[..., Any], *, seed: int = 0, steps: int = 30) -> EnvReport:
    """Reports spaces, reproducibility and speed of an environment after `steps` random steps on a throw-away instance.

    Two instances are made one after the other; the second replays the first one's seeds and actions. An environment
    that is not reproducible is no error: resume reads the report to know what it can promise. Values are checked as
    `EnvConfig.checks` says; one outside its space is an error only with `always`, else a line of the report.

    Raises:
        ConfigError: a space without a fixed-size array, a vector environment that does not reset at the next step.
        EnvContractError: a returned value breaks the contract; the message says which, where, and how to fix it.
        EnvWorkerError: the environment's own code raised; the message holds its traceback.
    """
    config = as_env_config(env)
    checks = config.checks
    made = config.make()
    try:
        remarks = {"note": mask_note(config, made), "warning": stateful_note(config, made)}
        if isinstance(made, gym.vector.VectorEnv):
            return replace(check_vector_env(made), **remarks)
        if is_agents_env(made):
            return replace(_report_on_agents(config, seed, steps), **remarks)
        spec = env_spec(made)
        record = _Record()
        _play(made, spec, checks, seed, 0, steps, record)
        has_state = _offers(made, "get_state") and _offers(made, "set_state")
    finally:
        close_env(made, config.name)
    again = config.make()
    try:
        _play(again, spec, checks, seed, 1, _PRELUDE_STEPS, _Record())
        reproducible = _play(again, spec, checks, seed, 0, steps, _Record(), expected=record)
    finally:
        close_env(again, config.name)
    step_s = statistics.median(record.step_s or [0.0])
    reset_s = statistics.median(record.reset_s)
    return EnvReport(spec, reproducible, has_state, steps, reset_s, step_s, record.out_of_bounds, None, **remarks)


def _report_on_agents(config: EnvConfig, seed: int, steps: int) -> EnvReport:
    found = read_agents(config)
    reproducible, has_state, reset_s, step_s, outside = check_agents(config, found, seed, steps)
    spec = next(iter(found.specs.values()))
    return EnvReport(spec, reproducible, has_state, steps, reset_s, step_s, outside, found)


def _play(
    env: Any,
    spec: EnvSpec,
    checks: Checks,
    seed: int,
    stream: int,
    steps: int,
    record: _Record,
    expected: _Record | None = None,
) -> bool:
    """Steps the environment and checks its answers; with `expected`, replays that and stops where it differs.

    `stream` numbers independent plays: episode seeds and actions of two streams have nothing in common.
    """
    noise = uniform(seed, Purpose.CHECK, stream, slice(0, 1), steps, action_noise_size(spec.action))
    dtypes = action_dtypes(env.action_space)
    episode, t, obs = stream << 12, 0, None
    for i in range(steps):
        if obs is None:
            episode_seed = env_seed(seed, 0, episode)
            where = f"slot 0, reset of episode {episode} (seed {episode_seed})"
            (obs, _), duration = _called(partial(env.reset, seed=episode_seed), where, describe_reset_violation)
            record.reset_s.append(duration)
            _check_obs(obs, spec, checks, where, record)
            record.returned.append(_bytes(obs))
        if checks != "off":
            _check_mask(obs, spec, f"slot 0, step {t} of episode {episode} (seed {env_seed(seed, 0, episode)})")
        action = expected.actions[i] if expected else _random_action(spec.action, dtypes, noise[i], obs)
        where = f"slot 0, step {t} of episode {episode} (seed {env_seed(seed, 0, episode)})"
        before = deepcopy(obs)
        result, duration = _called(partial(env.step, deepcopy(action)), where, describe_step_violation)
        if checks != "off":
            _check_memory(before, obs, spec, where)
        obs, reward, terminated, truncated, _ = result
        _check_obs(obs, spec, checks, where, record)
        record.actions.append(action)
        record.step_s.append(duration)
        record.returned.append(_bytes(obs) + np.float64(reward).tobytes() + bytes((bool(terminated), bool(truncated))))
        if expected and record.returned != expected.returned[: len(record.returned)]:
            return False
        t += 1
        if terminated or truncated:
            episode, t, obs = episode + 1, 0, None
    return True


def _check_obs(obs: Any, spec: EnvSpec, checks: Checks, where: str, record: _Record) -> None:
    if message := describe_violation(obs, spec.obs, "observation", refused_values(checks)):
        raise EnvContractError(f"{where}: {message}")
    if checks == "sampled" and record.out_of_bounds is None:
        message = describe_violation(obs, spec.obs, "observation")
        record.out_of_bounds = message and f"{where}: {message}"


def _check_mask(obs: Any, spec: EnvSpec, where: str) -> None:
    """Raises if an observation that is acted on allows no choice; the last one of an episode may."""
    mask = np.asarray(obs[MASK_KEY]).ravel() if isinstance(obs, dict) and MASK_KEY in obs else None
    sizes = [n for of_leaf in choices(spec.action, None if mask is None else len(mask)) for n in of_leaf]
    if mask is None or not sizes or len(mask) != sum(sizes):
        return
    for i, legal in enumerate(np.split(mask != 0, np.cumsum(sizes)[:-1])):
        if not legal.any():
            part = f" for dimension {i} of the action" if len(sizes) > 1 else ""
            raise EnvContractError(
                f"{where}: observation[{MASK_KEY!r}]: got only zeros{part}, expected a legal choice, nonzero, wherever "
                "an action is asked for; allow all choices where none matters, or end the episode"
            )


def _check_memory(before: Any, after: Any, spec: EnvSpec, where: str) -> None:
    """Raises if an observation that was returned has changed since; memory that stays as it is may be shared."""
    for path, old, new in zip(tree_paths(spec.obs), _leaves(before, spec.obs), _leaves(after, spec.obs)):
        if np.asarray(old).tobytes() != np.asarray(new).tobytes():
            raise EnvContractError(
                f"{where}: observation{path}: got the memory of the observation before, whose content has changed, "
                f"expected a new array; return obs.copy(){NOT_YOURS}"
            )


def _called(call: Callable[[], Any], where: str, violation: Callable[[Any], str | None]) -> tuple[Any, float]:
    started = time.perf_counter()
    try:
        result = call()
    except PenstockError as error:
        raise EnvWorkerError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        raise EnvWorkerError(f"{where} raised {words_of(error)}\n{traceback.format_exc()}") from error
    duration = time.perf_counter() - started
    if message := violation(result):
        raise EnvContractError(f"{where}: {message}")
    return result, duration


def _random_action(spec: Tree, dtypes: list[np.dtype[Any]], noise: Any, obs: Any) -> Tree:
    """A random action for `env.step`, legal by the mask in the observation, since an illegal move may raise."""
    mask = obs[MASK_KEY][None] if isinstance(obs, dict) and MASK_KEY in obs else None
    drawn = tree_leaves(sample_action(spec, noise, mask))
    return tree_unflatten(tree_structure(spec), [x[0].astype(dtype) for x, dtype in zip(drawn, dtypes)])


_WHAT_OTHERS_DO = {
    "samestep": "SAME_STEP returns the first observation of the next episode in place of an episode's last one (one of "
    "torch tensors may, and has a `device`)",
    "disabled": "DISABLED resets only where reset(options={'reset_mask': ...}) asks for it, which is not done here",
}
_WHAT_UNNAMED_DO = "which observation a step returns after an end is not known"


def check_vector_env(env: AnyEnv) -> EnvReport:
    """The report on a batched environment.

    Raises:
        ConfigError: it does not reset at the next step, nor, of tensors, within the step of an end.
    """
    spec = env_spec(env)
    count = getattr(env, "num_envs", None)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{type(env).__name__}.num_envs is {count!r}; expected the number of environments, 1 or more")
    if any(base.__module__.partition(".")[0] == "envpool" for base in type(env.unwrapped).__mro__):
        raise ConfigError(
            f"{type(env).__name__} is EnvPool's own, which ignores the seed of a reset; expected env='envpool:TASK' "
            "(--env envpool:TASK), with its settings as env_kwargs"
        )
    mode, named = _autoreset_mode(env)
    if named != "nextstep" and not resets_within_step(env):
        seen = "does not name its autoreset mode" if mode is None else f"resets by {mode}"
        if tensor_device(env) is not None:
            raise ConfigError(
                f"{type(env).__name__} {seen}; expected metadata['autoreset_mode'] to be SAME_STEP, with each "
                "episode's last observation in info['final_obs'], or NEXT_STEP: one that resets slots on demand does "
                "so in penstock.tensor_envs.NextStep (docs/tensor-environments.md)"
            )
        raise ConfigError(
            f"{type(env).__name__} {seen}; expected NEXT_STEP: {_WHAT_OTHERS_DO.get(named, _WHAT_UNNAMED_DO)}. Pass "
            "vector_kwargs=dict(autoreset_mode=AutoresetMode.NEXT_STEP) to gymnasium.make_vec, or make a class that "
            "does so, such as CartPoleVectorEnv(num_envs=256), and state it in metadata['autoreset_mode']"
        )
    device = tensor_device(env)
    at = "" if device is None else str(device)
    return EnvReport(spec, reproducible=False, has_state=False, steps=0, reset_s=0.0, step_s=0.0, device=at)


def resets_within_step(env: Any) -> bool:
    """True for an environment of tensors that resets a slot in the step in which its episode ends."""
    return tensor_device(env) is not None and _autoreset_mode(env)[1] == "samestep"


def _autoreset_mode(env: Any) -> tuple[Any, str]:
    """What a batched environment names, and that in lower case without underscores."""
    mode = next((m for e in (env, env.unwrapped) if (m := getattr(e, "autoreset_mode", None)) is not None), None)
    if mode is None:
        mode = (env.metadata or {}).get("autoreset_mode")
    return mode, str(getattr(mode, "value", mode)).replace("_", "").lower()


def tensor_device(env: Any) -> Any:
    """Where the tensors of a batched environment are, as it says itself; None for one of numpy arrays."""
    return getattr(env, "device", None) or getattr(env.unwrapped, "device", None)


def _offers(env: Any, name: str) -> bool:
    return env.has_wrapper_attr(name) and callable(env.get_wrapper_attr(name))


def _leaves(obs: Any, spec: Tree) -> list[Any]:
    """Observation leaves in the spec's order; unlike `tree_leaves`, takes subclasses of dict and tuple too."""
    if isinstance(spec, dict):
        return [leaf for key in sorted(spec) for leaf in _leaves(obs[key], spec[key])]
    if isinstance(spec, tuple):
        return [leaf for below, part in zip(obs, spec) for leaf in _leaves(below, part)]
    return [obs]


def _bytes(obs: Any) -> bytes:
    if isinstance(obs, dict):
        return b"".join(_bytes(obs[key]) for key in sorted(obs))
    return b"".join(map(_bytes, obs)) if isinstance(obs, tuple) else np.asarray(obs).tobytes()
