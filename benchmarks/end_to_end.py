"""PPO end to end at one setting under several samplers, alternating in one process: steps/s and ratios to SerialSampler.

`python benchmarks/end_to_end.py`. Each sampler has a Trainer of its own; they take turns of 40 iterations, medians of 4.
"""

from __future__ import annotations

import statistics
import time

import penstock as ps
from penstock.run.trainer import Trainer

T, B, WORKERS = 128, 16, 2
SAMPLERS = {
    "SerialSampler": ps.SerialSampler(T, B),
    "CpuSampler": ps.CpuSampler(T, B, WORKERS),
    "AlternatingSampler": ps.AlternatingSampler(T, B, WORKERS),
    "AsyncSerialSampler, depth 1": ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1),
    "AsyncAlternatingSampler, depth 1": ps.AsyncAlternatingSampler(ps.AlternatingSampler(T, B, WORKERS), depth=1),
}


def main() -> None:
    """Measures and prints a table."""
    run = ps.RunConfig(steps=10**9)
    trainers = {
        name: Trainer(ps.Experiment("CartPole-v1", ps.PPO(epochs=4, minibatch=512), s, run))
        for name, s in SAMPLERS.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in SAMPLERS}
    for turn in range(5):
        for name, trainer in trainers.items():
            started, before = time.perf_counter(), trainer.env_steps
            for _ in range(40 if turn else 10):
                trainer.train()
            if turn:  # the first warms up
                rates[name].append((trainer.env_steps - before) / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        print(f"{name:34} {rate:10,.0f} steps/s  {rate / medians['SerialSampler']:.2f}")
    for trainer in trainers.values():
        trainer.stop()


if __name__ == "__main__":
    main()
