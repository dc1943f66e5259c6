"""An hour of random kill -9 and SIGSTOP of every kind of child, and what stays behind in the learner's process.

    python benchmarks/soak.py [--minutes 60] [--seed 0] [--out benchmarks/results/soak.md]

A round plays two kinds of samplers side by side and one kind of run, while a thread strikes their processes: SIGKILL,
SIGSTOP until a deadline ends it, or SIGSTOP for a moment. Two more samplers, the residents, live through all rounds and
are struck every few minutes. After a round nothing of it may be left, and what it gave must be right: columns whose
process was not struck are those of a SerialSampler bit by bit, no episode is played twice, and runs that went on from a
checkpoint end in the bits of one that nobody disturbed. The script is the subreaper of all processes, so none can hide.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from kills import GONE_S, SEED, Episodes, left

import penstock as ps
from penstock.core import VERSION
from penstock.core.errors import PenstockError
from penstock.envs.make import EnvConfig
from penstock.envs.toy.crashes import CrashEnv
from penstock.processes.termination import MARK, new_mark
from penstock.studies.slots.slots import make_slots
from penstock.studies.trial import has_checkpoint
from penstock.testing.samplers import EchoAgent, bits

T, B, BATCHES, STRIKES = 8, 4, 12, 2
"""Batches of a sampler in a round, and strikes."""
BACK_S = 60.0
"""Time until all slots are back after the last strike: a process that takes one over may have to start first."""
STEPS, CHECKPOINT, SLOT_S = 2_000, 500, 90.0
SPANS_S = {"learners": 8.0, "shards": 4.0, "slot": 12.0}
"""Longest time between strikes at a run."""
STARTED_S = 8.0
"""Age at which learners, shards and slots have come up: while they start, minutes pass before one counts as hung."""
RESIDENTS_EVERY_S = 150.0
"""Seconds between strikes at the residents, whose budget is 5 restarts of each process in 10 minutes."""
SETTLING, GROWTH_MB = 10, 4.0
"""Rounds in which memory may grow, and how much it may afterwards."""
CONFIG = EnvConfig(CrashEnv, {"where": "never", "nap_s": 0.01})
LIMITS: dict[str, Any] = {"step_timeout_s": 4.0, "start_timeout_s": 30.0}
SERIAL = ps.SerialSampler(T, B)
CPU = ps.CpuSampler(T, B, workers=2, **LIMITS)
HALF = ps.SerialSampler(T, B // 2)
KINDS: dict[str, Any] = {
    "cpu, forked": CPU,
    "gpu": ps.GpuSampler(T, B, workers=2, **LIMITS),
    "async-serial": ps.AsyncSerialSampler(SERIAL, **LIMITS),
    "runners": ps.RunnerSampler(2, HALF, "processes", deadline_s=4.0, start_timeout_s=30.0),
    "cpu, not forked": ps.CpuSampler(T, B, workers=1, **LIMITS),
    "async-cpu": ps.AsyncCpuSampler(CPU, **LIMITS),
    "alternating": ps.AlternatingSampler(T, B, workers=2, **LIMITS),
}
RESIDENTS = {"cpu, forked": CPU, "runners": KINDS["runners"]}
_PR_SET_CHILD_SUBREAPER = 36


def processes(above: set[int] | None = None) -> list[psutil.Process]:
    """Processes below this one but those above (the residents'), that have not ended."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if p.pid not in (above or ()) and p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


class Striker(threading.Thread):
    """Strikes a random process at random moments, a limited number of times, until it is told to stop.

    Args:
        stops_after_s: age of a process that is stopped for good; younger ones would wait out the limit of their start.
    """

    def __init__(
        self, rng: random.Random, spared: set[int], strikes: int, within_s: float, stops_after_s: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self._stops_after_s = stops_after_s
        self._rng, self._spared, self._strikes, self._within_s = rng, spared, strikes, within_s
        self.over, self.done = threading.Event(), Counter[str]()
        self.start()

    def run(self) -> None:
        while self.done.total() < self._strikes and not self.over.wait(self._rng.uniform(0.0, self._within_s)):
            if found := processes(self._spared):
                victim, way = self._rng.choice(found), self._rng.choice(["kill"] * 6 + ["stop", "pause", "pause"])
                try:
                    if way == "stop" and time.time() - victim.create_time() < self._stops_after_s:
                        way = "pause"
                    victim.send_signal(signal.SIGKILL if way == "kill" else signal.SIGSTOP)
                    self.done[way] += 1
                    if way == "pause":
                        time.sleep(self._rng.uniform(0.1, 1.0))
                        victim.send_signal(signal.SIGCONT)
                except psutil.Error:  # it has just ended
                    continue

    def stop(self) -> Counter[str]:
        self.over.set()
        self.join(30)
        return self.done


def columns_of(batch: Any) -> list[Any]:
    """The bits of each column but the version, which an AsyncSampler counts in its own way."""
    return [{k: x for k, x in bits(batch[:, b : b + 1]).items() if k != "['version']"} for b in range(B)]


class Played:
    """A sampler whose batches are compared with those of a SerialSampler, until their process has died."""

    def __init__(self, name: str, settings: Any, reference: list[Any]) -> None:
        self.name, self._reference, self._episodes = name, reference, Episodes()
        self.sampler = settings.build(CONFIG, SEED)
        self.sampler.initialize(EchoAgent(self.sampler.spec))
        self._first, self._itr, self._struck = self._pids(), 0, set[int]()
        self.whole, self.compared = False, 0
        if self.sampler.metrics().get("faults/restarts"):  # while it started: it need not begin with the first episodes
            self._struck = set(range(B))

    def _pids(self) -> list[Any]:
        """Of each column the process that steps it, where that is known."""
        pool = getattr(self.sampler, "pool", None)
        if not hasattr(pool, "shares"):
            return []
        workers: Any = [w.child and w.child.pid for w in pool._workers.workers]  # pyright: ignore
        owners = {b: w for w, mine in enumerate(pool.shares) for s in mine if s for b in range(s.start, s.stop)}  # pyright: ignore
        return [workers[owners[b]] for b in range(B)]

    def play(self) -> str:
        """One batch; returns what is wrong with it."""
        itr, self._itr = self._itr, self._itr + 1
        batch, _ = self.sampler.obtain_samples(itr)
        self._episodes.add(batch, opening=itr == 0)
        self.whole = bool(batch.valid.any(0).all())
        pids = self._pids()
        if pids:
            self._struck |= {b for b in range(B) if pids[b] != self._first[b]}
        elif self.sampler.metrics().get("faults/restarts"):
            self._struck = set(range(B))
        if self._episodes.repeated:
            return f"{self.name}: {self._episodes.repeated} episodes were played twice"
        if itr < len(self._reference):
            found = columns_of(batch)
            wrong = [b for b in range(B) if b not in self._struck and found[b] != self._reference[itr][b]]
            self.compared += B - len(self._struck)
            if wrong:
                return f"{self.name}: batch {itr} has other bits in columns {wrong}, whose process lives"
        return ""


def sampled(names: list[str], reference: list[Any], rng: random.Random, spared: set[int], said: Counter[str]) -> str:
    """Two samplers side by side, struck from their start on; returns the fault."""
    striker, open_ = Striker(rng, spared, STRIKES, 2.0), list[Played]()
    try:
        open_ += [Played(name, KINDS[name], reference) for name in names]
        n, until = 0, math.inf
        while time.monotonic() < until:
            if n == BATCHES:
                said += striker.stop()
                until = time.monotonic() + BACK_S
            if n > BATCHES and all(each.whole for each in open_):
                break
            n += 1
            if fault := next(filter(None, [each.play() for each in open_]), ""):
                return fault
        said["columns compared"] += sum(each.compared for each in open_)
        return next((f"{each.name}: slots stay empty for {BACK_S:.0f} s" for each in open_ if not each.whole), "")
    finally:
        striker.stop()
        for each in open_:
            each.sampler.shutdown()


def run_config(folder: Path, **more: Any) -> Any:
    quiet: dict[str, Any] = {"progress": "off", "eval_episodes": 0, "log_interval": 0}
    return ps.RunConfig(steps=STEPS, seed=1, dir=str(folder), checkpoint_interval=CHECKPOINT, **quiet, **more)


PPO = ps.PPO(epochs=1, minibatch=64, net=ps.Net(hidden=(16,)))


def learned(folder: Path) -> None:
    """Two learners: where one dies or hangs, both go on from the last checkpoint."""
    run = run_config(folder, learners=2, learner_timeout_s=15.0)
    to_the_end(folder, ps.Experiment("CartPole-v1", PPO, ps.SerialSampler(T=32, B=4), run))


def sharded(folder: Path) -> None:
    """A replay in two shards: where one dies the run ends, and is resumed."""
    memory = ps.ReplaySettings(capacity=1_000, shards=2, shard_backend="processes", shard_deadline_s=4.0)
    net = ps.Net(hidden=(16,))
    dqn = ps.DQN(net=net, learning_starts=64, replay_ratio=4, batch_size=16, epsilon=0.1, replay=memory)
    to_the_end(folder, ps.Experiment("CartPole-v1", dqn, ps.SerialSampler(T=4, B=4), run_config(folder)))


def to_the_end(folder: Path, exp: ps.Experiment) -> None:
    """Goes on until the run has ended; an error, as of a check or of a rank that did not come up, must say the cause."""
    while not (resumable(folder) and finished(folder)):
        try:
            ps.resume(folder) if resumable(folder) else ps.train(exp)
        except PenstockError as error:
            if not any(cause in str(error) for cause in ("signal 9 (SIGKILL)", "hangs", "no progress for", " within ")):
                raise


def launched(folder: Path) -> None:
    """A run in a slot of launch: where the run or the slot dies, it is started again."""
    words = {"sampler.T": 32, "sampler.B": 4, "algo.epochs": 1, "algo.minibatch": 64, "algo.net.hidden": 16, "run.seed": 1,
             "run.steps": STEPS, "run.checkpoint_interval": CHECKPOINT, "run.progress": "off", "run.eval_episodes": 0,
             "run.log_interval": 0, "run.dir": folder}  # fmt: skip
    first = ["train", "ppo", "--env", "CartPole-v1", *[str(x) for k, v in words.items() for x in (f"--{k}", v)]]
    log, slots = folder.parent / "log", make_slots("processes", 1)
    try:
        for _ in range(6):
            slots.settle(folder)
            running = slots.start(0, ["resume", str(folder)] if resumable(folder) else first, log, {})
            until = time.monotonic() + SLOT_S
            while (code := running.code()) is None and time.monotonic() < until:
                time.sleep(0.05)
            if code == 0 or (resumable(folder) and finished(folder)):  # or its end was not seen
                return
            if code is None:  # a slot has no deadline: whoever uses it ends what stands still
                slots.replace(0, "it was stopped")
        raise AssertionError(log.read_text()[-1000:])
    finally:
        slots.close()


def resumable(folder: Path) -> bool:
    """True if the run has a checkpoint; one that has none is removed, as `penstock launch` does."""
    if has_checkpoint(folder):
        return True
    shutil.rmtree(folder, ignore_errors=True)
    return False


def finished(folder: Path) -> bool:
    return max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()) >= STEPS


def outcome(folder: Path) -> tuple[list[Any], bytes]:
    """The log without times, and the bits of the policy."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not k.startswith("time/") and "wait" not in k} for row in rows]
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: path.name if path.name.isdigit() else "")
    return kept, (newest / "policy.safetensors").read_bytes()


RUNS: dict[str, Callable[[Path], Any]] = {"learners": learned, "shards": sharded, "slot": launched}


def trained(name: str, reference: Any, rng: random.Random, spared: set[int], said: Counter[str]) -> str:
    """A run, struck once or twice; returns the fault."""
    with tempfile.TemporaryDirectory() as folder:
        striker = Striker(rng, spared, rng.randint(1, 2), SPANS_S[name], STARTED_S)
        try:
            RUNS[name](Path(folder) / "run")
        finally:
            said += striker.stop()
        said["runs compared"] += 1
        return "" if outcome(Path(folder) / "run") == reference else f"{name}: other bits than those of the whole run"


def held() -> dict[str, float]:
    """What this process has open, and the PSS of it and of all below it in MB, also without the pages of files.

    Those of libraries are divided by all processes of the machine that have them mapped, and so change with these.
    """
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    tree = [os.getpid(), *[p.pid for p in processes()]]
    pss = [pss_of(pid) for pid in tree]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
        "mappings": maps.count("memfd:penstock"), "shm": sum("penstock" in x for x in os.listdir("/dev/shm")),
        "processes": len(tree), "PSS of files": sum(x["Pss_File"] for x in pss),
        "PSS of this process": pss[0]["Pss"] - pss[0]["Pss_File"],
        "PSS of the tree": sum(x["Pss"] - x["Pss_File"] for x in pss),
    }  # fmt: skip


def pss_of(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(size.split()[0]) / 1e3 for name, size in (line.split(":") for line in lines)}


def marked(mark: str, but: set[int]) -> list[int]:
    """Processes that bear the mark, wherever they are by now, but those."""
    found = list[int]()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and pid not in but:
                found.append(pid)
    return found


class Residents:
    """Samplers that live through all rounds, and are struck now and then."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._due = rng, time.monotonic() + RESIDENTS_EVERY_S
        self.players = [Played(name, settings, []) for name, settings in RESIDENTS.items()]
        self.strikes = 0

    def rest(self) -> tuple[set[int], str]:
        """Their processes once all are there and sleep, and the fault."""
        fault = ""
        if time.monotonic() > self._due:
            self._due += RESIDENTS_EVERY_S
            self._rng.choice(processes()).kill()
            self.strikes += 1
        for each in self.players:
            n, until = 0, time.monotonic() + BACK_S
            while not fault and (n < 3 or not each.whole):
                n, fault = n + 1, each.play()
                if not fault and time.monotonic() > until:
                    fault = f"resident {each.name}: slots stay empty for {BACK_S:.0f} s"
        return {p.pid for p in processes()}, fault


def soak(minutes: float, seed: int) -> tuple[list[dict[str, float]], list[str], Counter[str], int]:
    """What is held after each round, the faults, what was struck and compared, and the strikes at residents."""
    rng, rounds, faults, said = random.Random(seed), list[dict[str, float]](), list[str](), Counter[str]()
    mark = os.environ[MARK] = new_mark()  # the first of every process below
    whole = Played("whole", SERIAL, [])
    batches = [columns_of(whole.sampler.obtain_samples(itr)[0]) for itr in range(BATCHES)]
    whole.sampler.shutdown()
    runs: dict[str, Any] = {}
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder) / "run")
            runs[name] = outcome(Path(folder) / "run")
    residents = Residents(rng)
    spared, _ = residents.rest()
    began, n, kinds, names = time.monotonic(), 0, list(KINDS), list(RUNS)
    while time.monotonic() - began < minutes * 60:
        pair, name = [kinds[2 * n % len(kinds)], kinds[(2 * n + 1) % len(kinds)]], names[n % len(names)]
        found = list[str]()
        for play in (
            functools.partial(sampled, pair, batches, rng, spared, said),
            functools.partial(trained, name, runs[name], rng, spared, said),
        ):
            try:
                found.append(play())
            except Exception:
                found.append(f"{play.args[0]}: {traceback.format_exc()}")
        if still := gone_but(spared):
            found.append(f"{' + '.join(pair)}, {name}: left behind: {[p.cmdline() for p in still]}")
        spared, fault = residents.rest()
        if still := marked(mark, spared):
            found.append(f"processes {still} bear the mark")
        n += 1
        rounds.append(held())
        fresh = [f"round {n}: {fault}" for fault in (*found, fault) if fault]
        faults += fresh
        row = ", ".join(f"{k} {v:.6g}" for k, v in rounds[-1].items())
        print(f"{n:4d} {time.monotonic() - began:5.0f} s: {row}; {dict(said)}", *fresh, sep="\n  ", flush=True)
    for each in residents.players:
        each.sampler.shutdown()
    if still := left(GONE_S):
        faults.append(f"left behind at the end: {[p.cmdline() for p in still]}")
    return rounds, faults, said, residents.strikes


def gone_but(spared: set[int]) -> list[psutil.Process]:
    """Processes that are neither residents' nor end in time; orphans that ended are reaped."""
    until = time.monotonic() + GONE_S
    while (still := processes(spared)) and time.monotonic() < until:
        time.sleep(0.05)
    for orphan in psutil.Process().children():
        if orphan.pid not in spared and orphan.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(orphan.pid, 0)
    return still


def verdict(rounds: list[dict[str, float]]) -> tuple[list[str], bool]:
    """A line for each thing that is held: what it was after the first rounds and at the end; and if all are flat."""
    settled, good = rounds[SETTLING:] or rounds[-1:], True
    lines = ["| | after the first rounds | at the end | least | most | |", "|---|---|---|---|---|---|"]
    for name in rounds[0]:
        values = [row[name] for row in settled]
        first, last = statistics.median(values[:SETTLING]), statistics.median(values[-SETTLING:])
        grown = 0.0 if name == "PSS of files" else last - first
        flat = grown <= GROWTH_MB if "PSS" in name else len(set(values)) == 1
        good = good and flat
        lines.append(f"| {name} | {first:.6g} | {last:.6g} | {min(values):.6g} | {max(values):.6g} | "
                     f"{'flat' if flat else '**grows**'} |")  # fmt: skip
    return lines, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warnings.simplefilter("ignore")
    rounds, faults, said, strikes = soak(args.minutes, args.seed)
    table, flat = verdict(rounds)
    lines = [
        "# Soak\n", f"`python benchmarks/soak.py --minutes {args.minutes:g} --seed {args.seed}`, penstock {VERSION}, "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.\n",
        f"{len(rounds)} rounds; {said['kill']} kills, {said['stop']} processes stopped for good, {said['pause']} for a "
        f"moment, {strikes} kills of residents. {said['columns compared']} columns of batches and {said['runs compared']} "
        f"runs were compared bit by bit. {len(faults)} faults.\n", *[f"- {fault}" for fault in faults],
        f"\nAfter each round, medians of {SETTLING} rounds, PSS in MB:\n", *table,
    ]  # fmt: skip
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    sys.exit(0 if flat and not faults else 1)


if __name__ == "__main__":
    main()
