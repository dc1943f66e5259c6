"""The fastest sampler here: a few candidates, each measured with the environment and the policy of a plan."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.machine import Machine, counted, read_machine
from penstock.envs.pools.native import makes_vector_env
from penstock.learn.policy_set import agents_of
from penstock.run.affinity import default_workers
from penstock.run.experiment import Experiment
from penstock.samplers import find_sampler
from penstock.samplers.cpu import CpuSampler
from penstock.samplers.gpu import GpuSampler
from penstock.samplers.serial import SerialSampler

if TYPE_CHECKING:  # it asks for the fastest sampler
    from penstock.run.plan import Plan

Synchronous: TypeAlias = SerialSampler | CpuSampler | GpuSampler
"""Settings of the samplers that a benchmark compares."""
NAMES = ("serial", "cpu", "gpu", "alternating")
"""Names of the samplers that are tried; asynchronous ones collect other batches, so speed alone cannot choose them."""
SECONDS = 2.0
"""Duration of one candidate's measurement, start-up not counted."""
_WORTH = 0.95
"""Share of the fastest sampler's speed at which a simpler one is preferred."""
_PASSES = 2
"""Measurements of each candidate, of which the faster counts: other programs may disturb one of them."""
_BATCHES = 4
"""Batches that fit into one measurement with the SerialSampler; T is shortened for it."""


@dataclass(frozen=True)
class Timing:
    """The settings of one sampler and its measured speed."""

    sampler: Synchronous
    steps_per_s: float = 0.0
    """Env steps per second, learning not counted; 0 if it could not be measured."""
    note: str = ""
    """The error if it could not be measured."""
    took_s: float = 0.0
    """Duration of its measurements, at most the seconds asked for and one batch."""
    cut: bool = False
    """True if that ended a measurement before it had a batch besides the first, which may be slower than others."""


@dataclass(frozen=True)
class BenchmarkResult:
    """The result of a benchmark: every candidate, and the best."""

    rows: tuple[Timing, ...]
    """The fastest first, those that failed last."""
    best: Timing
    T: int
    """Time steps of the batches that were measured: the run's, or fewer where its environment is slow."""
    machine: str
    seconds: float
    """Duration of all of it."""


def bench(
    plan: Plan, seconds: float = SECONDS, same_device: bool = False, say: Callable[[str], None] = lambda text: None
) -> BenchmarkResult:
    """Measures the candidates for a plan on this machine, each for this many seconds; returns all and the fastest.

    No candidate is measured for longer than its seconds and one batch more.

    Args:
        same_device: leave out samplers that act on another device than the learner's.
        say: called with a description of each measurement before it begins.

    Raises:
        ConfigError, EnvWorkerError: the environment fails, or no sampler works.
    """
    started = time.monotonic()
    exp, machine = plan.exp, read_machine()
    base = base_sampler(exp)
    with run_threads(exp):
        agents = agents_of(plan.make_policy())
        say("how long a batch takes")
        first = _batches(plan, replace(base, T=1), agents, 0.0, seconds, _BATCHES)
        row_s = statistics.median(took for took, _ in first[1:] or first)
        T = int(min(max(seconds / _PASSES / _BATCHES / row_s, 1), base.T))
        native = makes_vector_env(plan.env)
        rows = [Timing(sampler) for sampler in candidates(base, machine, native, same_device, exp.run.device)]
        for _ in range(_PASSES):
            rows = [_measured(plan, row, T, agents, seconds, say) for row in rows]
    measured = [row for row in rows if row.steps_per_s]
    if not measured:
        raise ConfigError(f"no sampler could be measured: {rows[0].note}; choose one")
    rows.sort(key=lambda row: -row.steps_per_s)
    return BenchmarkResult(tuple(rows), choose(measured), T, str(machine), time.monotonic() - started)


def base_sampler(exp: Experiment | None) -> SerialSampler:
    """The settings that all candidates share: T, B, and all else that changes the content of a batch."""
    if exp is None:
        return SerialSampler()
    found = exp.sampler_settings.inner or exp.sampler_settings
    shared = {f.name: getattr(found, f.name) for f in fields(SerialSampler) if hasattr(found, f.name)}
    return SerialSampler(**{**shared, **exp.sampler_settings.spec._asdict()})


def candidates(
    base: SerialSampler, machine: Machine, native: bool, same_device: bool, device: str
) -> list[Synchronous]:
    """The samplers to measure: serial, and each of the others with its usual number of workers and with half of it."""
    samplers: list[Synchronous] = [base]
    if native:
        return samplers
    for name in NAMES[1:]:
        groups = 2 if name == "alternating" else 1
        if groups > base.B or (name == "cpu" and same_device and device != "cpu"):
            continue
        usual = default_workers(machine, base.B, groups, server=name != "cpu")
        counts = sorted({usual, max(usual // 2, 1)})
        samplers += [with_settings(base, {"name": name, "workers": n, "groups": groups}) for n in counts]
    return samplers


def with_settings(base: SerialSampler, settings: Mapping[str, Any]) -> Synchronous:
    """The sampler that `settings` names, with its workers and groups, and all else as in `base`."""
    if settings["name"] not in NAMES:
        raise ConfigError(f"sampler {settings['name']!r}; expected one of {', '.join(NAMES)}")
    cls = find_sampler(settings["name"])
    shared = {f.name: getattr(base, f.name) for f in fields(base)}
    counts = {key: settings[key] for key in ("workers", "groups") if key in settings and settings["name"] != "serial"}
    return cls(**shared, **counts)


def settings_of(sampler: Synchronous) -> dict[str, Any]:
    """Name, workers and groups of a sampler: the inverse of `with_settings`."""
    groups = 0 if sampler.name == "cpu" else sampler.groups  # a CpuSampler always has one group
    counts = {"workers": sampler.workers, "groups": groups}
    return {"name": sampler.name, **{key: n for key, n in counts.items() if n}}


def describe(sampler: Synchronous) -> str:
    """A sampler as text, e.g. `cpu, 4 workers` or `alternating, 3 workers x 2 groups`."""
    settings = settings_of(sampler)
    workers = settings.get("workers")
    text = settings["name"] if workers is None else f"{settings['name']}, {counted(workers, 'worker')}"
    return text + (f" x {settings['groups']} groups" if settings.get("groups", 1) > 1 else "")


def choose(measured: list[Timing]) -> Timing:
    """The simplest sampler about as fast as the fastest: serial before workers, few workers before many."""
    fastest = max(row.steps_per_s for row in measured)
    good = [row for row in measured if row.steps_per_s >= _WORTH * fastest]
    return min(good, key=lambda row: (row.sampler.workers, -row.steps_per_s))


def _measured(plan: Plan, row: Timing, T: int, agents: Any, seconds: float, say: Callable[[str], None]) -> Timing:
    """The row with its speed in batches of T, if that is more than it had."""
    left = seconds - row.took_s
    if row.note or left <= 0:
        return replace(row, cut=left <= 0)
    say(describe(row.sampler))
    try:
        timed = _batches(plan, replace(row.sampler, T=T), agents, seconds / _PASSES, left)
    except (ConfigError, EnvWorkerError) as error:
        return replace(row, steps_per_s=0.0, note=str(error).splitlines()[0])
    speed = statistics.median(steps / took for took, steps in timed[1:] or timed)
    took_s = row.took_s + sum(took for took, _ in timed)
    return replace(row, steps_per_s=max(speed, row.steps_per_s), took_s=took_s, cut=len(timed) == 1)


def _batches(
    plan: Plan, sampler: Synchronous, agents: Any, seconds: float, most_s: float, least: int = 1
) -> list[tuple[float, int]]:
    """Duration in s and env steps of a first batch, and of as many more as fit the seconds, at least `least`.

    Args:
        most_s: no further batch begins after this many seconds, not even of these.
    """
    live = replace(sampler, max_decorrelation_steps=0).build(plan.env, plan.seed)
    try:
        live.initialize(agents)
        timed, begun = list[tuple[float, int]](), time.perf_counter()
        until, now = math.inf, begun
        while (now < until or len(timed) <= least) and (not timed or now < begun + most_s):
            batch, _ = live.obtain_samples(len(timed))
            started, now = now, time.perf_counter()
            timed.append((now - started, batch.env_steps))
            until = min(until, now + seconds)
    finally:
        live.shutdown()
    return timed


@contextlib.contextmanager
def run_threads(exp: Experiment) -> Generator[None]:
    """Sets torch's threads as the run will, inside the block; "auto" is decided later and measured as 1."""
    before, wanted = torch.get_num_threads(), exp.run.learner_threads
    torch.set_num_threads(wanted if isinstance(wanted, int) else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
