"""The fastest sampler here: the parts of a step are measured, then the samplers not ruled out by those costs."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from penstock.core.batch import padded_rows
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.machine import Machine, counted, read_machine
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import makes_vector_env
from penstock.learn.policy_set import AnyPolicy, agents_of
from penstock.run.affinity import default_workers
from penstock.run.bench.costs import Costs, measure_acting, measure_env, measure_handshake
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
_WORTH = 0.95
"""Share of the fastest sampler's speed at which a simpler one is preferred."""
_SHORTEST_S = 0.4
_SECOND_PASS, _FINALISTS = 0.25, 3
"""Part of the budget in which the best so far are measured again, and how many of them."""
_MOST_GROUPS = 2


@dataclass(frozen=True)
class Row:
    """The settings of one sampler, with the time predicted and the speed measured."""

    sampler: Synchronous
    predicted_us: float
    """Duration of one row of all slots, from the measured parts."""
    steps_per_s: float = 0.0
    """Measured speed; 0 if it was not measured."""
    note: str = ""
    """The reason if it was not measured."""


@dataclass(frozen=True)
class Verdict:
    """The result of a benchmark: the parts of a step, every sampler, and the best."""

    costs: Costs
    rows: tuple[Row, ...]
    """The fastest first, those not measured last."""
    best: Row
    why: str
    """One sentence of reasons."""
    machine: str
    seconds: float


def bench(
    plan: Plan, budget_s: float, same_device: bool = False, say: Callable[[str], None] = lambda text: None
) -> Verdict:
    """Finds the fastest synchronous sampler for a plan on this machine, in about `budget_s` seconds.

    Of each sampler the setting with the best prediction comes first, so that little time suffices; settings that no
    time is left for are listed as not measured. The best are measured twice, since other programs may disturb.

    Args:
        same_device: leave out samplers that act on another device than the learner's.
        say: called with a description of each measurement before it begins.

    Raises:
        ConfigError, EnvWorkerError: the environment fails, or no sampler works.
    """
    started = time.monotonic()
    deadline = started + budget_s
    exp, config, machine = plan.exp, plan.env, read_machine()
    base = base_sampler(exp)
    with run_threads(exp):
        policy = plan.make_policy()
        native = makes_vector_env(config)
        costs = _measure_parts(config, exp.run.seed, base, policy, machine, budget_s, native, say)
        agents = agents_of(policy)
        rows = [Row(s, predict(s, costs)) for s in candidates(base, machine, native, same_device, exp.run.device)]
        rows = in_turn(rows)
        first = deadline - _SECOND_PASS * budget_s
        # One is measured however late it is: on a busy machine the parts alone may have taken all the time.
        until = [max(first, time.monotonic() + _SHORTEST_S), *[first] * (len(rows) - 1)]
        rows = [
            _measured(config, exp.run.seed, row, agents, until[i], len(rows) - i, say) for i, row in enumerate(rows)
        ]
        rows.sort(key=lambda row: -row.steps_per_s)
        finalists = [row for row in rows[:_FINALISTS] if row.steps_per_s]
        for i, row in enumerate(finalists):  # what else ran on the machine may have cost one of them its place
            again = _measured(config, exp.run.seed, row, agents, deadline, len(finalists) - i, say)
            rows[i] = replace(row, steps_per_s=max(again.steps_per_s, row.steps_per_s))
    measured = [row for row in rows if row.steps_per_s]
    if not measured:
        raise ConfigError(f"no sampler could be measured: {rows[0].note}; give it more time (--budget), or choose one")
    rows.sort(key=lambda row: -row.steps_per_s)
    best = choose(measured)
    why = explain(best, costs, len(measured), len(rows))
    return Verdict(costs, tuple(rows), best, why, str(machine), time.monotonic() - started)


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
    """The combinations of sampler, workers and groups that are worth a measurement."""
    found: list[Synchronous] = [base]
    if native:
        return found
    for name in NAMES[1:]:
        groups = _MOST_GROUPS if name == "alternating" else 1
        if name == "cpu" and same_device and device != "cpu":
            continue
        server = name != "cpu"
        counts = {default_workers(machine, base.B, groups, server), *(2**k for k in range(8))}
        most = min(base.B // groups, machine.busy_cores)
        found += [
            with_settings(base, {"name": name, "workers": n, "groups": groups}) for n in sorted(counts) if n <= most
        ]
    return found


def with_settings(base: SerialSampler, found: Mapping[str, Any]) -> Synchronous:
    """The sampler that `found` names, with its workers and groups, and all else as in `base`."""
    if found["name"] not in NAMES:
        raise ConfigError(f"sampler {found['name']!r}; expected one of {', '.join(NAMES)}")
    cls = find_sampler(found["name"])
    shared = {f.name: getattr(base, f.name) for f in fields(base)}
    own = {key: found[key] for key in ("workers", "groups") if key in found and found["name"] != "serial"}
    return cls(**shared, **own)


def settings_of(sampler: Synchronous) -> dict[str, Any]:
    """Name, workers and groups of a sampler: the inverse of `with_settings`."""
    groups = 0 if sampler.name == "cpu" else sampler.groups  # a CpuSampler has one group whatever is said
    counts = {"workers": sampler.workers, "groups": groups}
    return {"name": sampler.name, **{key: n for key, n in counts.items() if n}}


def describe(sampler: Synchronous) -> str:
    """A sampler as text, e.g. `cpu, 4 workers` or `alternating, 3 workers x 2 groups`."""
    found = settings_of(sampler)
    workers = found.get("workers")
    text = found["name"] if workers is None else f"{found['name']}, {counted(workers, 'worker')}"
    return text + (f" x {found['groups']} groups" if found.get("groups", 1) > 1 else "")


def predict(sampler: Synchronous, costs: Costs) -> float:
    """Duration of one row of all slots in us, predicted from the parts of a step."""
    found, B = settings_of(sampler), sampler.B
    workers, groups = found.get("workers", 1), found.get("groups", 1)
    if found["name"] == "serial":
        return B * costs.step_us + costs.forward(B)
    if found["name"] == "cpu":
        mine = math.ceil(B / workers)
        return mine * costs.step_us + costs.forward(mine)
    rows = math.ceil(B / groups)
    stepping = math.ceil(rows / workers) * costs.step_us + costs.handshake_us
    if groups == 1:
        return stepping + costs.forward(rows)
    return max(groups * costs.forward(rows), stepping + costs.forward(rows), groups * (stepping - costs.handshake_us))


def in_turn(rows: list[Row]) -> list[Row]:
    """The rows in the order of measurement: serial, the best prediction of each other sampler, the second bests, ..."""
    kinds = [[row for row in rows if settings_of(row.sampler)["name"] == name] for name in NAMES]
    ranked = [(rank, row) for kind in kinds for rank, row in enumerate(sorted(kind, key=lambda row: row.predicted_us))]
    ranked.sort(key=lambda x: (x[0], x[1].sampler.workers > 0, x[1].predicted_us))
    return [row for _, row in ranked]


def choose(measured: list[Row]) -> Row:
    """The simplest sampler about as fast as the fastest: serial before workers, few workers before many."""
    fastest = max(row.steps_per_s for row in measured)
    good = [row for row in measured if row.steps_per_s >= _WORTH * fastest]
    return min(good, key=lambda row: (_order(row.sampler), -row.steps_per_s))


def explain(best: Row, costs: Costs, measured: int, of: int) -> str:
    """One sentence of reasons for a choice."""
    found, B = settings_of(best.sampler), best.sampler.B
    step, act, shake = costs.step_us, costs.forward(B), costs.handshake_us
    share = act / (act + B * step)
    part = f"inference is {share:.0%} of a step" if share > 0.5 else f"stepping is {1 - share:.0%} of a step"
    workers = found.get("workers", 1)
    if found["name"] == "serial":
        costly = f"and a hand-shake {_us(shake)}: other processes would not save what they cost"
        why = f"{part}, env.step is {_us(step)} {costly}" if shake else f"{part}: the environment is batched by itself"
    elif found["name"] == "cpu":
        why = (
            f"env.step is {_us(step)}, a hand-shake at every step {_us(shake)}: "
            f"cpu, whose {counted(workers, 'worker')} act by themselves"
        )
    elif found.get("groups", 1) > 1:
        why = f"{part}: alternating, one group steps while the other is served"
    else:
        each = math.ceil(B / workers)
        why = (
            f"{part}: gpu, {counted(workers, 'worker')} step, and one forward of {counted(B, costs.unit)} "
            f"({_us(act)}) stands for {workers} of {each} ({_us(costs.forward(each))} each)"
        )
    return why + (f" ({measured} of {of} settings fitted into the budget)" if measured < of else "")


def _measure_parts(
    config: EnvConfig,
    seed: int,
    base: SerialSampler,
    policy: AnyPolicy,
    machine: Machine,
    budget_s: float,
    native: bool,
    say: Callable[[str], None],
) -> Costs:
    say("the parts of a step")
    slice_s = min(max(budget_s / 30, 0.1), 2.0)
    step_us, p99_us = measure_env(config, seed, slice_s, base.B if native else 0)
    counts = {padded_rows(math.ceil(base.B / n)) for n in (1, 2, 4, 8, 16) if n == 1 or n <= 2 * machine.busy_cores}
    forward = {n: measure_acting(policy, config.seating, n, slice_s / len(counts)) for n in sorted(counts)}
    shake_us = 0.0 if native else measure_handshake(slice_s)
    return Costs(step_us, p99_us, forward, shake_us, "row" if config.seating is None else "environment")


def _measured(
    config: EnvConfig, seed: int, row: Row, agents: Any, deadline: float, left: int, say: Callable[[str], None]
) -> Row:
    """The row with its speed: whole batches for a share of the time left, the first one not counted."""
    now = time.monotonic()
    if now >= deadline:
        return replace(row, note="no time left")
    say(describe(row.sampler))
    share = max((deadline - now) / left, _SHORTEST_S)
    # A batch is as long as a quarter of the share lets it be, the run's own T at most.
    T = int(max(min(row.sampler.T, share * 0.25e6 / max(row.predicted_us, 1e-3)), 1))
    short = replace(row.sampler, T=T, max_decorrelation_steps=0)
    try:
        live = short.build(config, seed)
    except (ConfigError, EnvWorkerError) as error:
        return replace(row, note=str(error).splitlines()[0])
    try:
        live.initialize(agents)
        live.obtain_samples(0)
        until = max(min(now + share, deadline), time.monotonic() + _SHORTEST_S)
        rates: list[float] = []
        while time.monotonic() < until or not rates:
            started = time.perf_counter()
            batch, _ = live.obtain_samples(len(rates) + 1)
            rates.append(batch.env_steps / (time.perf_counter() - started))
    except EnvWorkerError as error:
        return replace(row, note=str(error).splitlines()[0])
    finally:
        live.shutdown()
    return replace(row, steps_per_s=statistics.median(rates))


def _order(sampler: Synchronous) -> tuple[int, int]:
    return (NAMES.index(settings_of(sampler)["name"]) > 0, sampler.workers)


@contextlib.contextmanager
def run_threads(exp: Experiment) -> Generator[None]:
    """Sets torch's threads as the run will, inside the block; "auto" is decided later and measured as 1."""
    before, wanted = torch.get_num_threads(), exp.run.learner_threads
    torch.set_num_threads(wanted if isinstance(wanted, int) else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _us(us: float) -> str:
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us"
