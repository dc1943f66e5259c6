"""How long the workers of a CpuSampler take to be ready and what memory they take, forked or each for itself.

    python benchmarks/worker_start.py [--workers 8] [--rounds 5] [--write]

Both ways take turns, each in a fresh process: PPO on CartPole-v1 with B = 2 slots a worker. "ready" is from the
imports on until all workers have environments and agent (of `train`, `penstock train` itself: from the start of the process),
"first batch" from the start of the process. Memory is
the proportional set size of a worker; the process that they are forked of is given apart.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "worker_start.md"
WAYS = ("train", "forked", "apart")


def measure(workers: int, way: str) -> dict[str, float]:
    """In this process, which was started for it."""
    return through_the_command(workers) if way == "train" else by_hand(workers, way)


def through_the_command(workers: int) -> dict[str, float]:
    """`penstock train`, stopped as its first batch is there."""
    from penstock.cli.main import main as penstock

    found: dict[str, float] = {}

    def patched() -> None:
        from penstock.run import trainer

        def step(policy: Any, sampler: Any, itr: int) -> Any:
            ready = time.monotonic()
            sampler.obtain_samples(itr)
            first = time.monotonic()
            found.update({"ready": ready - started, "first batch": first - started}, **memory(sampler, True))
            raise KeyboardInterrupt

        trainer.training_step = step

    command: Any = importlib.import_module("penstock.cli.train")
    begin = command._train_all
    command._train_all = lambda *args: (patched(), begin(*args))[1]
    argv = ["train", "ppo", "--env", "CartPole-v1", "--preset", "none", "--run.progress", "off", "--sampler", "cpu"]
    argv += ["--sampler.T", "8", "--sampler.B", str(2 * workers), "--sampler.workers", str(workers)]
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(BaseException):
            penstock([*argv, "--run.dir", f"{folder}/run"])
    return found


def by_hand(workers: int, way: str) -> dict[str, float]:
    """A script that makes a Trainer."""
    import torch

    import penstock as ps
    from penstock.samplers import cpu

    torch.set_num_threads(1)
    if way == "apart":
        cpu.ACTING = ()
    imported = time.monotonic()
    exp = ps.Experiment("CartPole-v1", ps.PPO(), ps.CpuSampler(T=8, B=2 * workers, workers=workers))
    with ps.Trainer(exp) as trainer:
        ready = time.monotonic()
        trainer.sampler.obtain_samples(0)
        first = time.monotonic()
        found = memory(trainer.sampler, way == "forked")
    return {"ready": ready - imported, "first batch": first - started, **found}


def memory(sampler: Any, forked: bool) -> dict[str, float]:
    crew = sampler.pool._workers
    own = statistics.median(set_size(w.process.pid) for w in crew.workers)
    return {"worker MB": own, "server MB": set_size(crew._forks.process.pid) if forked else 0.0}


def set_size(pid: int) -> float:
    """Proportional set size in MB: pages that n processes share count one n-th."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def main() -> None:
    """Prints a table, and with --write keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.workers, args.way)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, rows in found.items():
            command = [sys.executable, __file__, "--workers", str(args.workers), "--way", way]
            said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
            rows.append(json.loads(said.splitlines()[-1]))
    medians = {way: {k: statistics.median(row[k] for row in rows) for k in rows[0]} for way, rows in found.items()}
    lines = [
        "| way | ready, s | first batch since start, s | worker, MB | server, MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way, row in medians.items():
        times = " | ".join(f"{row[name]:.2f}" for name in ("ready", "first batch"))
        lines.append(f"| {way} | {times} | {row['worker MB']:.0f} | {row['server MB']:.0f} |")
    text = "\n".join(lines)
    print(text)
    if args.write:
        head = (
            f"# Start of workers\n\n`python benchmarks/worker_start.py --workers {args.workers} --rounds {args.rounds}`"
        )
        RESULTS.write_text(f"{head}, medians by turns, {time.strftime('%Y-%m-%d')}.\n\n{text}\n")


if __name__ == "__main__":
    started = time.monotonic()
    main()
