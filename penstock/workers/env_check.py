"""`check_apart`: `check_env` in another process; its death or hang is an error here, with every sampler."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import gymnasium as gym

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.machine import drawing_unseen
from penstock.core.noise import env_seed
from penstock.core.spec import EnvSpec
from penstock.envs.check import EnvReport, check_env
from penstock.envs.ids import entries_to_ship, take_shipped
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.pools.messages import last
from penstock.envs.pools.settings import CLOSING, MAKING, RESETTING, STEPPING
from penstock.envs.seats import AgentSpecs
from penstock.envs.shutdown import close_env
from penstock.processes.limits import why_no_children
from penstock.processes.serialization import ship, unship
from penstock.workers import control
from penstock.workers.faults import Fault, Faults
from penstock.workers.host import Host, describe, run_process
from penstock.workers.supervisor import Workers

STEP_TIMEOUT_S, START_TIMEOUT_S = 60.0, 300.0
"""Limits where the sampler's settings have none."""
_PLACE, _PLACE_BYTES = 0, 512
"""Shared file in which the process says where it is."""


@dataclass(frozen=True)
class Check:
    """Message: check an environment; `parts` are its EnvConfig and its entry in Gymnasium's registry, pickled."""

    parts: bytes
    seed: int


def check_apart(env: EnvConfig | str | Callable[..., Any], seed: int = 0, settings: Any = None) -> EnvReport:
    """The report of `check_env`, which plays in a process of its own; with `render_mode="rgb_array"` that renders too.

    An environment that cannot be sent to another process plays here, and a warning says so; on a system without worker
    processes each does. Another warning tells of wrappers that remember more than an episode.

    Args:
        settings: of a sampler, whose `step_timeout_s` and `start_timeout_s` end a call that hangs.

    Raises:
        ConfigError, EnvContractError: as `check_env`. EnvWorkerError: also if the environment ended its process or
            hangs; the message names the call and the exit code or signal.
    """
    report = _checked(as_env_config(env), seed, settings)
    if report.warning:
        warnings.warn(report.warning, stacklevel=2)
    return report


def _checked(config: EnvConfig, seed: int, settings: Any) -> EnvReport:
    if why_no_children():  # the run will step it in this process as well
        return check_env(config, seed=seed)
    try:
        parts = ship((config, entries_to_ship(config.name)), "it", path=False)
    except ConfigError as error:
        cause = error.__cause__
        return _here(config, seed, f"it cannot be sent to another process ({type(cause).__name__}: {cause})")
    return _apart(config, parts, seed, settings)


def _apart(config: EnvConfig, parts: bytes, seed: int, settings: Any) -> EnvReport:
    step_s = getattr(settings, "step_timeout_s", getattr(settings, "start_timeout_s", STEP_TIMEOUT_S))
    start_s = getattr(settings, "start_timeout_s", START_TIMEOUT_S)
    workers = Workers(1, seed, Faults("raise"), step_s, start_s, module="penstock.workers.env_check")
    try:
        found = workers.start(_Watch(workers, config.name, Check(parts, seed)))[0][0]
    finally:
        workers.close()
    if "foreign" in found:
        return _here(config, seed, f"another process cannot load it ({found['foreign']})")
    if "error" in found:
        raise Fault(found["error"]["kind"], found["error"]["text"]).error()
    spec: Any = EnvSpec.from_plain(found["spec"])
    agents: Any = found["agents"] and AgentSpecs.from_plain(found["agents"])
    return EnvReport(**{**found, "spec": spec, "agents": agents})


def _here(config: EnvConfig, seed: int, why: str) -> EnvReport:
    warnings.warn(
        f"{config.name} is checked in this process, which a crash or hang of it would take along: {why}", stacklevel=4
    )
    return check_env(config, seed=seed)


class _Watch:
    """`Supervised`: the one message of the process, and where it was when it died."""

    def __init__(self, workers: Workers, name: str, check: Check) -> None:
        self._workers, self._name, self._check = workers, name, check

    def messages(self, w: int, replaces: bool) -> list[Any]:
        return [self._check]

    def whereabouts(self, w: int, block: Any) -> str:
        place = os.pread(self._workers.memory_fds[_PLACE], _PLACE_BYTES, 0).rstrip(b"\0").decode(errors="replace")
        return f"the check of {self._name} before anything else, in {place or 'the import of what makes it'}"

    def lost(self, w: int) -> None:
        pass


class CheckingProcess(Host):
    """Plays one environment and reports."""

    title = "check"

    def read(self, message: Check) -> dict[str, Any]:
        try:
            config, registered = unship(message.parts)
        except Exception as error:
            return {"foreign": f"{type(error).__name__}: {error}"}
        take_shipped(registered)
        watched = replace(config, wrappers=(*config.wrappers, self.watch))
        self.note(MAKING, "its construction")
        try:
            report = check_env(watched, seed=message.seed)
            if config.kwargs.get("render_mode") == "rgb_array":
                self.render(watched, message.seed)
        except PenstockError as error:
            return {"error": describe(error)}
        agents = None if report.agents is None else report.agents.to_plain()
        found = {f.name: getattr(report, f.name) for f in fields(report)}
        return found | {"spec": report.spec.to_plain(), "agents": agents}

    def serve(self) -> None:
        self.sleep_until(lambda: self.block[control.COMMAND] != self.block[control.DONE_COMMAND])
        self.taken()
        self.answer([])  # the only command is to quit

    def render(self, config: EnvConfig, seed: int) -> None:
        """Renders the first observation of an episode, as a video would."""
        env = config.make()
        if not isinstance(env, gym.vector.VectorEnv):
            env.reset(seed=env_seed(seed, 0, 0))
            self.note(STEPPING, "render()")
            with drawing_unseen():
                env.render()
        close_env(env, config.name)

    def note(self, doing: int, place: str) -> None:
        """Says where it is, for a message about its death and for the limit of its time."""
        text = place.encode()[:_PLACE_BYTES]
        os.pwrite(self.spawn_args.memory_fds[_PLACE], text.ljust(_PLACE_BYTES, b"\0"), 0)
        self.block[control.ACTIVITY + 1] = doing
        self.block[control.ACTIVITY + 2] += 1

    def watch(self, env: Any) -> Any:
        """The same environment, with calls noted before they begin."""
        reset, step, close = env.reset, env.step, env.close
        seed, count = None, 0

        def noted_reset(*args: Any, **kwargs: Any) -> Any:
            nonlocal seed, count
            seed, count = kwargs.get("seed"), 0
            self.note(RESETTING, f"reset() with seed {seed}")
            return reset(*args, **kwargs)

        def noted_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            self.note(STEPPING, f"step() at step {count} of the episode with seed {seed}{last(args[0])}")
            count += 1
            return step(*args, **kwargs)

        def noted_close(*args: Any, **kwargs: Any) -> Any:
            self.note(CLOSING, "close()")
            result = close(*args, **kwargs)
            self.note(MAKING, "its construction")
            return result

        with contextlib.suppress(AttributeError):  # it has __slots__ and no room: a message tells less
            env.reset, env.step, env.close = noted_reset, noted_step, noted_close
        return env


def main() -> None:
    """Entry point of the process."""
    run_process(CheckingProcess)
