"""Tables of a benchmark of samplers, and a timeline of the recommended one."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.learn.policy_set import agents_of
from penstock.learn.train_ops import training_step
from penstock.run.bench.search import BenchmarkResult, describe, run_threads
from penstock.run.experiment import Experiment
from penstock.run.plan import Plan
from penstock.run.progress import print_summary
from penstock.run.timeline import WARM_UP, WINDOW, Tracing

_LONGEST_TRACE_S = 60.0
_TRACED_T = 32


def print_verdict(exp: Experiment, verdict: BenchmarkResult, command: str) -> None:
    """Prints the measurements, the samplers by speed, and the recommended one with the command that uses it."""
    console, best = Console(highlight=False), verdict.best
    T, B = best.sampler.spec
    console.print(f"{exp.algo_name} on {exp.env_config.name}, T={T}, B={B}, {verdict.machine}; {verdict.seconds:.0f} s")
    shorter = "" if verdict.T == T else f" (T={T} takes too long)"
    told = f"measured: collecting batches of T={verdict.T}{shorter} with this environment and policy"
    told += "; cut short: a batch took longer than the seconds for a sampler" * any(row.cut for row in verdict.rows)
    console.print(told, soft_wrap=True)
    samplers = Table("sampler", "workers", "groups", "steps/s", "of the fastest")
    for column in samplers.columns[1:]:
        column.justify = "right"
    fastest = max(row.steps_per_s for row in verdict.rows)
    for row in verdict.rows:
        sampler, mark = row.sampler, "bold" if row is best else None
        name = describe(sampler).partition(",")[0]
        counts = [str(n or "") for n in (sampler.workers, sampler.groups)]
        speed = f"{row.steps_per_s:,.0f}" if row.steps_per_s else ""
        part = f"{row.steps_per_s / fastest:.0%}" + ", cut short" * row.cut if row.steps_per_s else row.note
        samplers.add_row(name, *counts, speed, part, style=mark)
    console.print(samplers)
    print_summary("recommended", {"setting": describe(best.sampler)})
    print(command)  # in no frame, to be copied


def trace_sampler(plan: Plan, verdict: BenchmarkResult, path: Path) -> None:
    """Trains some short batches with the recommended sampler and writes their timeline."""
    sampler = replace(verdict.best.sampler, max_decorrelation_steps=0, T=min(verdict.best.sampler.T, _TRACED_T))
    policy = plan.make_policy()
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_threads(plan.exp))
        tracing = Tracing(path)
        stack.callback(tracing.close)
        live = plan.with_sampler(sampler).make_sampler()
        stack.callback(live.shutdown)
        stack.callback(tracing.close)
        live.initialize(agents_of(policy))
        until = time.monotonic() + _LONGEST_TRACE_S
        for itr in range(WARM_UP + WINDOW):
            tracing.tick(training_step(policy, live, itr).train_s)
            if time.monotonic() > until:
                break
