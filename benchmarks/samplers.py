"""Promises of the samplers with worker processes, measured on this machine.

Every measurement is a fresh process with one torch thread in each of its processes; contenders take turns, A B, B A, ...
so that whatever else the machine does falls on all of them, and ratios are formed within a round. Processes are bound to
cores where there is one for each, peers and the hand-written floor like penstock's.

    python benchmarks/samplers.py --peer .venv-peer/bin/python --sf .venv-sf/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from speed import ENV, PPO_SETTINGS, PPO_STEPS, RESULTS, SECONDS, T, about

HERE = Path(__file__).parent
STEP_S, NET = 0.4e-3, (768, 768, 768, 768)
Row = dict[str, float]


@dataclass(frozen=True)
class Bar:
    """A promise: the median of `name` against a number, or of its ratio to the best of some others."""

    name: str
    limit: float
    than: tuple[str, ...] = ()
    below: bool = False
    worst: bool = False
    """The largest measurement counts, not the median."""
    of: str = "value"
    """What of each measurement is compared; "value" is the one in the table."""

    def text(self) -> str:
        than = f"{self.limit:,g}" + (
            f" x {'the best of ' * (len(self.than) > 1)}{', '.join(self.than)}" if self.than else ""
        )
        return f"{self.name} {'<=' if self.below else '>='} {than}{'' if self.of == 'value' else f', {self.of}'}"

    def measured(self, found: Mapping[str, list[Row]]) -> float | None:
        """None if what it speaks of was not measured."""
        others = [found[name] for name in self.than if found.get(name)]
        if not found.get(self.name) or (self.than and not others):
            return None
        mine = [row[self.of] for row in found[self.name]]
        if others:
            mine = [x / max(row[self.of] for row in rows) for x, *rows in zip(mine, *others)]
        return max(mine) if self.worst else statistics.median(mine)


@dataclass(frozen=True)
class Case:
    """What is measured, by whom and how, and what is promised."""

    title: str
    unit: str
    contenders: dict[str, tuple[Any, ...]]
    """By name: a function here and its keyword arguments, or a script of `speed` or `peers`, whose it is, its arguments."""
    bars: tuple[Bar, ...] = ()
    prepare: Callable[[], dict[str, Any]] = dict
    """Further keyword arguments, found once and equal for all contenders."""


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


def calibrated() -> dict[str, Any]:
    """How many loops take STEP_S: the quickest of many tries, in CPU time."""
    took: list[float] = []
    for _ in range(50):
        started = time.thread_time()
        work(20_000)
        took.append(time.thread_time() - started)
    return {"loops": round(20_000 * STEP_S / min(took))}


class LeavesAChild(CartPoleEnv):
    """CartPole that starts a process which holds all descriptors of the worker and outlives it."""

    def __init__(self) -> None:
        super().__init__()
        if "penstock.workers.env_worker" in sys.orig_argv and os.fork() == 0:  # the learner may make one to look at it
            time.sleep(30.0)
            os._exit(0)


# ---- one measurement, in a process of its own ----


def build(kind: str, env: Any, seed: int, pinned: bool, **settings: Any) -> tuple[Any, Any]:
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


def rate(sampler: Any, seconds: float = SECONDS) -> float:
    """Valid environment steps per second of `obtain_samples`."""
    itr, steps, started = 0, 0, time.perf_counter()
    while itr < 3 or time.perf_counter() - started < seconds:
        if itr == 2:  # two to warm up
            steps, started = 0, time.perf_counter()
        steps += sampler.obtain_samples(itr)[0].env_steps
        itr += 1
    return steps / (time.perf_counter() - started)


def sampling(kind: str, seed: int, pinned: bool, **settings: Any) -> Row:
    """Steps per second on CartPole; waits as the sampler reports them."""
    sampler, _ = build(kind, ENV, seed, pinned, **settings)
    found = {"value": rate(sampler), **sampler.metrics()}
    sampler.shutdown()
    return found


def floor_two(B: int, seed: int, pinned: bool) -> Row:
    """See floor.py."""
    from floor import shared_floor

    cpus = sorted(os.sched_getaffinity(0))
    return {"value": shared_floor(ENV, T, B, SECONDS, seed, cpus=cpus[-2:] if pinned and len(cpus) > 2 else ())}


def busy(kind: str, loops: int, seed: int, pinned: bool, **settings: Any) -> Row:
    """Steps per second where a step and a forward are dear; what each costs alone, and its share of the waits."""
    import penstock as ps

    sampler, policy = build(kind, ps.EnvConfig(BusyEnv, {"loops": loops}), seed, pinned, hidden=NET, **settings)
    found = {"value": rate(sampler, 2 * SECONDS), **sampler.metrics()}
    sampler.shutdown()
    started = time.perf_counter()
    for _ in range(100):
        work(loops)
    step_s = (time.perf_counter() - started) / 100
    return {**found, "ms of a step": 1e3 * step_s, "ms of a forward": 1e3 * _forward_s(policy.agent, settings["B"])}


def _forward_s(agent: Any, B: int) -> float:
    import torch

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


def checks(seed: int, pinned: bool, **settings: Any) -> Row:
    """What checks="sampled" costs beside "off": two samplers on the same cores take turns batch by batch, in one process.

    3% is less than two processes differ by for no reason. Each batch counts against the one just before or after it.
    """
    import penstock as ps

    modes: tuple[Literal["sampled", "off"], ...] = ("sampled", "off")
    live, cpus = {}, os.sched_getaffinity(0)
    for mode in modes:
        os.sched_setaffinity(0, cpus)  # as before the first one was built
        live[mode] = build("CpuSampler", ps.EnvConfig(ENV, checks=mode), seed, pinned, **settings)[0]
    took: dict[str, list[float]] = {mode: [] for mode in modes}
    itr, began = 0, time.perf_counter()
    while itr < 10 or time.perf_counter() - began < 4 * SECONDS:
        for mode in modes if itr % 2 else modes[::-1]:
            started = time.perf_counter()
            batch, _ = live[mode].obtain_samples(itr)
            took[mode].append((time.perf_counter() - started) / batch.env_steps)
        itr += 1
    for sampler in live.values():
        sampler.shutdown()
    cost = statistics.median(a / b for a, b in list(zip(took["sampled"], took["off"]))[2:]) - 1.0
    return {"value": 100 * cost, **{f"steps/s, {mode}": 1.0 / statistics.median(x) for mode, x in took.items()}}


def startup(kind: str, seed: int, pinned: bool, **settings: Any) -> Row:
    """Seconds from the settings to the first batch, libraries imported; then the resident memory of the workers."""
    import psutil

    import penstock as ps

    _ = ps.PPO, getattr(ps, kind)  # imports torch and the sampler
    started = time.perf_counter()
    sampler, _ = build(kind, ENV, seed, False, **settings)
    sampler.obtain_samples(0)
    seconds = time.perf_counter() - started
    resident = [_resident_mb(child.pid) for child in psutil.Process().children()]
    sampler.shutdown()
    return {"value": seconds, "MB of the largest worker": max(resident)}


def _resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / 1e6


def fault(kind: str, policy: str, lives_on: bool, seed: int, pinned: bool, **settings: Any) -> Row:
    """Milliseconds from SIGKILL of a worker to the learner's notice: the slowest and the median of several kills."""
    took = [_notice_s(kind, policy, lives_on, seed + i, **settings) * 1e3 for i in range(4)]
    return {"value": max(took), "median ms": statistics.median(took)}


def _notice_s(kind: str, policy: str, lives_on: bool, seed: int, **settings: Any) -> float:
    """One kill while a batch is collected; noticed is what raises, or is counted in the metrics."""
    import psutil

    import penstock as ps

    sampler, _ = build(kind, LeavesAChild if lives_on else ENV, seed, False, fault_policy=policy, **settings)
    workers = [child for child in psutil.Process().children() if "penstock.workers.env_worker" in child.cmdline()]
    victim = workers[seed % len(workers)].pid
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


def ppo(kind: str, seed: int, pinned: bool, **settings: Any) -> Row:
    """Environment steps per second of `train`: from its call to its return, and without building."""
    import penstock as ps
    from penstock.core.machine import read_machine
    from penstock.run.affinity import plan

    machine = read_machine()
    if pinned and settings.get("workers", len(machine.cores)) < len(machine.cores):
        settings["affinity"] = plan(machine, settings["workers"])
    with tempfile.TemporaryDirectory() as folder:
        run = ps.RunConfig(
            steps=PPO_STEPS, seed=seed, checkpoint_interval=0, eval_episodes=0, progress="off", dir=f"{folder}/run"
        )
        sampler = getattr(ps, kind.removeprefix("Async"))(**settings)
        if kind.startswith("Async"):
            sampler = getattr(ps, kind)(sampler, depth=1)
        exp = ps.Experiment(ENV, _ppo(), sampler, run)
        train = ps.train  # its modules are imported here, as the peer's are before its clock starts
        started = time.perf_counter()
        result = train(exp)
        seconds = time.perf_counter() - started
    return {"value": result.env_steps / seconds, "steps/s without building": result.metrics["time/fps"]}


FUNCTIONS = {f.__name__: f for f in (sampling, floor_two, busy, checks, startup, fault, ppo)}


# ---- the cases ----


def _sampling_case(B: int) -> Case:
    two = {"T": T, "B": B, "workers": 2}
    contenders: dict[str, tuple[Any, ...]] = {
        "floor": ("floor_two", {"B": B}),
        "SerialSampler": ("sampling", {"kind": "SerialSampler", "T": T, "B": B}),
        "CpuSampler": ("sampling", {"kind": "CpuSampler", **two}),
        "GpuSampler": ("sampling", {"kind": "GpuSampler", "device": "cpu", **two}),
        "AlternatingSampler": ("sampling", {"kind": "AlternatingSampler", "device": "cpu", **two}),
        "SB3, 2 processes": ("peers/sb3.py", "peer", {"B": B, "processes": 2, "cpus": True}),
        "SB3 SubprocVecEnv": ("peers/sb3.py", "peer", {"B": B, "processes": B}),
        "SB3 DummyVecEnv": ("peers/sb3.py", "peer", {"B": B, "processes": 0}),
        "Gymnasium AsyncVectorEnv": ("peers/gymnasium_async.py", "here", {"B": B}),
        "Sample Factory": ("peers/sample_factory_sampling.py", "sf", {"B": B, "workers": 2}),
    }
    # One process is no peer of worker processes; it is shown, since for CartPole it beats every other one.
    peers = ("SB3, 2 processes", "SB3 SubprocVecEnv", "Gymnasium AsyncVectorEnv", "Sample Factory")
    bars = [Bar("CpuSampler", 0.75 if B == 16 else 0.80, ("floor",))]
    if B == 16:
        bars += [Bar("CpuSampler", 6.0, peers), Bar("GpuSampler", 0.9, ("SerialSampler",))]
    else:
        bars.append(Bar("GpuSampler", 120_000.0))
    return Case(f"sampling, {ENV}, B={B}", "steps/s", contenders, tuple(bars))


def _fault_cases() -> Case:
    contenders = {
        f"{kind}, {policy}{', its child lives on' * lives_on}": (
            "fault", {"kind": kind, "policy": policy, "lives_on": lives_on, "T": T, "B": 4, "workers": 2}
        )
        for kind in ("CpuSampler", "GpuSampler") for policy in ("raise", "restart") for lives_on in (False, True)
    }  # fmt: skip
    return Case("SIGKILL of a worker to the learner's notice", "ms", contenders,
                tuple(Bar(name, 50.0, below=True, worst=True) for name in contenders))  # fmt: skip


def _lockstep(kind: str) -> tuple[Any, ...]:
    return "busy", {"kind": kind, "T": 32, "B": 8, "workers": 2, "device": "cpu"}


_EIGHT = {"T": T, "B": 16, "workers": 8}
_MEMORY = "MB of the largest worker"
SECTIONS: dict[str, tuple[Case, ...]] = {
    "1": (_sampling_case(16), _sampling_case(64)),
    "2": (Case(f"a step of {1e3 * STEP_S:g} ms, a network of {len(NET)} x {NET[0]}, B=8", "steps/s",
               {"GpuSampler": _lockstep("GpuSampler"), "AlternatingSampler": _lockstep("AlternatingSampler")},
               (Bar("AlternatingSampler", 1.10, ("GpuSampler",)),), calibrated),),
    "3": (Case(f'checks="sampled" beside "off", {ENV}, B=16', "% more time",
               {"CpuSampler": ("checks", {"T": T, "B": 16, "workers": 2})}, (Bar("CpuSampler", 3.0, below=True),)),),
    "4": (Case(f"settings to first batch, {ENV}, 8 workers", "s",
               {"GpuSampler": ("startup", {"kind": "GpuSampler", "device": "cpu", **_EIGHT}),
                "CpuSampler": ("startup", {"kind": "CpuSampler", **_EIGHT})},
               (Bar("GpuSampler", 3.0, below=True), Bar("CpuSampler", 8.0, below=True),
                Bar("GpuSampler", 60.0, below=True, worst=True, of=_MEMORY))),),
    "5": (_fault_cases(),),
    "6": (Case(f"PPO, {ENV}, {PPO_STEPS // 1000}k steps, B=16", "steps/s",
               {"SerialSampler": ("ppo", {"kind": "SerialSampler", "T": T, "B": 16}),
                "CpuSampler": ("ppo", {"kind": "CpuSampler", "T": T, "B": 16, "workers": 2}),
                "AsyncSerialSampler": ("ppo", {"kind": "AsyncSerialSampler", "T": T, "B": 16}),
                "SB3": ("speed.py", "peer", {"child": "ppo_sb3"})},
               (Bar("CpuSampler", 1.25, ("SerialSampler",), of="steps/s without building"),
                Bar("CpuSampler", 2.4, ("SB3",), of="steps/s without building"),
                Bar("SerialSampler", 2.6, ("SB3",), of="steps/s without building"),
                Bar("AsyncSerialSampler", 4.0, ("SB3",), of="steps/s without building"))),),
}  # fmt: skip


# ---- the parent ----


@dataclass
class Measured:
    """What came of one case: rows by contender, round by round, or why it failed."""

    case: Case
    rows: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    failed: str = ""


def run_case(case: Case, pythons: Mapping[str, str | None], rounds: int, pinned: bool) -> Measured:
    """All measurements of a case; every round has a seed of its own. A contender that fails ends the case."""
    names = [name for name, what in case.contenders.items() if len(what) == 2 or pythons[what[1]]]
    out, more = Measured(case, {name: [] for name in names}), case.prepare()
    for i in range(rounds):
        for name in names if i % 2 == 0 else names[::-1]:
            try:
                row = measure(case.contenders[name], pythons, i + 1, pinned, more)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                out.failed = f"{case.title}, {name}: {error}"
                print(out.failed, file=sys.stderr, flush=True)
                return out
            out.rows[name].append(row)
            print(f"{case.title}, round {i + 1}, {name}: {row}", file=sys.stderr, flush=True)
    return out


def measure(
    what: tuple[Any, ...], pythons: Mapping[str, str | None], seed: int, pinned: bool, more: dict[str, Any]
) -> Row:
    """Runs one measurement in a fresh process. Raises RuntimeError with what it printed if it fails."""
    if len(what) == 2:
        given = {**what[1], **more, "seed": seed, "pinned": pinned}
        command = [sys.executable, __file__, "--child", what[0], "--settings", json.dumps(given)]
    else:
        script, whose, given = what
        words: dict[str, Any] = {**given, "seed": seed} | ({} if script == "speed.py" else {"seconds": SECONDS})
        if "cpus" in words:
            words["cpus"] = ",".join(map(str, _peer_cpus(words["processes"] if pinned else 0)))
        command = [str(pythons[whose]), str(HERE / script), *(f"--{name}={value}" for name, value in words.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    _adopt_orphans()
    before, ours, started = _busy_s(), _children_s(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    wall = time.perf_counter() - started
    _reap_orphans()
    found = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if done.returncode or found is None:
        raise RuntimeError(f"{' '.join(command[1:])} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return {**json.loads(found), "others": max(_busy_s() - before - _children_s() + ours, 0.0) / wall}


def _peer_cpus(processes: int) -> list[int]:
    """One for the peer's own process and each of its others, if there are so many."""
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[: processes + 1] if 0 < processes < len(cpus) else []


def _adopt_orphans() -> None:
    """From now on processes whose parents are gone become this one's, so that their CPU time is counted as a peer's."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _reap_orphans() -> None:
    """Waits a little for what a measurement left behind, such as a fork server."""
    deadline = time.monotonic() + 3.0
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def _busy_s() -> float:
    """Seconds of CPU time that all processes of the machine have had."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _, _, irq, softirq = (int(word) for word in words[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verdicts(measured: Measured) -> list[tuple[str, str, str]]:
    """For each bar its text, what it came to, and met, missed or not measured."""
    out: list[tuple[str, str, str]] = []
    for bar in measured.case.bars:
        value = None if measured.failed else bar.measured(measured.rows)
        if value is None:
            out.append((bar.text(), "", "**not measured**"))
        else:
            out.append((bar.text(), _shown(value), "met" if (value <= bar.limit) == bar.below else "**missed**"))
    return out


def report(results: list[Measured], header: dict[str, str]) -> str:
    """The tables as Markdown."""
    lines = ["# Samplers", "", *(f"- {name}: {value}" for name, value in header.items()), "",
             "| case | what | unit | median | lowest | highest | n | first / it | others |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    notes: list[str] = []
    for measured in results:
        title, rows_of = measured.case.title, {name: rows for name, rows in measured.rows.items() if rows}
        for name, rows in rows_of.items():
            values = [row["value"] for row in rows]
            shown = " | ".join(_shown(x) for x in (statistics.median(values), min(values), max(values)))
            first = next(iter(rows_of.values()))
            ratio = (
                "" if rows is first else _shown(statistics.median(a["value"] / b["value"] for a, b in zip(first, rows)))
            )
            others = statistics.median(row["others"] for row in rows)
            lines.append(
                f"| {title} | {name} | {measured.case.unit} | {shown} | {len(rows)} | {ratio} | {others:.1f} |"
            )
            extras = [key for key in rows[0] if key not in ("value", "others")]
            notes += [
                f"- {title}, {name}: {key} {_shown(statistics.median(row[key] for row in rows))}" for key in extras
            ]
        if measured.failed:
            notes.append(f"- **failed**: {measured.failed.splitlines()[0]} {measured.failed.splitlines()[-1]}")
    lines += ["", "| bar | measured | |", "|---|---|---|"]
    for measured in results:
        lines += [f"| {measured.case.title}: {' | '.join(verdict)} |" for verdict in verdicts(measured)]
    lines += ["", "`first / it`: the case's first row over this one, the median of the rounds' ratios. `others`: cores' worth of "
              "CPU time that went to anything else meanwhile; above 0.3 the numbers say little."]  # fmt: skip
    return "\n".join([*lines, "", *notes, ""])


def _shown(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.2f}"


def _sample_factory(python: str | None) -> str:
    """Its version, what it runs with, and what it asks for."""
    if python is None:
        return "Sample Factory was not measured (--sf)"
    code = "import importlib.metadata as m; print(', '.join(n + ' ' + m.version(n) for n in ('sample-factory', 'torch', " \
           "'numpy', 'gymnasium')) + '; sample-factory requires ' + ', '.join(r for r in m.requires('sample-factory') " \
           "if r.split()[0].split('<')[0] in ('numpy', 'gymnasium')))"  # fmt: skip
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def main(argv: list[str]) -> int:
    """Runs the sections asked for and writes samplers.md and samplers.json. 1 if a bar is missed or not measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="python of an environment with stable-baselines3; without it, no such rows")
    parser.add_argument("--sf", help="python of an environment with sample-factory; without it, no such rows")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contender (5)")
    parser.add_argument("--only", default="", help=f"sections by comma: {', '.join(SECTIONS)}")
    parser.add_argument("--no-pin", action="store_true", help="leave all processes to the kernel")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the tables (benchmarks/results)")
    parser.add_argument("--child", choices=FUNCTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(FUNCTIONS[args.child](**args.settings)))
        return 0
    wanted = [part for part in args.only.split(",") if part] or list(SECTIONS)
    if args.rounds < 1 or not set(wanted) <= set(SECTIONS):
        parser.error(
            f"--only {args.only!r} --rounds {args.rounds}: expected some of {', '.join(SECTIONS)}, and 1 round or more"
        )
    shown = [".venv-sf/bin/python" if word == args.sf else word for word in argv]
    header = {**about(args.peer, [Path(__file__).name, *shown]), "sample factory": _sample_factory(args.sf),
              "cores": "left to the kernel" if args.no_pin else "bound, where there is one for each process"}  # fmt: skip
    pythons = {"here": sys.executable, "peer": args.peer, "sf": args.sf}
    results = [run_case(case, pythons, args.rounds, not args.no_pin) for key in wanted for case in SECTIONS[key]]
    text = report(results, header)
    print(text)
    args.out.mkdir(exist_ok=True, parents=True)
    (args.out / "samplers.md").write_text(text)
    rows = {measured.case.title: measured.rows for measured in results}
    (args.out / "samplers.json").write_text(json.dumps({"about": header, "results": rows}, indent=1) + "\n")
    return 0 if all(v[-1] == "met" for measured in results for v in verdicts(measured)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
