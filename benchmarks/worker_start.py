"""How long the workers of a CpuSampler take to be ready and what memory they take, forked or each for itself.

    python benchmarks/worker_start.py [--workers 8] [--rounds 5] [--write]

Both ways take turns, each in a fresh process: PPO on CartPole-v1 with B = 2 slots a worker. "ready" is from the call that
builds the sampler until all workers have environments and agent, "first batch" from the start of the process. Memory is
the proportional set size of a worker; the process that they are forked of is given apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "worker_start.md"
WAYS = ("forked", "apart")


def measure(workers: int, way: str) -> dict[str, float]:
    """In this process, which was started for it."""
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
        live: Any = trainer.sampler
        live.obtain_samples(0)
        first = time.monotonic()
        crew = live.pool._workers
        own = statistics.median(set_size(w.process.pid) for w in crew.workers)
        server = set_size(crew._forks.process.pid) if way == "forked" else 0.0
    return {"ready": ready - imported, "first batch": first - started, "worker MB": own, "server MB": server}


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
