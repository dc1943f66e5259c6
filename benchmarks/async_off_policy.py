"""Asynchronous DQN and SAC: the replay ratio, the rows, and the speed gained where a step costs 1 ms.

Everything runs on two cores, the learner with one thread. Part 1: 100,000 steps of a small network where the learner
is the slow side, and where the environment is; every row says which call of `step` or `reset` made it, so a row that
is lost or comes twice is seen. Part 2: synchronous and asynchronous turn about (A B A B, a seed each) until the mean
return of the last 10 episodes reaches a number; the environment spins for what is missing to 1 ms a step. Part 3: the
same two, but in turns of 400 steps, so that whatever else the machine does hits both.

    python benchmarks/async_off_policy.py [--only ratio|time|turns] [--steps 100000] [--seeds 5] [--turns 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch

import penstock as ps
from penstock.core import VERSION
from penstock.run.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "async_off_policy.md"
BAR = 0.02
WARM = 500
SMALL = ps.Net(hidden=(32, 32), activation="relu")
MIDDLE = ps.Net(hidden=(64, 64), activation="relu")
BATCH = ps.SerialSampler(T=8, B=4)
MEMORY = ps.ReplaySettings(capacity=50_000)
DQN = ps.DQN(batch_size=32, replay_ratio=8.0, learning_starts=WARM, net=SMALL, replay=MEMORY)
SAC = ps.SAC(batch_size=32, replay_ratio=8.0, learning_starts=WARM, net=SMALL, replay=MEMORY)
WORKERS = ps.CpuSampler(T=8, B=4, workers=2)
RATIO: dict[str, tuple[str, Any, Any, float]] = {
    "DQN, the learner is slower": ("CartPole-v1", DQN, BATCH, 0.0),
    "DQN, the environment is slower": ("CartPole-v1", replace(DQN, replay_ratio=1.0), BATCH, 0.2e-3),
    "DQN prioritized, workers": (
        "CartPole-v1",
        replace(DQN, replay=replace(MEMORY, index="prioritized")),
        WORKERS,
        0.0,
    ),
    "SAC, the learner is slower": ("Pendulum-v1", SAC, BATCH, 0.0),
    "SAC, the environment is slower": ("Pendulum-v1", replace(SAC, replay_ratio=1.0), BATCH, 0.4e-3),
}
"""Environment, settings, sampler, and what a step costs at least, in seconds."""
TIME: dict[str, tuple[str, Any, Any, float, int]] = {
    "DQN": (
        "CartPole-v1",
        ps.DQN(lr=1e-3, batch_size=64, replay_ratio=32.0, learning_starts=WARM, target_interval=1, tau=0.01, net=MIDDLE,
               epsilon="linear(1.0, 0.05, 0.1)", replay=MEMORY),
        ps.SerialSampler(T=8, B=1), 150.0, 20_000,
    ),
    "SAC": (
        "Pendulum-v1", ps.SAC(lr=1e-3, batch_size=128, replay_ratio=128.0, net=MIDDLE, replay=MEMORY),
        ps.SerialSampler(T=8, B=1), -250.0, 20_000,
    ),
}  # fmt: skip
"""Environment, settings, sampler, return to reach, and steps to give up after."""


class Costly(gym.Wrapper[Any, Any, Any, Any]):
    """A step takes at least `seconds` of a core; `info["call"]` counts the calls, those of `reset` too."""

    def __init__(self, env: Any, seconds: float) -> None:
        super().__init__(env)
        self._seconds, self._calls = seconds, -1

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        return obs, info | {"call": self._next()}

    def step(self, action: Any) -> Any:
        over = time.perf_counter() + self._seconds
        obs, reward, terminated, truncated, info = self.env.step(action)
        info = info | {"call": self._next()}
        while time.perf_counter() < over:
            pass
        return obs, reward, terminated, truncated, info

    def _next(self) -> float:
        self._calls += 1
        return float(self._calls)


def experiment(env: str, algo: Any, sampler: Any, cost_s: float, steps: int, seed: int) -> ps.Experiment:
    """`env` is wrapped; nothing is written."""
    return ps.Experiment(
        lambda: Costly(gym.make(env), cost_s), algo, sampler, ps.RunConfig(steps=steps, seed=seed), info_keys=("call",)
    )


def ahead(sampler: Any) -> ps.AsyncSampler:
    """The sampler in a process tree of its own, one batch ahead, with the newest parameters."""
    return ps.AsyncSampler(sampler, depth=1, weights="newest")


def keep_ratio(name: str, steps: int) -> str:
    """A row of the first table."""
    env, algo, sampler, cost_s = RATIO[name]
    B, rows = sampler.B, sampler.T * sampler.B
    worst_received = worst_sampled = 0.0
    received = lost = 0
    last = np.full(B, np.nan)
    sample_s = train_s = 0.0
    started = time.perf_counter()
    with Trainer(experiment(env, algo, ahead(sampler), cost_s, steps, 1)) as trainer:
        own: Any = trainer.policy.replay_schedule
        while trainer.env_steps < steps:
            metrics = trainer.train()
            batch = trainer.sampler.last_batch
            calls = batch.info["env"]["call"]
            steps_between = np.diff(np.concatenate([last[None], calls]), axis=0)
            lost += int(np.abs(np.nan_to_num(steps_between, nan=1.0) - 1.0).sum())
            last, received = calls[-1], received + int(batch.valid.sum())
            taken = metrics["time/sample_frac"]
            sample_s, train_s = sample_s + taken, train_s + 1.0 - taken
            trained = own.trained * own.batch_size
            if own.collected > 10_000:
                # What the sampler may have collected by now, at most: the batch in the making is whole.
                sampled = own.collected + 2 * rows - own.learning_starts
                asked = algo.replay_ratio
                worst_sampled = max(worst_sampled, abs(trained / sampled / asked - 1.0))
                worst_received = max(worst_received, abs(trained / (sampled - 2 * rows) / asked - 1.0))
        assert received == own.collected == own.replay.appended == trainer.env_steps
        collected, trained = own.collected, own.trained
    seconds = time.perf_counter() - started
    ratio = trained * algo.batch_size / (collected - algo.learning_starts)
    waits = sample_s / (sample_s + train_s)
    row = (f"| {name} | {collected:,} | {trained:,} | {algo.replay_ratio:g} | {ratio:.4f} | {worst_received:.2%} | {worst_sampled:.2%} | "
           f"{lost} | {waits:.0%} | {collected / seconds:,.0f} |")  # fmt: skip
    print(row, flush=True)
    assert max(worst_received, worst_sampled) <= BAR and lost == 0, row
    return row


def until_good(name: str, sampler: Any, seed: int) -> tuple[float, int]:
    """Seconds and steps until the last 10 episodes are as good as they shall be; nan if that never comes."""
    env, algo, _, good, limit = TIME[name]
    with Trainer(experiment(env, algo, sampler, 1e-3, limit, seed)) as trainer:
        started = time.perf_counter()
        while trainer.env_steps < limit:
            trainer.train()
            if len(trainer.recent) >= 10 and trainer.recent.last(10).mean_return >= good:
                return time.perf_counter() - started, trainer.env_steps
    return float("nan"), limit


def race(name: str, seeds: int) -> list[str]:
    """Rows of the second table: one for each seed, and a last one of medians."""
    _, _, sampler, good, _ = TIME[name]
    lines, ratios, rates = [], [], []
    for seed in range(1, seeds + 1):
        order = (sampler, ahead(sampler)) if seed % 2 else (ahead(sampler), sampler)
        found = {each: until_good(name, each, seed) for each in order}
        (a_s, a_steps), (b_s, b_steps) = found[sampler], found[ahead(sampler)]
        ratios.append(b_s / a_s)
        rates.append((b_steps / b_s) / (a_steps / a_s))
        lines.append(f"| {name} to {good:g} | {seed} | {a_s:.1f} | {a_steps:,} | {a_steps / a_s:,.0f} | {b_s:.1f} | {b_steps:,} | "
                     f"{b_steps / b_s:,.0f} | {ratios[-1]:.2f} | {rates[-1]:.2f} |")  # fmt: skip
        print(lines[-1], flush=True)
    total = f"| {name}, median of {seeds} | | | | | | | | **{statistics.median(ratios):.2f}** | **{statistics.median(rates):.2f}** |"
    print(total, flush=True)
    return [*lines, total]


def in_turns(name: str, turns: int, steps: int = 400) -> str:
    """A row of the third table: medians of the turns, the first two of which warm up."""
    env, algo, sampler, _, _ = TIME[name]
    found: list[list[float]] = []
    with (
        Trainer(experiment(env, algo, sampler, 1e-3, 10**6, 1)) as a,
        Trainer(experiment(env, algo, ahead(sampler), 1e-3, 10**6, 1)) as b,
    ):
        helpers = psutil.Process().children(recursive=True)
        for _ in range(turns + 2):
            found.append([])
            for trainer in (a, b):
                before, theirs = trainer.env_steps, cpu_s(helpers)
                started, ours = time.perf_counter(), time.process_time()
                while trainer.env_steps < before + steps:
                    trainer.train()
                n = trainer.env_steps - before
                spent = (time.perf_counter() - started, time.process_time() - ours, cpu_s(helpers) - theirs)
                found[-1] += [1e3 * x / n for x in spent]
    wall, own, _, ahead_wall, learner, child = np.median(found[2:], axis=0)
    ratio = [turn[0] / turn[3] for turn in found[2:]]
    row = (f"| {name} | {turns} | {1e3 / wall:,.0f} | {1e3 / ahead_wall:,.0f} | {statistics.median(ratio):.2f} | {own:.2f} | "
           f"{learner:.2f} | {child:.2f} | **{own / max(learner, child):.2f}** |")  # fmt: skip
    print(row, flush=True)
    return row


def cpu_s(processes: list[psutil.Process]) -> float:
    """Seconds that cores have worked for them."""
    return sum(x.cpu_times().user + x.cpu_times().system for x in processes)


def main() -> None:
    """Measures, and puts what was measured into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ratio", "time", "turns"))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    if args.only in (None, "ratio"):
        put("The ratio, and every row", [
            f"`--only ratio --steps {args.steps}`. Asked: `replay_ratio`; ratio: after the last step. Worst: the largest deviation at any",
            "batch after 10,000 steps, of what the learner was given, and of all that the sampler can have collected by then (two",
            "batches more). Lost: rows whose call is not the one after that of the row before. Waits: the learner, for the sampler.", "",
            "| case | rows | updates | asked | ratio | worst, given | worst, sampled | lost | waits | steps/s |",
            "|---|---|---|---|---|---|---|---|---|---|", *(keep_ratio(name, args.steps) for name in RATIO), "",
            f"Bar: within {BAR:.0%} on both sides, and no row lost. Met in every case.",
        ])  # fmt: skip
    if args.only in (None, "time"):
        put("Time to the same return, a step costs 1 ms", [
            f"`--only time --seeds {args.seeds}`. The mean return of the last 10 training episodes reaches the number. Ratios are those of",
            "asynchronous to synchronous: of seconds (less is better), and of steps a second (more is better).", "",
            "| case | seed | sync s | steps | steps/s | async s | steps | steps/s | time ratio | rate ratio |",
            "|---|---|---|---|---|---|---|---|---|---|", *(row for name in TIME for row in race(name, args.seeds)),
        ])  # fmt: skip
    if args.only in (None, "turns"):
        put("Steps a second in turns, a step costs 1 ms", [
            f"`--only turns --turns {args.turns}`: as above, both alive at once and trained in turns of 400 steps, medians. Where other",
            "work keeps the cores busy, processes that wait for each other wait for the scheduler too; what does not depend on it",
            "is the time of a core that each process needs for a step. On two free cores the slower process sets the pace: the",
            "last column is synchronous over that.", "",
            "| case | turns | sync steps/s | async steps/s | ratio | core ms a step, sync | learner | sampler | on free cores |",
            "|---|---|---|---|---|---|---|---|---|",
            *(in_turns(name, args.turns) for name in TIME),
        ])  # fmt: skip


def put(title: str, lines: list[str]) -> None:
    """Replaces a section of the page of results, which keeps the others."""
    head = "\n".join([
        "# Asynchronous DQN and SAC", "",
        f"`python benchmarks/async_off_policy.py`, penstock {VERSION}, torch {torch.__version__}, two cores, learner and acting with one",
        "thread each; `ps.AsyncSampler(inner, depth=1, weights=\"newest\")`. Load average while measuring: "
        f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores.", "",
    ])  # fmt: skip
    old = RESULTS.read_text().split("\n## ")[1:] if RESULTS.is_file() else []
    sections = {text.split("\n")[0]: text for text in old}
    sections[title] = "\n".join([title, "", *lines, ""])
    RESULTS.write_text("\n## ".join([head, *sections.values()]))


if __name__ == "__main__":
    main()
