"""What a search saves and what it costs: asha beside random search and PBT beside its start, on a toy; `penstock tune`
beside `penstock launch`, in wall time.

    python benchmarks/search.py [--only toy|overhead|legs] [--steps 200000] [--trials 4] [--rounds 3]

The toy is a learning curve in closed form, v(lr) * (1 - exp(-3 step / 81)), with v = exp(-|log10 lr + 3|), whose optimum is
lr = 1e-3, read with noise that asha must rank trials by. Random search trains 27 trials to the end. Asha begins with
the same 27 proposals; where its best, by the curve without noise, is below random search's, it is searched on with
three times the trials, and all steps count. PBT's toy adds v(lr) of the present lr a step, copied with the state.

`overhead` trains equal runs by turns: a launch with a grid of learning rates, and a search without a scheduler over as
many. `legs` is the same search by asha with one trial, which is one run in several processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.run.search.search import Search, SearchSettings

STEPS, TRIALS, SEEDS = 81, 27, 20
SPACE = {"algo.lr": "loguniform(1e-6, 1e-1)"}
NOISE = 0.05


def worth(values: Mapping[str, Any]) -> float:
    """v(lr): 1 at 1e-3, less by a factor of e for each factor of ten."""
    return math.exp(-abs(math.log10(values["algo.lr"]) + 3))


def curve(values: Mapping[str, Any], step: int) -> float:
    """The score after so many steps, without noise."""
    return worth(values) * (1 - math.exp(-3 * step / STEPS))


def make(scheduler: str, seed: int, trials: int = TRIALS) -> Search:
    """A search over the toy; the first proposals of a seed are the same whatever the scheduler."""
    return Search(
        SearchSettings(SPACE, STEPS, scheduler=scheduler, trials=trials, suggest="random", seed=seed, synchronous=True)
    )


def searched(search: Search, seed: int) -> tuple[int, float]:
    """Steps that a search takes, and the value of its best without noise."""
    steps = 0
    while (trial := search.take()) is not None:
        steps += trial.goal - max(trial.scores, default=0)
        noise = np.random.default_rng((seed, trial.number, trial.goal)).normal(0.0, NOISE)
        search.tell(trial, curve(trial.values, trial.goal) + noise)
    assert search.best is not None
    return steps, curve(search.best.values, STEPS)


def asha() -> None:
    """Prints the steps of asha for the best value of random search, over the seeds."""
    ratios: list[float] = []
    again = 0
    for seed in range(SEEDS):
        steps, best = searched(make("none", seed), seed)
        spent, trials = 0, TRIALS
        while True:
            took, found = searched(make("asha", seed, trials), seed)
            spent, trials = spent + took, trials * 3
            if found >= best - 1e-12:
                break
            again += 1
        ratios.append(spent / steps)
    print(f"asha for the best value of random search, {SEEDS} seeds, noise {NOISE}:")
    print(
        f"  steps: mean {statistics.mean(ratios):.2f} of random search's, most {max(ratios):.2f}; {again} searched on"
    )
    print(f"  seeds at most half: {sum(ratio <= 0.5 for ratio in ratios)} of {SEEDS}")


def pbt() -> None:
    """Prints how the members of a population of 8 end, beside the same starts left alone."""
    better, gains = 0, list[float]()
    for seed in range(SEEDS):
        search, values = make("pbt", seed, 8), dict[int, float]()
        starts: dict[int, float] = {}
        while (trial := search.take()) is not None:
            starts.setdefault(trial.number, STEPS * worth(trial.values))
            steps = trial.goal - max(trial.scores, default=0)
            values[trial.number] = values.get(trial.number, 0.0) + steps * worth(trial.values)
            before = dict(values)
            for decision in search.tell(trial, values[trial.number]):
                if decision.copy_of is not None:
                    values[decision.trial.number] = before[decision.copy_of.number]
        worst = min(starts, key=lambda number: starts[number])
        better += values[worst] > starts[worst]
        gains.append(max(values.values()) / max(starts.values()))
    print(f"pbt, 8 members, {SEEDS} seeds:")
    print(f"  the worst start ends better than left alone: {better} of {SEEDS}")
    print(f"  the best member, beside the best start left alone: mean {statistics.mean(gains):.2f}")


def timed(*words: str) -> float:
    """Wall seconds of a penstock command, which must succeed."""
    began = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "penstock", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return time.monotonic() - began


def processes(steps: int, trials: int, rounds: int, only: str) -> None:
    """Prints wall times of launches and searches of equal runs, by turns."""
    rates = [f"{3e-4 * (1 + k / 10):.3g}" for k in range(trials)]
    base = ("ppo", "--env", "CartPole-v1", "--run.steps", str(steps), "--run.eval-episodes", "5")
    space = ("--search", f"algo.lr=choice({','.join(rates)})", "--suggest", "random")
    took: dict[str, list[float]] = {"launch": [], "tune": [], "one leg": [], "legs": []}
    folder = Path(tempfile.mkdtemp(prefix="penstock-search-"))
    try:
        for k in range(rounds):
            if only in ("", "overhead"):
                grid = ("--grid", f"algo.lr={','.join(rates)}", "--slots", "1")
                took["launch"].append(timed("launch", *base, *grid, "--dir", str(folder / f"launch-{k}")))
                search = ("--scheduler", "none", "--trials", str(trials))
                took["tune"].append(timed("tune", *base, *space, *search, "--dir", str(folder / f"tune-{k}")))
            if only in ("", "legs"):
                for name, scheduler in (("one leg", "none"), ("legs", "asha")):
                    words = ("--scheduler", scheduler, "--trials", "1", "--dir", str(folder / f"{scheduler}-{k}"))
                    took[name].append(timed("tune", *base, *space, *words))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if took["tune"]:
        launch, tune = statistics.median(took["launch"]), statistics.median(took["tune"])
        print(f"{trials} runs of {steps:,} steps, {rounds} rounds: launch {launch:.1f} s, tune {tune:.1f} s")
        print(f"  overhead {100 * (tune / launch - 1):+.1f}%; rounds: {json.dumps(took)}")
    if took["legs"]:
        one, legs = statistics.median(took["one leg"]), statistics.median(took["legs"])
        print(
            f"one run of {steps:,} steps in one process {one:.1f} s, in four {legs:.1f} s: {(legs - one) / 3:.1f} s a leg"
        )


def main() -> None:
    """Prints each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", choices=("", "toy", "overhead", "legs"), help="one part alone")
    parser.add_argument("--steps", type=int, default=200_000, help="environment steps of a run (200000)")
    parser.add_argument("--trials", type=int, default=4, help="runs of a launch and of a search (4)")
    parser.add_argument("--rounds", type=int, default=3, help="times by turns (3)")
    args = parser.parse_args()
    if args.only in ("", "toy"):
        asha()
        pbt()
    if args.only != "toy":
        processes(args.steps, args.trials, args.rounds, args.only)


if __name__ == "__main__":
    main()
