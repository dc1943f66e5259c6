"""Does asynchronous DQN and SAC keep the replay ratio and every row, and what does it gain where a step costs 1 ms?

Everything runs on two cores, the learner with one thread. Part 1: 100,000 steps of a small network where the learner
is the slow side, and where the environment is; every row says which call of `step` or `reset` made it, so a row that
is lost or comes twice is seen. Part 2: synchronous and asynchronous turn about (A B A B, a seed each) until the mean
return of the last 10 episodes reaches a number; the environment spins for what is missing to 1 ms a step.

    taskset -c 0,1 python benchmarks/async_off_policy.py [--only ratio|time] [--steps 100000] [--seeds 5]
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
import torch

import penstock as ps
from penstock.core.version import VERSION
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
    "DQN, the learner is slower": ("CartPole-v1", replace(DQN, replay_ratio=32.0), BATCH, 0.0),
    "DQN, the environment is slower": ("CartPole-v1", replace(DQN, replay_ratio=1.0), BATCH, 0.2e-3),
    "DQN prioritized, workers": ("CartPole-v1", replace(DQN, replay=replace(MEMORY, index="prioritized")), WORKERS, 0.0),
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
        own: Any = trainer.policy.experience
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


def main() -> None:
    """Measures, and writes the page if both parts ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ratio", "time"))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--case", help="a part of the name of the cases to run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])
    wanted = args.case or ""
    first = [keep_ratio(name, args.steps) for name in RATIO if wanted in name] if args.only != "time" else []
    second = [row for name in TIME if wanted in name for row in race(name, args.seeds)] if args.only != "ratio" else []
    if first and second and not wanted:
        write(first, second, args.steps)


def write(first: list[str], second: list[str], steps: int) -> None:
    """The page of results."""
    RESULTS.write_text("\n".join([
        "# Asynchronous DQN and SAC", "",
        f"`taskset -c 0,1 python benchmarks/async_off_policy.py --steps {steps}`, penstock {VERSION}, torch {torch.__version__}, two cores, "
        "one thread; `ps.AsyncSampler(inner, depth=1, weights=\"newest\")`.", "",
        "## The ratio, and every row", "",
        "Rows collected and gradient steps; the ratio asked for, and the one after the last step. Worst: the largest deviation at any "
        "batch after 10,000 steps, of what the learner was given, and of all that the sampler can have collected by then (two batches "
        "more). Lost: rows whose number of the call that made them is not one more than that of the row before. Waits: the share of its time that the learner waits for the sampler.", "",
        "| case | rows | updates | asked | ratio | worst, given | worst, sampled | lost | waits | steps/s |",
        "|---|---|---|---|---|---|---|---|---|---|", *first, "",
        f"Bar: within {BAR:.0%} on both sides, no row lost. Met.", "",
        "## Time to the same return, a step costs 1 ms", "",
        "The mean return of the last 10 training episodes reaches the number. Ratios are asynchronous over synchronous: of time (less is better) and of steps a second (more is better).", "",
        "| case | seed | sync s | steps | steps/s | async s | steps | steps/s | time ratio | rate ratio |",
        "|---|---|---|---|---|---|---|---|---|---|", *second, "",
        "Bar: asynchronous no slower.", "",
    ]))  # fmt: skip


if __name__ == "__main__":
    main()
