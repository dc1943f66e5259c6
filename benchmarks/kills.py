"""Random kill -9 of workers while a run is resumed, and of the learner while its workers start.

    python benchmarks/kills.py [--kills 50] [--seed 0] [--samplers gpu,alternating] [--out benchmarks/results/kills.md]

After the kill of a worker the run goes on and must repeat no episode; after that of a learner every process that it
had started must be gone within 10 seconds. The script is the subreaper of all of them, so none can hide.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil

import penstock as ps
from penstock.core.errors import EnvWorkerError
from penstock.core.noise import env_seeds
from penstock.envs.make import EnvConfig
from penstock.envs.toy.crashes import CrashEnv
from penstock.envs.toy.plumbing import SeedEcho
from penstock.testing.samplers import EchoAgent

SEED, T, B = 4, 8, 4
KINDS: dict[str, Any] = {
    "cpu": ps.CpuSampler(T, B, workers=2),
    "gpu": ps.GpuSampler(T, B, workers=2),
    "alternating": ps.AlternatingSampler(T, B, workers=2),
    "async-serial": ps.AsyncSerialSampler(ps.SerialSampler(T, B)),
    "async-cpu": ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2)),
}
CONFIG = EnvConfig(CrashEnv, {"where": "never", "nap_s": 0.02})
GONE_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


def left(within_s: float) -> list[psutil.Process]:
    """Processes below this one that do not end in time; those that ended are reaped."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = psutil.Process().children(recursive=True)
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def workers() -> list[psutil.Process]:
    """Worker processes below this one, whoever started them."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "penstock.processes.tie" in process.cmdline():
                found.append(process)
    return found


def started(kind: str) -> Any:
    sampler = KINDS[kind].build(CONFIG, SEED)
    sampler.initialize(EchoAgent(sampler.spec))
    return sampler


class Episodes:
    """The last episode of each slot, from the seeds that observations show."""

    def __init__(self, last: list[int] | None = None) -> None:
        self._known = [{seed: n for n, seed in enumerate(env_seeds(SEED, b, 0, 2000))} for b in range(B)]
        self.last = list(last or [-1] * B)
        self.repeated = 0

    def add(self, batch: Any, opening: bool = False) -> None:
        seeds, _ = SeedEcho.place_of(batch.obs)
        for b in range(B):
            for seed in seeds[0 if opening else 1 :, b][batch.first[0 if opening else 1 :, b]].tolist():
                episode = self._known[b][seed]
                self.repeated += episode <= self.last[b]
                self.last[b] = max(self.last[b], episode)


def prepared(kind: str) -> tuple[dict[str, Any], list[int], float]:
    """A state to resume from, the last episodes before it, and the seconds that a resume takes."""
    sampler, episodes = started(kind), Episodes()
    for itr in range(5):
        episodes.add(sampler.obtain_samples(itr)[0], opening=itr == 0)
    state = sampler.state_dict()
    sampler.shutdown()
    resumed = started(kind)
    began = time.monotonic()
    resumed.load_state_dict(state)
    took_s = time.monotonic() - began
    resumed.shutdown()
    return state, episodes.last, took_s


def kill_a_worker(kind: str, ready: tuple[dict[str, Any], list[int], float], rng: random.Random) -> str:
    """Kills a random worker at a random time of a resume; returns the fault, or an empty text."""
    state, last, took_s = ready
    sampler = started(kind)
    victim, delay_s = rng.choice(workers()), rng.uniform(0, took_s)
    killed: list[bool] = []

    def kill() -> None:
        time.sleep(delay_s)
        victim.kill()
        killed.append(True)

    thread = threading.Thread(target=kill)
    thread.start()
    episodes = Episodes(last)
    fault = ""
    try:
        sampler.load_state_dict(state)
        thread.join(60)
        for itr in range(5, 9):
            episodes.add(sampler.obtain_samples(itr)[0])
    except EnvWorkerError as error:
        fault = f"{kind}: {str(error).splitlines()[0]}"
    thread.join(60)
    sampler.shutdown()
    if episodes.repeated:
        fault = f"{kind}: {episodes.repeated} episodes were played twice"
    if not killed:
        fault = f"{kind}: nobody was killed"
    if still := left(GONE_S):
        fault = f"{kind}: {len(still)} processes are left"
    return fault


def kill_a_learner(kind: str, start_s: float, rng: random.Random) -> str:
    """Kills a learner at a random time while its workers start; returns the fault, or an empty text."""
    pid = os.fork()
    if not pid:
        try:
            started(kind)
            time.sleep(60)
        finally:
            os._exit(1)
    time.sleep(rng.uniform(0, start_s))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    still = left(GONE_S)
    for process in still:
        process.kill()
    return f"{kind}: {len(still)} processes are left" if still else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samplers", default=",".join(KINDS), help="those that take turns")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warnings.filterwarnings("ignore", message=".*(replaced|dropped)")
    rng, kinds = random.Random(args.seed), args.samplers.split(",")
    began = time.monotonic()
    print("preparing", flush=True)
    starts_s = {}
    ready = {}
    for kind in kinds:
        at = time.monotonic()
        started(kind).shutdown()
        starts_s[kind] = time.monotonic() - at
        ready[kind] = prepared(kind)
    lines: list[str] = []
    for what, one in (
        ("of workers while a run is resumed", lambda kind: kill_a_worker(kind, ready[kind], rng)),
        ("of the learner while its workers start", lambda kind: kill_a_learner(kind, starts_s[kind], rng)),
    ):
        faults: list[str] = []
        for n in range(args.kills):
            if fault := one(kinds[n % len(kinds)]):
                faults.append(fault)
                print(f"  {n}: {fault}", flush=True)
            if n % 10 == 9:
                print(f"  {n + 1} after {time.monotonic() - began:.0f} s", flush=True)
        good = f"{args.kills - len(faults)} of {args.kills} kills {what}: nothing left behind, no episode repeated"
        print(good, flush=True)
        lines += [f"- {good}", *[f"  - {fault}" for fault in faults]]
    print(f"{time.monotonic() - began:.0f} s")
    if args.out:
        head = f"# Random kills\n\n`python benchmarks/kills.py --kills {args.kills} --seed {args.seed} --samplers {args.samplers}`"
        system = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        args.out.write_text(f"{head}, these by turns.\n{system}.\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
