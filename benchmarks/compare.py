"""Speed of two states of penstock by turns: the rates of both, and how the ratios NEW / OLD of pairs of looks lie.

    python benchmarks/compare.py OLD NEW [--only sampling,dqn] [--pairs 31] [--seconds 0.2] [--looks 8]

OLD and NEW are checkouts, or git revisions, for which temporary worktrees are made. Each is a process of its own with one
torch thread; this one only asks them in turn, OLD NEW, NEW OLD, ..., for a look: what is done in so many seconds, steps per
second. A pair is two looks side by side, so that other load falls on both. Starting a process takes as long as ten looks, so
both stay for `--looks` pairs, after one that warms up; then two fresh ones with another seed take over, because where a
process happens to lie in memory moves its rate as well.

One process counts its CPU time, in which waiting for the CPU is left out, and is pinned to a CPU with the other. The cases
of CpuSampler, runners and learners count wall time on all CPUs: processes wait for each other by looking at counters, so
CPU time would count waiting as work, and wall time is what there is to gain. They want a quiet machine.

OLD against OLD shows what two equal states differ by here: benchmarks/results/compare.md. Only names that `penstock` exports
are used, so that older checkouts have them.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WARM_UPDATES = 20


class Case(NamedTuple):
    """One comparison; algorithm and sampler are source, which each checkout reads for itself."""

    title: str
    env: str
    algo: str
    sampler: str
    trains: bool = True
    """Iterations of a Trainer; else batches of its sampler."""
    clock: Callable[[], float] = time.process_time
    learners: int = 1


CARTPOLE, AGENTS = "CartPole-v1", "penstock.envs.toy:TeamBits"
PPO = "ps.PPO(lr=1e-3, entropy_coef=0.01, epochs=4, minibatch=512)"
OFF_POLICY = (
    "net=ps.Net(hidden=(256, 256), activation='relu'), learning_starts=500, replay=ps.ReplaySettings(capacity=100_000)"
)
SERIAL, CPU = "ps.SerialSampler(T=128, B=16)", "ps.CpuSampler(T=128, B=16, workers=2)"
RUNNERS = "ps.RunnerSampler(2, ps.SerialSampler(T=128, B=8), backend='processes')"
CASES = {
    "sampling-16": Case("SerialSampler, CartPole, B=16", CARTPOLE, PPO, SERIAL, False),
    "sampling-64": Case("SerialSampler, CartPole, B=64", CARTPOLE, PPO, "ps.SerialSampler(T=128, B=64)", False),
    "ppo": Case("PPO, CartPole, B=16", CARTPOLE, PPO, SERIAL),
    "dqn": Case(
        "DQN, CartPole, batch 128, an update a step",
        *(CARTPOLE, f"ps.DQN(batch_size=128, replay_ratio=128, {OFF_POLICY})", "ps.SerialSampler(T=1, B=1)"),
    ),
    "sac": Case(
        "SAC, Pendulum, batch 256, an update a step",
        *("Pendulum-v1", f"ps.SAC(batch_size=256, replay_ratio=256, {OFF_POLICY})", "ps.SerialSampler(T=1, B=1)"),
    ),
    "agents-sampling": Case("SerialSampler, two agents at once, B=16", AGENTS, PPO, SERIAL, False),
    "agents-ppo": Case("PPO, two agents at once, B=16", AGENTS, PPO, SERIAL),
    "cpu-sampling": Case("CpuSampler, 2 workers, CartPole, B=16, wall", CARTPOLE, PPO, CPU, False, time.perf_counter),
    "cpu-ppo": Case("PPO by CpuSampler, 2 workers, CartPole, B=16, wall", CARTPOLE, PPO, CPU, True, time.perf_counter),
    "runners-sampling": Case(
        "RunnerSampler, 2 processes, CartPole, B=16, wall", CARTPOLE, PPO, RUNNERS, False, time.perf_counter
    ),
    "learners-ppo": Case("PPO, 2 learners, CartPole, B=16, wall", CARTPOLE, PPO, SERIAL, True, time.perf_counter, 2),
}
"""By name; `--only cpu` means all that begin so."""


def child(checkout: Path, case: Case, seed: int, seconds: float) -> None:
    """Takes a look for every line on its input, and prints the environment steps per second."""
    if case.clock is time.process_time and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    import penstock as ps

    if checkout not in Path(ps.__file__).parents:
        raise SystemExit(f"penstock was imported from {ps.__file__}, not from {checkout}")
    torch.set_num_threads(1)
    scope = {"ps": ps}
    run = ps.RunConfig(steps=10**9, seed=seed, learners=case.learners)
    with ps.Trainer(ps.Experiment(case.env, eval(case.algo, scope), eval(case.sampler, scope), run)) as trainer:
        batches = iterations(trainer) if case.trains else samples(trainer.sampler)
        while case.trains and trainer.policy.updates < WARM_UPDATES:
            next(batches)
        for _ in sys.stdin:
            steps, spent, started = 0, 0.0, case.clock()
            while spent < seconds:
                steps += next(batches)
                spent = case.clock() - started
            print(steps / spent, flush=True)


def iterations(trainer: Any) -> Iterator[int]:
    """The environment steps of each iteration, sampled and learned from."""
    while True:
        before = trainer.env_steps
        trainer.train()
        yield trainer.env_steps - before


def samples(sampler: Any) -> Iterator[int]:
    """The environment steps of each batch."""
    itr = 0
    while True:
        batch, _ = sampler.obtain_samples(itr)
        yield batch.env_steps
        itr += 1


def start(checkout: Path, case: str, seed: int, seconds: float) -> subprocess.Popen[str]:
    """A process of one checkout that waits for its turns."""
    command = [
        sys.executable,
        __file__,
        str(checkout),
        "-",
        "--child",
        case,
        "--seed",
        str(seed),
        "--seconds",
        str(seconds),
    ]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def look(process: subprocess.Popen[str]) -> float:
    """The rate of one look. Raises RuntimeError if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with {process.wait(timeout=10)}")
    return float(line)


def looks(old: Path, new: Path, case: str, pairs: int, seed: int, seconds: float) -> list[tuple[float, float]]:
    """Rates of both in each pair, by two processes that take turns; the first pair warms up."""
    processes = [start(checkout, case, seed, seconds) for checkout in (old, new)]
    try:
        for process in processes:
            look(process)
        found: list[tuple[float, float]] = []
        for k in range(pairs):
            rates = {i: look(processes[i]) for i in ((0, 1) if k % 2 == 0 else (1, 0))}
            found.append((rates[0], rates[1]))
        return found
    finally:
        for process in processes:
            process.communicate(timeout=60)


def compare(old: Path, new: Path, case: str, args: Any) -> str:
    """A row of the table: median rates, and median, quartiles and extremes of the ratios."""
    found: list[tuple[float, float]] = []
    while len(found) < args.pairs:
        pairs = min(args.looks, args.pairs - len(found))
        found += looks(old, new, case, pairs, 1 + len(found), args.seconds)
    ratios = [after / before for before, after in found]
    before, after = (statistics.median(column) for column in zip(*found))
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    spread = f"{low:.3f} to {high:.3f} | {min(ratios):.3f} to {max(ratios):.3f}"
    return f"| {CASES[case].title} | {before:,.0f} | {after:,.0f} | {middle:.3f} | {spread} | {len(ratios)} |"


@contextmanager
def checkout(state: str) -> Generator[Path]:
    """The checkout that a state is, or a temporary worktree of a revision of this repository."""
    if (Path(state) / "penstock").is_dir():
        yield Path(state).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder).resolve() / "penstock-checkout"
        done = subprocess.run([*git, "add", "--detach", str(at), state], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{state!r} is no checkout and no revision of {ROOT}: {done.stderr.strip()}")
        try:
            yield at
        finally:
            subprocess.run([*git, "remove", "--force", str(at)], check=True)


def main(argv: list[str]) -> int:
    """Compares the cases asked for and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a checkout of penstock, or a git revision")
    parser.add_argument("new", help="another, or the same for the spread of this machine")
    parser.add_argument("--only", default=",".join(CASES), help=f"cases by comma, of {', '.join(CASES)} (all)")
    parser.add_argument("--pairs", type=int, default=31, help="pairs of looks (31)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a look (0.2)")
    parser.add_argument("--looks", type=int, default=8, help="pairs by the same two processes (8)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    args: Any = parser.parse_args(argv)
    if args.child:
        child(Path(args.old), CASES[args.child], args.seed, args.seconds)
        return 0
    wanted = [part for part in args.only.split(",") if part]
    cases = [case for case in CASES if case in wanted or case.partition("-")[0] in wanted]
    if not cases or min(args.pairs, args.looks) < 1:
        parser.error(f"--only {args.only!r} --pairs {args.pairs}: expected some of {', '.join(CASES)}, and 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktrees go
    with ExitStack() as stack:
        old, new = (stack.enter_context(checkout(state)) for state in (args.old, args.new))
        print(
            "| case | old, steps/s | new, steps/s | new / old, median | quartiles | extremes | pairs |\n"
            + "|---" * 7
            + "|"
        )
        for case in cases:
            print(compare(old, new, case, args), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
