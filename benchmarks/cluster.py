"""Cost of runners on Ray: a round, a fragment at the driver, a push of weights; RLlib's runners beside ours; by turns (turns.py).

    python benchmarks/cluster.py [--only round,rate,rllib,driver,push] [--peer .venv-rllib/bin/python] [--rounds 5] [--write]

One thread in each process; CPU time is of the driver and its runners. The peer is a Python that has `ray[rllib]==2.60.0`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import turns
from speed import ENV, PPO_SETTINGS
from turns import Bar, Case, Who

import penstock as ps
from penstock.run.trainer import Trainer
from penstock.samplers.runners.runner import Runner
from penstock.samplers.runners.settings import RunnerSampler

B, RLLIB_T, RLLIB_RUNNERS = 16, 128, 2
PUSH_RUNNERS, HIDDEN = 4, 2490
"""Two networks with two layers of 2,490 units have 50 MB."""


@contextmanager
def rounds(settings: Any, seed: int, algo: Any = None) -> Iterator[turns.Unit]:
    """Rounds of a sampler that has collected three; steps are the work."""
    torch.set_num_threads(1)
    sampler = settings.build(ENV, seed)
    try:
        sampler.initialize((algo or ps.PPO()).build(sampler.spec, seed).agent)
        itr = 0

        def unit() -> float:
            nonlocal itr
            itr += 1
            return sampler.obtain_samples(itr - 1)[0].env_steps

        for _ in range(3):
            unit()
        yield unit
    finally:
        sampler.shutdown()


@contextmanager
def one_runner(backend: str, T: int, seed: int) -> Iterator[turns.Unit]:
    """Rounds of one runner, or of the same sampler in this process; a round is the work."""
    inner = ps.SerialSampler(T=T, B=B)
    settings: Any = inner if backend == "serial" else RunnerSampler(1, inner, backend=backend)  # pyright: ignore
    with rounds(settings, seed) as unit:
        yield lambda: bool(unit())


@contextmanager
def sampling(seed: int) -> Iterator[turns.Unit]:
    """Steps of two runners, weights sent with each round."""
    settings = RunnerSampler(RLLIB_RUNNERS, ps.SerialSampler(T=RLLIB_T, B=B), backend="ray")
    with rounds(settings, seed, ps.PPO(**PPO_SETTINGS)) as unit:  # pyright: ignore
        yield unit


@contextmanager
def training(depth: int, seed: int) -> Iterator[turns.Unit]:
    """Whole iterations of PPO in steps, sampling by two runners and training here.

    Fragments, epochs, minibatches, networks and threads are RLlib's. With depth 0 so is the order: runners wait while
    the learner trains, as RLlib's do by default. With depth 1 they collect the next batch meanwhile, so that it is of
    the parameters of one training step before, for which PPO's ratio allows: each batch is trained on just as often.
    """
    torch.set_num_threads(1)
    sampler = RunnerSampler(RLLIB_RUNNERS, ps.SerialSampler(T=RLLIB_T, B=B), backend="ray", depth=depth)
    run = ps.RunConfig(steps=10**9, seed=seed, eval_episodes=0, progress="off")
    algo: Any = ps.PPO(**PPO_SETTINGS)  # pyright: ignore
    with Trainer(ps.Experiment(ENV, algo, sampler, run)) as trainer:

        def unit() -> float:
            before = trainer.env_steps
            trainer.train()
            return trainer.env_steps - before

        for _ in range(3):
            unit()
        yield unit


@contextmanager
def driver(runners: int, mode: Any, seed: int) -> Iterator[turns.Unit]:
    """Fragments of many runners of a small environment; CPU time is the driver's alone."""
    settings = RunnerSampler(runners, ps.SerialSampler(T=16, B=2), backend="ray", mode=mode, num_cpus=0.01)
    with rounds(settings, seed) as batch:

        def unit() -> turns.Look:
            started = time.process_time()
            for _ in range(320 if mode == "ready" else 320 // runners):
                batch()
            return {"work": 320, "cpu": time.process_time() - started}

        unit()
        yield unit


@contextmanager
def push(what: str, seed: int) -> Iterator[turns.Unit]:
    """A raw put, a push until all runners have the bytes, or until their agents have taken them.

    The raw put is of one array of as many bytes, of memory in use: zeros that were never written are no memory at all.
    """
    torch.set_num_threads(1)
    inner = ps.SerialSampler(T=8, B=1)
    settings = RunnerSampler(PUSH_RUNNERS, inner, backend="ray", num_cpus=0.01, object_store_mb=800)
    sampler = settings.build(ENV, seed)
    try:
        agent = ps.PPO(net=ps.Net(hidden=(HIDDEN, HIDDEN))).build(sampler.spec, seed).agent
        sampler.initialize(agent)
        group = sampler.runners
        backend: Any = group.backend
        data = np.ones(sum(x.numel() * 4 for x in agent.parameters()), np.uint8)

        def received() -> None:
            weights = group.publish(agent)
            done = group.collect({i: group.call(i, "apply", _bytes_of, weights) for i in group.alive})
            assert all(n >= data.nbytes for n in done.values()) and len(done) == PUSH_RUNNERS

        def taken() -> None:
            weights = group.publish(agent)
            done = group.collect({i: group.call(i, "take_weights", weights, 0) for i in group.alive})
            assert len(done) == PUSH_RUNNERS

        call = {"raw put": lambda: backend.cluster.ray.put(data), "received": received, "taken": taken}[what]

        def unit() -> turns.Look:
            times: list[float] = []
            for _ in range(5):
                started = time.perf_counter()
                call()
                times.append(time.perf_counter() - started)
                time.sleep(0.05)  # what was put is freed
            return {"work": 1.0, "wall": statistics.median(times), "MB": data.nbytes / 1e6}

        unit()
        yield unit
    finally:
        sampler.shutdown()


def _bytes_of(runner: Runner, weights: Any) -> int:
    return sum(len(x) for x in weights) if isinstance(weights, list) else len(weights)


def _round(T: int, notes: Any, bars: tuple[Bar, ...]) -> Case:
    who = {backend: Who("one_runner", {"backend": backend, "T": T}) for backend in ("serial", "ray", "processes")}
    return Case(f"a round, CartPole-v1, one runner, T={T}, B={B}", "ms", who, bars, "wall", 0.5, 5, 3, False, notes)


def _more(found: turns.Found) -> list[str]:
    """A round against the same sampler in this process."""
    out: list[str] = []
    for name in ("ray", "processes"):
        for clock in ("wall", "cpu"):
            cost = [statistics.median(x[clock] / x["work"] for x in found[one]) for one in (name, "serial")]
            more = 1e3 * (cost[0] - cost[1])
            out.append(f"{name}: {more:.2f} {clock} ms more than serial, bar 3: {'met' if more <= 3 else '**missed**'}")
    return out


def _rllib(title: str, ours: dict[str, Who], theirs: str, least: float) -> Case:
    who = {**ours, "RLlib": Who(theirs, {}, "peers/rllib_sample.py", "peer")}
    return Case(f"{title}, CartPole-v1, two runners, T={RLLIB_T}, B={B} each", "steps/s", who,
                tuple(Bar(name, least, ("RLlib",)) for name in ours), "wall", 2.0, 5, 3, one_core=False)  # fmt: skip


def _driver(mode: str) -> Case:
    names = {n: f"{n} runners" for n in (8, 16, 32)}
    who = {name: Who("driver", {"runners": n, "mode": mode}) for n, name in names.items()}
    bars = (*(Bar(name, 0.6, below=True) for name in who), Bar(names[32], 1.15, (names[8],), below=True))
    return Case(
        f"a fragment at the driver, CartPole-v1, T=16, B=2 a runner, {mode}", "ms", who, bars, "cpu", 0.0, 2, 5, False
    )


_SLOWER = tuple(Bar(name, 1 / 0.9, ("serial",), below=True) for name in ("ray", "processes"))
CASES = {
    "round": _round(128, _more, ()),
    "rate": _round(512, lambda found: [], _SLOWER),
    "rllib": _rllib("sampling", {"penstock": Who("sampling")}, "sampling", 5.0),
    "rllib-ppo": _rllib("PPO", {"penstock": Who("training", {"depth": 0}), "one ahead": Who("training", {"depth": 1})}, "training", 4.0),
    "driver": _driver("rounds"),
    "driver-ready": _driver("ready"),
    "push": Case("50 MB of weights to four runners", "ms", {what: Who("push", {"what": what}) for what in ("received", "raw put", "taken")},
                 (Bar("received", 3.0, ("raw put",), below=True),), "wall", 0.0, 3, 5, one_core=False),
}  # fmt: skip
"""`--only rllib` means both that begin so, and `--only driver` too."""
MAKERS = {f.__name__: f for f in (one_runner, sampling, training, driver, push)}

if __name__ == "__main__":
    turns.main(__doc__, CASES, MAKERS, {"peer": "ray[rllib]==2.60.0"})
