"""Start of the workers of a CpuSampler and their memory, forked or each for itself, by turns of fresh processes (turns.py).

    python benchmarks/worker_start.py [--only 8] [--rounds 5] [--write]

PPO on CartPole-v1 with B = 2 slots a worker. "ready" is from the imports on until all workers have environments and agent
(of `train`, `penstock train` itself: from the start), the first batch from the start of the imports. Memory is the
proportional set size of a worker; the process that they are forked of is given apart.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import turns
from turns import Bar, Case, Who

WAYS = ("train", "forked", "apart")


def through_the_command(workers: int, started: float) -> dict[str, float]:
    """`penstock train`, stopped as its first batch is there."""
    from penstock.cli.main import main as penstock

    found: dict[str, float] = {}

    def patched() -> None:
        from penstock.run import trainer

        def step(policy: Any, sampler: Any, itr: int) -> Any:
            ready = time.monotonic()
            sampler.obtain_samples(itr)
            first = time.monotonic()
            found.update({"ready s": ready - started, "first batch": first - started}, **memory(sampler, True))
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


def by_hand(workers: int, way: str, started: float) -> dict[str, float]:
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
    return {"ready s": ready - imported, "first batch": first - started, **found}


def memory(sampler: Any, forked: bool) -> dict[str, float]:
    crew = sampler.pool._workers
    own = statistics.median(set_size(w.child.pid) for w in crew.workers)
    return {"worker MB": own, "server MB": set_size(crew.workers[0]._arguments.forks.process.pid) if forked else 0.0}


def set_size(pid: int) -> float:
    """Proportional set size in MB: pages that n processes share count one n-th."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@contextmanager
def start(workers: int, way: str, seed: int) -> Iterator[turns.Unit]:
    """One start, in a process that has imported nothing yet."""

    def unit() -> turns.Look:
        begun = time.monotonic()
        found = through_the_command(workers, begun) if way == "train" else by_hand(workers, way, begun)
        return {"work": 1.0, "wall": found["first batch"], **found}

    yield unit


CASES = {
    str(n): Case(f"{n} workers, start to the first batch", "s", {way: Who("start", {"workers": n, "way": way}) for way in WAYS},
                 (Bar("forked", 2.0, below=True, of="ready s"), Bar("forked", 60.0, below=True, of="worker MB")) if n == 8 else (),
                 clock="wall", seconds=0.0, rounds=5, fresh=1, one_core=False)
    for n in (8, 2)
}  # fmt: skip

if __name__ == "__main__":
    turns.main(__doc__, CASES, {"start": start}, {})
