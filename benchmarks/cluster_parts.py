"""What the processes of `cluster.py` measure, each part in one process; a part returns lists, a value for each turn."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch

import penstock as ps
from penstock.distributed.env_runner import EnvRunner
from penstock.distributed.sampler import RunnerSampler
from penstock.run.trainer import Trainer

ENV, B = "CartPole-v1", 16
RLLIB_T, RLLIB_RUNNERS = 128, 2
PPO_SETTINGS: dict[str, Any] = {"lr": 1e-3, "entropy_coef": 0.01, "discount": 0.99, "gae_lambda": 0.95, "clip": 0.2,
                                "value_coef": 0.5, "max_grad_norm": 0.5, "epochs": 4, "minibatch": 512}  # fmt: skip
"""Those of benchmarks/peers/rllib_sample.py."""
PUSH_RUNNERS, HIDDEN = 4, 2490
"""Two networks with two layers of 2,490 units have 50 MB."""
Found = dict[str, list[float]]


# ---- a round: the same sampler in this process, in a local process and in an actor ----


def rounds(T: int, turns: int, seed: int) -> Found:
    """Milliseconds of a round of one runner, the median of each turn, and of CPU time of driver and runner together."""
    inner = ps.SerialSampler(T=T, B=B)
    made: dict[str, Any] = {"serial": inner}
    made |= {name: RunnerSampler(runners=1, inner=inner, backend=name) for name in ("ray", "processes")}
    live = {name: settings.build(ENV, seed) for name, settings in made.items()}
    found: Found = {}
    try:
        for sampler in live.values():
            sampler.initialize(ps.PPO().build(sampler.spec, seed).agent)
        each = max(4, 2560 // T)
        for turn in range(turns + 1):
            for name in live if turn % 2 else reversed(live):
                wall, cpu = _turn(live[name], turn * each, each)
                if turn:  # the first warms up
                    found.setdefault(f"{name} ms", []).append(wall)
                    found.setdefault(f"{name} CPU ms", []).append(cpu)
    finally:
        for sampler in live.values():
            sampler.shutdown()
    return found


def _turn(sampler: Any, first: int, n: int) -> tuple[float, float]:
    before, times = _cpu_s(sampler), list[float]()
    for itr in range(first, first + n):
        started = time.perf_counter()
        sampler.obtain_samples(itr)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3, (_cpu_s(sampler) - before) * 1e3 / n


def _cpu_s(sampler: Any) -> float:
    """CPU seconds so far of this process, and of the sampler's runners."""
    workers = getattr(sampler, "workers", None)
    return time.process_time() + (sum(workers.foreach(_runner_cpu_s)) if workers else 0.0)


def _runner_cpu_s(runner: EnvRunner) -> float:
    return time.process_time()


# ---- beside RLlib: sampling, and PPO from sampling to the end of training ----


def sampling(seconds: float, seed: int) -> Found:
    """Steps per second of two runners, weights sent with each round, and CPU microseconds a step of all processes."""
    sampler = RunnerSampler(RLLIB_RUNNERS, ps.SerialSampler(T=RLLIB_T, B=B), backend="ray").build(ENV, seed)
    try:
        sampler.initialize(ps.PPO(**PPO_SETTINGS).build(sampler.spec, seed).agent)
        return _rated("penstock", lambda itr: sampler.obtain_samples(itr)[0].env_steps, seconds)
    finally:
        sampler.shutdown()


def training(seconds: float, seed: int, depth: int) -> Found:
    """Steps per second of whole iterations of PPO, sampling by two runners and training here.

    Fragments, epochs, minibatches, networks and threads are RLlib's. With depth 0 so is the order: runners wait while
    the learner trains, as RLlib's do by default. With depth 1 they collect the next batch meanwhile, so that it is of
    the parameters of one training step before, for which PPO's ratio allows: each batch is trained on just as often.
    """
    sampler = RunnerSampler(RLLIB_RUNNERS, ps.SerialSampler(T=RLLIB_T, B=B), backend="ray", depth=depth)
    run = ps.RunConfig(steps=10**9, seed=seed, eval_episodes=0, progress="off", tensorboard=False)
    algo: Any = ps.PPO(**PPO_SETTINGS)
    trainer = Trainer(ps.Experiment(ENV, algo, sampler, run))

    def iteration(_: int) -> int:
        before = trainer.env_steps
        trainer.train()
        return trainer.env_steps - before

    try:
        return _rated("one ahead" if depth else "penstock", iteration, seconds)
    finally:
        trainer.stop()


def _rated(name: str, iteration: Callable[[int], int], seconds: float) -> Found:
    for itr in range(3):
        iteration(itr)
    itr, steps, cpu, started = 3, 0, tree_cpu_s(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        steps += iteration(itr)
        itr += 1
    took = time.perf_counter() - started
    return {f"{name} steps/s": [steps / took], f"{name} CPU us": [(tree_cpu_s() - cpu) * 1e6 / steps]}


def tree_cpu_s() -> float:
    """CPU seconds so far of this process and of all below it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


# ---- the driver: many runners of a small environment ----


def driver(runners: int, mode: Any, turns: int, seed: int) -> Found:
    """The driver's CPU milliseconds for each fragment, the mean of each turn."""
    settings = RunnerSampler(runners, ps.SerialSampler(T=16, B=2), backend="ray", mode=mode, num_cpus=0.01)
    sampler = settings.build(ENV, seed)
    each = 320 if mode == "ready" else 320 // runners
    try:
        sampler.initialize(ps.PPO().build(sampler.spec, seed).agent)
        found: list[float] = []
        for turn in range(turns + 1):
            started = time.process_time()
            for itr in range(turn * each, turn * each + each):
                sampler.obtain_samples(itr)
            found.append((time.process_time() - started) * 1e3 / 320)
        return {f"{mode}, {runners} runners": found[1:]}
    finally:
        sampler.shutdown()


# ---- a push: 50 MB of weights ----


def push(turns: int, seed: int) -> Found:
    """Milliseconds of a raw put, of a push until all runners have the bytes, and until their agents have taken them.

    The raw put is of one array of as many bytes, of memory in use: zeros that were never written are no memory at all.
    """
    inner = ps.SerialSampler(T=8, B=1)
    settings = RunnerSampler(PUSH_RUNNERS, inner, backend="ray", num_cpus=0.01, object_store_mb=800)
    sampler = settings.build(ENV, seed)
    try:
        agent = ps.PPO(net=ps.Net(hidden=(HIDDEN, HIDDEN))).build(sampler.spec, seed).agent
        sampler.initialize(agent)
        group = sampler.workers
        backend: Any = group.backend
        ray = backend.cluster.ray
        data = np.ones(sum(x.numel() * 4 for x in agent.parameters()), np.uint8)

        def received() -> None:
            weights = group.publish(agent)
            done = group.collect({i: group.call(i, "apply", _bytes_of, weights) for i in group.alive})
            assert all(n >= data.nbytes for n in done.values()) and len(done) == PUSH_RUNNERS

        def taken() -> None:
            weights = group.publish(agent)
            done = group.collect({i: group.call(i, "take_weights", weights, 0) for i in group.alive})
            assert len(done) == PUSH_RUNNERS

        found: Found = {"weights MB": [data.nbytes / 1e6]}
        for turn in range(turns + 1):
            for name, what in (("raw put", lambda: ray.put(data)), ("received", received), ("taken", taken)):
                wall, cpu = time.perf_counter(), time.process_time()
                what()
                if turn:
                    found.setdefault(f"{name} ms", []).append((time.perf_counter() - wall) * 1e3)
                    found.setdefault(f"{name} CPU ms", []).append((time.process_time() - cpu) * 1e3)
                time.sleep(0.05)  # what was put is freed
        return found
    finally:
        sampler.shutdown()


def _bytes_of(runner: EnvRunner, weights: Any) -> int:
    return sum(len(x) for x in weights) if isinstance(weights, list) else len(weights)


PARTS: dict[str, Callable[..., Found]] = {
    "rounds": rounds, "sampling": sampling, "training": training, "driver": driver, "push": push,
}  # fmt: skip


def prepare() -> None:
    """One thread for torch, as runners have."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
