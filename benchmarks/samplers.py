"""Promises of the samplers with worker processes, by turns (turns.py) and by wall time.

Every round starts each contestant anew, for some looks one after another: samplers hold processes, and peers have some that
do not rest between looks. One torch thread in each process; processes are bound to cores where there is one for each, peers
and the hand-written floor like penstock's.

    python benchmarks/samplers.py --peer .venv-peer/bin/python --sf .venv-sf/bin/python [--only 1,3] [--write]
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import turns
from floor import shared_floor
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from speed import ENV, PPO_SETTINGS, PPO_STEPS, T
from turns import Bar, Case, Who

LOOPS, NET = 6_000, (768, 768, 768, 768)
"""A step of about 0.4 ms, and a network whose forward pass costs as much: a note has both as measured."""


# ---- what the workers make ----


class BusyEnv(gym.Env[Any, Any]):
    """A step is `loops` turns of a Python loop: real work on the CPU, as much as was calibrated, whoever else is there."""

    def __init__(self, loops: int) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._loops, self._obs = loops, np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._obs.copy(), {}

    def step(self, action: Any) -> Any:
        work(self._loops)
        return self._obs.copy(), 1.0, False, False, {}


def work(loops: int) -> int:
    """Something that takes a time proportional to `loops`."""
    x = 1
    for i in range(loops):
        x = (x * 31 + i) % 65_521
    return x


class LeavesAChild(CartPoleEnv):
    """CartPole that starts a process which holds all descriptors of the worker and outlives it."""

    def __init__(self) -> None:
        super().__init__()
        ours = {"penstock.workers.env_worker", "penstock.processes.fork_server"}
        if ours & {*sys.orig_argv} and os.fork() == 0:  # the learner may make one to look at it
            time.sleep(30.0)
            os._exit(0)


# ---- contestants ----


def build(kind: str, env: Any, seed: int, pinned: bool = True, **settings: Any) -> tuple[Any, Any]:
    """A live sampler and a fresh policy in it; its processes on cores of their own if there are enough."""
    import penstock as ps
    from penstock.core.machine import read_machine
    from penstock.core.placement import pin
    from penstock.run.affinity import plan

    net = ps.Net(hidden=tuple(settings.pop("hidden", (64, 64))))
    cls, machine = getattr(ps, kind), read_machine()
    pinned = pinned and settings.get("workers", len(machine.cores)) < len(machine.cores)
    where = None
    if pinned:
        acts = kind != "CpuSampler"
        where = plan(machine, settings["workers"], getattr(cls, "groups", 1), server=acts)
        settings["affinity"] = where
    sampler = cls(**settings).build(env, seed)
    if where is not None:  # after it has seen how many cores there are, which decides whether waiters yield
        pin(where.server or where.learner)
    policy = _ppo(net=net).build(sampler.spec, seed)
    sampler.initialize(policy.agent)
    return sampler, policy


def _ppo(**more: Any) -> Any:
    import penstock as ps

    given: Any = {**PPO_SETTINGS, **more}
    return ps.PPO(**given)


@contextmanager
def sampling(kind: str, seed: int, env: Any = ENV, checks: Any = "sampled", **settings: Any) -> Iterator[turns.Unit]:
    """Valid environment steps of `obtain_samples`; waits as the sampler reports them."""
    import penstock as ps

    sampler, _ = build(kind, ps.EnvConfig(env, checks=checks), seed, **settings)
    itr = 0

    def unit() -> turns.Look:
        nonlocal itr
        itr += 1
        return {"work": sampler.obtain_samples(itr - 1)[0].env_steps, **sampler.metrics()}

    for _ in range(2):
        unit()
    yield unit
    sampler.shutdown()


@contextmanager
def floor(B: int, seed: int) -> Iterator[turns.Unit]:
    """Two processes of floor.py."""
    cpus = sorted(os.sched_getaffinity(0))
    with shared_floor(ENV, T, B, seed, cpus=cpus[-2:] if len(cpus) > 2 else ()) as unit:
        unit()
        yield unit


@contextmanager
def busy(kind: str, seed: int, **settings: Any) -> Iterator[turns.Unit]:
    """Steps where a step and a forward pass are dear, and what each costs alone."""
    import penstock as ps

    sampler, policy = build(kind, ps.EnvConfig(BusyEnv, {"loops": LOOPS}), seed, hidden=NET, **settings)
    started = time.perf_counter()
    work(100 * LOOPS)
    alone = {
        "ms of a step": 10 * (time.perf_counter() - started),
        "ms of a forward": 1e3 * _forward_s(policy.agent, settings["B"]),
    }
    itr = 0

    def unit() -> turns.Look:
        nonlocal itr
        itr += 1
        return {"work": sampler.obtain_samples(itr - 1)[0].env_steps, **alone}

    for _ in range(2):
        unit()
    yield unit
    sampler.shutdown()


def _forward_s(agent: Any, B: int) -> float:
    import penstock as ps

    inputs = ps.Inputs(
        torch.zeros(B, 4), torch.zeros(B, dtype=torch.long), torch.zeros(B), torch.zeros(B, dtype=torch.bool)
    )
    noise = torch.full((B, agent.noise_size), 0.5)
    with torch.inference_mode():
        state = agent.initial_state(B)
        took: list[float] = []
        for _ in range(200):
            started = time.perf_counter()
            agent.act(inputs, state, noise)
            took.append(time.perf_counter() - started)
    return statistics.median(took)


@contextmanager
def startup(kind: str, seed: int, **settings: Any) -> Iterator[turns.Unit]:
    """From the settings to the first batch, libraries imported; then the resident memory of the workers."""
    import penstock as ps

    _ = ps.PPO, getattr(ps, kind)  # imports torch and the sampler

    def unit() -> turns.Look:
        started = time.perf_counter()
        sampler, _ = build(kind, ENV, seed, False, **settings)
        sampler.obtain_samples(0)
        seconds = time.perf_counter() - started
        resident = [_resident_mb(pid) for pid in worker_pids(sampler)]
        sampler.shutdown()
        return {"work": 1.0, "wall": seconds, "MB of the largest worker": max(resident)}

    yield unit


def worker_pids(sampler: Any) -> list[int]:
    """Of the processes that step, whether they are forked or each for itself."""
    return [one.process.pid for one in sampler.pool._workers.workers]


def _resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / 1e6


@contextmanager
def fault(kind: str, policy: str, lives_on: bool, seed: int, **settings: Any) -> Iterator[turns.Unit]:
    """SIGKILL of a worker to the learner's notice."""
    kills = 0

    def unit() -> turns.Look:
        nonlocal kills
        kills += 1
        return {"work": 1.0, "wall": _notice_s(kind, policy, lives_on, 4 * seed + kills, **settings)}

    yield unit


def _notice_s(kind: str, policy: str, lives_on: bool, seed: int, **settings: Any) -> float:
    """One kill while a batch is collected; noticed is what raises, or is counted in the metrics."""
    import penstock as ps

    sampler, _ = build(kind, LeavesAChild if lives_on else ENV, seed, False, fault_policy=policy, **settings)
    workers = worker_pids(sampler)
    victim = workers[seed % len(workers)]
    times: dict[str, float] = {}

    def kill() -> None:
        time.sleep(0.2 + 0.003 * seed)
        times["killed"] = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        while policy != "raise" and "seen" not in times and time.perf_counter() - times["killed"] < 10.0:
            with contextlib.suppress(RuntimeError):  # the counts grow while they are read
                if any(name.startswith("faults/") for name in sampler.metrics()):
                    times["seen"] = time.perf_counter()
            time.sleep(0.0005)

    thread, itr = threading.Thread(target=kill), 0
    began = time.perf_counter()
    thread.start()
    try:
        while "seen" not in times and time.perf_counter() - began < 20.0:
            sampler.obtain_samples(itr)
            itr += 1
    except ps.EnvWorkerError:
        times["seen"] = time.perf_counter()
    thread.join(timeout=15.0)
    sampler.shutdown()
    if "seen" not in times:
        raise RuntimeError(f"{kind}: the kill of {victim} went unnoticed for 10 s")
    return times["seen"] - times["killed"]


@contextmanager
def ppo(kind: str, seed: int, **settings: Any) -> Iterator[turns.Unit]:
    """Environment steps of `train`: from its call to its return, and without building."""
    import penstock as ps
    from penstock.core.machine import read_machine
    from penstock.run.affinity import plan

    machine = read_machine()
    if settings.get("workers", len(machine.cores)) < len(machine.cores):
        settings["affinity"] = plan(machine, settings["workers"])
    sampler = getattr(ps, kind.removeprefix("Async"))(**settings)
    if kind.startswith("Async"):
        sampler = getattr(ps, kind)(sampler, depth=1)
    train = ps.train  # its modules are imported here, as the peer's are before its clock starts

    def unit() -> turns.Look:
        with tempfile.TemporaryDirectory() as folder:
            run = ps.RunConfig(
                steps=PPO_STEPS, seed=seed, checkpoint_interval=0, eval_episodes=0, progress="off", dir=f"{folder}/run"
            )
            result = train(ps.Experiment(ENV, _ppo(), sampler, run))
        return {"work": result.env_steps, "steps/s of training": result.metrics["time/fps"]}

    yield unit


# ---- the cases ----


def _sampling_case(B: int) -> Case:
    two = {"T": T, "B": B, "workers": 2}
    sb3 = "peers/sb3.py", "peer"
    who = {
        "floor": Who("floor", {"B": B}),
        "SerialSampler": Who("sampling", {"kind": "SerialSampler", "T": T, "B": B}),
        "CpuSampler": Who("sampling", {"kind": "CpuSampler", **two}),
        "GpuSampler": Who("sampling", {"kind": "GpuSampler", "device": "cpu", **two}),
        "AlternatingSampler": Who("sampling", {"kind": "AlternatingSampler", "device": "cpu", **two}),
        "SB3, 2 processes": Who("sampling", {"B": B, "processes": 2, "pinned": True}, *sb3),
        "SB3 SubprocVecEnv": Who("sampling", {"B": B, "processes": B}, *sb3),
        "SB3 DummyVecEnv": Who("sampling", {"B": B}, *sb3),
        "Gymnasium AsyncVectorEnv": Who("sampling", {"B": B}, "peers/gymnasium_async.py"),
        "Sample Factory": Who("sampling", {"B": B, "workers": 2}, "peers/sample_factory_sampling.py", "sf"),
    }
    # One process is no peer of worker processes; it is shown, since for CartPole it beats every other one.
    peers = ("SB3, 2 processes", "SB3 SubprocVecEnv", "Gymnasium AsyncVectorEnv", "Sample Factory")
    bars = [Bar("CpuSampler", 0.83 if B == 16 else 0.88, ("floor",))]
    if B == 16:
        bars += [Bar("CpuSampler", 6.0, peers), Bar("GpuSampler", 0.9, ("SerialSampler",))]
    else:
        bars.append(Bar("GpuSampler", 120_000.0))
    return Case(f"sampling, {ENV}, B={B}", "steps/s", who, tuple(bars), "wall", 0.4, 5, 5, one_core=False)


_FAULTS = {
    f"{kind}, {policy}{', its child lives on' * lives_on}": Who(
        "fault", {"kind": kind, "policy": policy, "lives_on": lives_on, "T": T, "B": 4, "workers": 2}
    )
    for kind in ("CpuSampler", "GpuSampler") for policy in ("raise", "restart") for lives_on in (False, True)
}  # fmt: skip
_EIGHT, _TWO = {"T": T, "B": 16, "workers": 8}, {"T": T, "B": 16, "workers": 2}
_LOCKSTEP = {"T": 32, "B": 8, "workers": 2, "device": "cpu"}
_MEMORY, _TRAINED = "MB of the largest worker", "steps/s of training"
CASES = {
    "1-16": _sampling_case(16),
    "1-64": _sampling_case(64),
    "2": Case(f"a step of 0.4 ms, a network of {len(NET)} x {NET[0]}, B=8", "steps/s",
              {kind: Who("busy", {"kind": kind, **_LOCKSTEP}) for kind in ("GpuSampler", "AlternatingSampler")},
              (Bar("AlternatingSampler", 1.10, ("GpuSampler",)),), "wall", 0.4, 5, 5, one_core=False),
    "3": Case(f'checks="sampled" beside "off", CpuSampler, {ENV}, B=16', "steps/s",
              {checks: Who("sampling", {"kind": "CpuSampler", "checks": checks, **_TWO}) for checks in ("sampled", "off")},
              (Bar("sampled", 0.97, ("off",)),), "wall", 0.4, 9, 5, one_core=False),
    "4": Case(f"settings to first batch, {ENV}, 8 workers", "s",
              {"GpuSampler": Who("startup", {"kind": "GpuSampler", "device": "cpu", **_EIGHT}),
               "CpuSampler": Who("startup", {"kind": "CpuSampler", **_EIGHT})},
              (Bar("GpuSampler", 3.0, below=True), Bar("CpuSampler", 8.0, below=True),
               Bar("GpuSampler", 60.0, below=True, worst=True, of=_MEMORY)), "wall", 0.0, 5, 1, one_core=False),
    "5": Case("SIGKILL of a worker to the learner's notice", "ms", _FAULTS,
              tuple(Bar(name, 50.0, below=True, worst=True) for name in _FAULTS), "wall", 0.0, 5, 4, one_core=False),
    "6": Case(f"PPO, {ENV}, {PPO_STEPS // 1000}k steps, B=16", "steps/s",
              {"SerialSampler": Who("ppo", {"kind": "SerialSampler", "T": T, "B": 16}),
               "CpuSampler": Who("ppo", {"kind": "CpuSampler", **_TWO}),
               "AsyncSerialSampler": Who("ppo", {"kind": "AsyncSerialSampler", "T": T, "B": 16}),
               "SB3": Who("ppo", {"steps": PPO_STEPS}, "peers/sb3.py", "peer")},
              (Bar("CpuSampler", 1.25, ("SerialSampler",), of=_TRAINED), Bar("CpuSampler", 2.4, ("SB3",), of=_TRAINED),
               Bar("SerialSampler", 2.6, ("SB3",), of=_TRAINED), Bar("AsyncSerialSampler", 4.0, ("SB3",), of=_TRAINED)),
              "wall", 0.0, 5, 1, one_core=False),
}  # fmt: skip
"""By section; `--only 1` means both that begin so."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    turns.main(__doc__, CASES, {f.__name__: f for f in (sampling, floor, busy, startup, fault, ppo)},
               {"peer": "stable-baselines3", "sf": "sample-factory"})  # fmt: skip
