"""Speed of two checkouts by turns, A B A B on one core: medians, and the median of each pair's ratio NEW / OLD.

    python benchmarks/compare.py OLD NEW [--only sampling,ppo] [--pairs 11]

Each measurement is a fresh process with one torch thread, pinned to one CPU where the system allows it; the two
checkouts take turns, so that other load falls on both. By CPU time, waiting for that CPU is left out. Only public names
that both checkouts have are used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speed import ENV, PPO_SETTINGS, PPO_STEPS, T, _quiet, _trained, sampling_penstock

LIMIT_S = 900.0
CASES = {
    "sampling-16": f"SerialSampler, {ENV}, B=16, steps/s",
    "sampling-64": f"SerialSampler, {ENV}, B=64, steps/s",
    "ppo": f"PPO, {ENV}, {PPO_STEPS // 1000}k steps end to end, steps/s",
}
"""`--only sampling` means both that begin so."""


def steps_per_s(case: str, seed: int) -> float:
    """Environment steps per second of a case, in this process and with the penstock that it imports."""
    if case.startswith("sampling"):
        return sampling_penstock(argparse.Namespace(B=int(case.partition("-")[2]), seed=seed))["value"]
    import penstock as ps

    exp = ps.Experiment(ENV, ps.PPO(**PPO_SETTINGS), ps.SerialSampler(T=T, B=16), _quiet(seed, PPO_STEPS))
    seconds, result = _trained(exp)
    return result.env_steps / seconds


def child(checkout: Path, case: str, seed: int) -> None:
    """Measures one case of one checkout and prints a line of JSON."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    import penstock

    if checkout not in Path(penstock.__file__).parents:
        raise SystemExit(f"penstock was imported from {penstock.__file__}, not from {checkout}")
    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    rate = steps_per_s(case, seed)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    print(json.dumps({"steps/s": rate, "by CPU time": rate / share}))


def measure(checkout: Path, case: str, seed: int) -> dict[str, float]:
    """The speeds of a case in a fresh process. Raises RuntimeError with its output if it fails."""
    command = [sys.executable, __file__, str(checkout), str(checkout), "--child", case, "--seed", str(seed)]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(old: Path, new: Path, case: str, pairs: int) -> list[str]:
    """Lines with the medians of both checkouts and of the ratios NEW / OLD; every pair has a seed of its own."""
    found: dict[Path, list[dict[str, float]]] = {old: [], new: []}
    for i in range(pairs):
        for checkout in (old, new) if i % 2 == 0 else (new, old):
            found[checkout].append(measure(checkout, case, i + 1))
        print(f"{case} pair {i + 1}: old {found[old][-1]}, new {found[new][-1]}", file=sys.stderr, flush=True)
    lines = [CASES[case]]
    for kind in found[old][0]:
        before, after = ([row[kind] for row in found[checkout]] for checkout in (old, new))
        ratios = [b / a for a, b in zip(before, after)]
        lines.append(
            f"  {kind:<12} old {statistics.median(before):10,.0f}   new {statistics.median(after):10,.0f}   "
            f"new / old {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {pairs} pairs)"
        )
    return lines


def main(argv: list[str]) -> int:
    """Compares the cases asked for and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of penstock")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--only", default="sampling,ppo", help=f"cases by comma, of {', '.join(CASES)}")
    parser.add_argument("--pairs", type=int, default=11, help="measurements of each checkout (11)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    args: Any = parser.parse_args(argv)
    old, new = args.old.resolve(), args.new.resolve()
    if args.child:
        child(new, args.child, args.seed)
        return 0
    wanted = [part for part in args.only.split(",") if part]
    cases = [case for case in CASES if case in wanted or case.partition("-")[0] in wanted]
    if not cases or args.pairs < 1:
        parser.error(f"--only {args.only!r} --pairs {args.pairs}: expected some of {', '.join(CASES)}, and 1 or more")
    for case in cases:
        print("\n".join(compare(old, new, case, args.pairs)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
