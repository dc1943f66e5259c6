"""Sampling of many agents by turns with RLlib and with Stable-Baselines3 on SuperSuit: agent steps/s of processor time.

    python benchmarks/many_agents_peers.py [--sb3 PYTHON] [--rllib PYTHON] [--only toy-8,spread] [--rounds 7]

Each PYTHON is the interpreter of an environment with that peer (`pip install stable-baselines3 supersuit mpe2`,
`pip install "ray[rllib]" pettingzoo mpe2`). All sides are one process with one thread on the same core, one shared policy
with two hidden layers of 64 for each of policy and value, the same environments, T and E; processes stay alive and take
turns. Bars on the toy: 10 times RLlib, 4 times Stable-Baselines3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from many_agents_speed import SPREAD, Turn, rate, sampled
from toy_agents import Toy

CASES = {"toy-2": (64, 8), "toy-8": (64, 8), "toy-32": (64, 2), "spread": (25, 16)}
"""T and E by environment."""
BARS = {"sb3": 4.0, "rllib": 10.0}


def ours(case: str) -> Turn:
    """A batch of penstock's sampler."""
    T, E = CASES[case]
    return sampled(SPREAD if case == "spread" else partial(Toy, int(case.partition("-")[2])), T, E)


def start(peer: str, python: str, case: str, seconds: float) -> subprocess.Popen[str]:
    """A process of a peer that waits for its turns."""
    T, E = CASES[case]
    script = Path(__file__).parent / "peers" / "many_agents.py"
    command = [python, str(script), peer, "--env", case, *f"--T {T} --E {E} --seconds {seconds}".split()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": ""}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def measure(case: str, peers: dict[str, str], rounds: int, seconds: float) -> None:
    """Prints a row of the table for each peer; the first round warms up."""
    turn = ours(case)
    processes = {peer: start(peer, python, case, seconds) for peer, python in peers.items()}
    rates: list[list[float]] = []
    try:
        for _ in range(rounds + 1):
            rates.append([rate(turn, seconds), *map(turn_of, processes.values())])
    finally:
        for process in processes.values():
            process.communicate(timeout=60)
    for i, peer in enumerate(peers, 1):
        own, other = (statistics.median(row[k] for row in rates[1:]) for k in (0, i))
        ratio = statistics.median(row[0] / row[i] for row in rates[1:])
        bar = "" if case == "spread" else f"{BARS[peer]:.0f}"
        print(f"| {case} | {own:,.0f} | {peer} {other:,.0f} | {ratio:.2f} | {bar} |", flush=True)


def turn_of(process: subprocess.Popen[str]) -> float:
    """The rate of a peer's turn. Raises RuntimeError if it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("rate "):
            return float(line.split()[1])
    raise RuntimeError(f"{process.args} ended with {process.wait(timeout=10)}")


def main() -> int:
    """Prints a row for each case and peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in BARS:
        parser.add_argument(f"--{peer}", help="its interpreter")
    parser.add_argument("--only", default=",".join(CASES), help=f"cases by comma, of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn (2)")
    args = parser.parse_args()
    peers = {peer: python for peer in BARS if (python := getattr(args, peer)) is not None}
    if not peers or not set(args.only.split(",")) <= set(CASES):
        parser.error(f"expected --sb3 or --rllib, and --only some of {', '.join(CASES)}; --only is {args.only!r}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print("| case | penstock | peer | times | bar |\n| --- | --- | --- | --- | --- |")
    for case in args.only.split(","):
        measure(case, peers, args.rounds, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
