"""Speed of two checkouts by turns, A B A B on one core: medians, and the median of each pair's ratio NEW / OLD.

    python benchmarks/compare.py OLD NEW [--only sampling,ppo] [--pairs 11] [--turns 8]

Each pair is two fresh processes with one torch thread, pinned to one CPU where the system allows it. Both stay alive and
take short turns, so that other load falls on both; a process's rate is the median of its turns, by CPU time, in which
waiting for that CPU is left out. Only public names that both checkouts have are used.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speed import ENV, PPO_SETTINGS, T

CASES = {
    "sampling-16": (f"SerialSampler, {ENV}, B=16, steps/s", 16, 40),
    "sampling-64": (f"SerialSampler, {ENV}, B=64, steps/s", 64, 12),
    "ppo": (f"PPO, {ENV}, sampling and training, B=16, steps/s", 16, 12),
}
"""By name: title, slots, iterations of a turn. `--only sampling` means both that begin so."""


def child(checkout: Path, case: str, seed: int) -> None:
    """Takes a turn for every line on its input, and prints the steps per second of CPU time."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    import penstock as ps

    if checkout not in Path(ps.__file__).parents:
        raise SystemExit(f"penstock was imported from {ps.__file__}, not from {checkout}")
    torch.set_num_threads(1)
    _, B, iterations = CASES[case]
    sampler = ps.SerialSampler(T=T, B=B).build(ENV, seed)
    policy = ps.PPO(**PPO_SETTINGS).build(sampler.spec, seed)
    sampler.initialize(policy.agent)
    itr = 0
    for _ in sys.stdin:
        steps, started = 0, time.process_time()
        for _ in range(iterations):
            batch, _ = sampler.obtain_samples(itr)
            steps, itr = steps + batch.env_steps, itr + 1
            if case == "ppo":
                ps.train_one_step(policy, batch)
        print(steps / (time.process_time() - started), flush=True)
    sampler.shutdown()


def start(checkout: Path, case: str, seed: int) -> subprocess.Popen[str]:
    """A process of one checkout that waits for its turns."""
    command = [sys.executable, __file__, str(checkout), str(checkout), "--child", case, "--seed", str(seed)]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def turn(process: subprocess.Popen[str]) -> float:
    """The rate of one turn. Raises RuntimeError if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with {process.wait(timeout=10)}")
    return float(line)


def pair(old: Path, new: Path, case: str, turns: int, seed: int) -> tuple[float, float]:
    """Median rates of two processes that take turns; the first turn warms up."""
    processes = [start(checkout, case, seed) for checkout in (old, new)]
    try:
        rates = [[turn(process) for process in processes] for _ in range(turns + 1)][1:]
    finally:
        for process in processes:
            process.communicate(timeout=30)
    before, after = (statistics.median(column) for column in zip(*rates))
    return before, after


def compare(old: Path, new: Path, case: str, pairs: int, turns: int) -> str:
    """Lines with the medians of both checkouts and of the ratios NEW / OLD; every pair has a seed of its own."""
    found = [pair(old, new, case, turns, i + 1) for i in range(pairs)]
    ratios = [after / before for before, after in found]
    before, after = (statistics.median(column) for column in zip(*found))
    return (
        f"{CASES[case][0]}\n  old {before:10,.0f}   new {after:10,.0f}   new / old {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {pairs} pairs)"
    )


def main(argv: list[str]) -> int:
    """Compares the cases asked for and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of penstock")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--only", default="sampling,ppo", help=f"cases by comma, of {', '.join(CASES)}")
    parser.add_argument("--pairs", type=int, default=11, help="pairs of processes (11)")
    parser.add_argument("--turns", type=int, default=8, help="turns of each (8)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    args: Any = parser.parse_args(argv)
    old, new = args.old.resolve(), args.new.resolve()
    if args.child:
        child(new, args.child, args.seed)
        return 0
    wanted = [part for part in args.only.split(",") if part]
    cases = [case for case in CASES if case in wanted or case.partition("-")[0] in wanted]
    if not cases or args.pairs < 1 or args.turns < 1:
        parser.error(f"--only {args.only!r} --pairs {args.pairs}: expected some of {', '.join(CASES)}, and 1 or more")
    for case in cases:
        print(compare(old, new, case, args.pairs, args.turns), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
