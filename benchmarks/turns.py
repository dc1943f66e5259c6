"""Benchmarks by turns: every contestant, penstock's too, is a process of its own that sleeps until it is asked for a look.

A contestant prints a line of JSON with its versions as soon as it is ready. Then it answers each line of its standard input,
a number of seconds, with a line of JSON, a look: `{"work": ..., "wall": s, "cpu": s, ...}`. It repeats its unit of work until
that many seconds are over (0: once). `child` is that side; `main` is the other one, which asks all contestants of a case in
turn, A B C, C B A, ..., prints a table and judges the bars. Nobody else runs meanwhile: the driver waits for the answer.

Looks are short, so that the best ones are free of whatever else the machine does; a table has medians and best ones. "cpu" is
processor time of the contestant and of all processes below it. It decides where a contestant is one process; where processes
wait for each other by looking at counters, wall time does.

Only the standard library is imported: peers serve in environments of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Look = dict[str, float]
Found = dict[str, list[Look]]
Unit = Callable[[], "float | Look"]
"""Does some work and returns how much; or a look, which may say its own "wall" and "cpu"."""
Makers = Mapping[str, Callable[..., AbstractContextManager[Unit]]]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {
    # XLA takes as many threads as it sees cores
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
}


# ---- the side of a contestant ----


def cpu_s() -> float:
    """Processor seconds so far of this process, of those below it, and of those below it that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_cpu_s_of, _children(os.getpid())))


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(x) for task in Path(f"/proc/{pid}/task").iterdir() for x in (task / "children").read_text().split()]
    return []


def _cpu_s_of(pid: int) -> float:
    spent = 0
    with contextlib.suppress(OSError):  # it has just ended
        spent = sum(int((x / "schedstat").read_text().split()[0]) for x in Path(f"/proc/{pid}/task").iterdir())
    return spent / 1e9 + sum(map(_cpu_s_of, _children(pid)))


def look(unit: Unit, seconds: float) -> Look:
    """Repeats the unit for so many seconds of wall time, once at least."""
    work, more = 0.0, Look()
    cpu, started = cpu_s(), time.perf_counter()
    while True:
        done = unit()
        more = done if isinstance(done, dict) else {}
        work += more.get("work", 1.0) if isinstance(done, dict) else done
        wall = time.perf_counter() - started
        if wall >= seconds:
            return {"wall": wall, "cpu": cpu_s() - cpu, **more, "work": work}


def child(makers: Makers, *packages: str) -> None:
    """Serves as the contestant that the command line names, `--child '["sampling", {"B": 16}]'`, until the input ends."""
    name, settings = json.loads(sys.argv[sys.argv.index("--child") + 1])
    with makers[name](**settings) as unit:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print from now on is no answer
        print(json.dumps(versions(packages)), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(look(unit, float(line))), file=out, flush=True)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found: dict[str, str] = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# ---- the side of the driver ----


class Contestant:
    """A process that answers with looks."""

    def __init__(self, command: Sequence[str], limit_s: float = 900.0) -> None:
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        self._limit_s, self._said = limit_s, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        )  # fmt: skip
        self.versions: dict[str, str] = self._answer()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)

    def look(self, seconds: float) -> Look:
        """A look of so many seconds, or of one unit of work if that takes longer."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(self._limit_s, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    return json.loads(line)
        finally:
            timer.cancel()
        code = self._process.wait(60)
        self._said.seek(0)
        raise RuntimeError(f"{self._process.args} ended with {code}; it said:\n{self._said.read()[-3000:]}")


@dataclass(frozen=True)
class Who:
    """A contestant: a maker of this benchmark, or of a script in `peers` that runs by the Python of an option."""

    maker: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    script: str = ""
    python: str = ""
    """Name of the option; empty: this interpreter. A contestant whose option is not given is left out."""


@dataclass(frozen=True)
class Bar:
    """A promise: the value of `name` over that of the best of `than`, or itself, is at least `limit`, or at most if `below`."""

    name: str
    limit: float
    than: tuple[str, ...] = ()
    below: bool = False
    of: str = ""
    """Which number of a look is compared; empty: the case's rate or duration."""
    worst: bool = False
    """The worst look counts."""

    def text(self) -> str:
        """The promise in words."""
        than = f" x {'the best of ' * (len(self.than) > 1)}{', '.join(self.than)}" if self.than else ""
        return f"{self.name}{self.of and f', {self.of},'} {'<=' if self.below else '>='} {self.limit:,g}{than}"


@dataclass(frozen=True)
class Case:
    """What is compared, in which unit, and what is promised.

    Args:
        unit: "s", "ms" or "us", a duration of a unit of work, or a rate. clock: which time decides, "cpu" or "wall".
        seconds: of a look; 0 is one unit of work. fresh: 0: contestants stay alive, and each gives a look a round, after one
            that warms it up; else every round starts each of them anew for that many looks.
        one_core: all are bound to one core, the same.
        notes: lines about what was found.
    """

    title: str
    unit: str
    contestants: dict[str, Who]
    bars: tuple[Bar, ...] = ()
    clock: str = "cpu"
    seconds: float = 0.25
    rounds: int = 21
    fresh: int = 0
    one_core: bool = True
    notes: Callable[[Found], list[str]] = lambda found: []

    def value(self, one: Look, clock: str, of: str = "") -> float:
        """Of one look: a rate, a duration, or the number `of`."""
        if of:
            return one[of]
        cost = one[clock] / max(one["work"], 1e-12)
        return cost * {"s": 1.0, "ms": 1e3, "us": 1e6}[self.unit] if self.lower else 1.0 / max(cost, 1e-12)

    @property
    def lower(self) -> bool:
        """True if less is better."""
        return self.unit in ("s", "ms", "us")

    def best(self, values: Sequence[float]) -> float:
        """The best of a number of values."""
        return min(values) if self.lower else max(values)

    def ratios(self, found: Found, a: str, b: str, clock: str, of: str = "") -> tuple[float, float]:
        """Value of a over that of b: the median of the rounds' ratios, and the ratio of the best looks."""
        ours, theirs = ([self.value(x, clock, of) for x in found[name]] for name in (a, b))
        return statistics.median(x / y for x, y in zip(ours, theirs)), self.best(ours) / self.best(theirs)

    def judged(self, bar: Bar, found: Found) -> tuple[str, str, str] | None:
        """The bar, what came of it, and the verdict; None if what it speaks of was not measured."""
        others = [name for name in bar.than if name in found]
        if bar.name not in found or (bar.than and not others):
            return None
        if others:
            pairs = [self.ratios(found, bar.name, other, self.clock, bar.of) for other in others]
            numbers = [(max if bar.below else min)(column) for column in zip(*pairs)]
        else:
            values = [self.value(one, self.clock, bar.of) for one in found[bar.name]]
            numbers = [(max if bar.below else min)(values)] if bar.worst else [statistics.median(values)]
        kept = [x <= bar.limit if bar.below else x >= bar.limit for x in numbers]
        verdict = "met" if all(kept) else "**unclear**" if any(kept) else "**missed**"
        return bar.text(), " and ".join(map(shown, numbers)), verdict


def by_turns(case: Case, commands: Mapping[str, Sequence[str]]) -> tuple[Found, dict[str, dict[str, str]]]:
    """All looks by contestant, and the versions that each told."""
    found: Found = {name: [] for name in commands}
    told: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        alive: dict[str, Contestant] = {}
        if not case.fresh:
            for name, command in commands.items():
                alive[name] = stack.enter_context(Contestant(command))
                alive[name].look(case.seconds)
                told[name] = alive[name].versions
        for i in range(case.rounds):
            for name in list(commands)[:: 1 if i % 2 == 0 else -1]:
                if not case.fresh:
                    found[name].append(alive[name].look(case.seconds))
                    continue
                seeded = [word.replace('"seed": 1', f'"seed": {i + 1}') for word in commands[name]]
                with Contestant(seeded) as contestant:
                    told[name] = contestant.versions
                    found[name] += [contestant.look(case.seconds) for _ in range(case.fresh)]
                print(f"{case.title}, round {i + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found, told


def report(case: Case, found: Found, told: Mapping[str, Mapping[str, str]]) -> str:
    """Table, bars and notes as Markdown. `first / it` is of the values in the case's clock."""
    lines = [f"| {case.unit} | wall, median | wall, best | CPU, median | CPU, best | looks | first / it | of best looks |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    first = next(iter(found))
    for name, looks in found.items():
        cells: list[str] = []
        for clock in ("wall", "cpu"):
            values = [case.value(one, clock) for one in looks]
            cells += [shown(statistics.median(values)), shown(case.best(values))]
        ratios = map(shown, case.ratios(found, first, name, case.clock)) if name != first else ("", "")
        lines.append(f"| {name} | {' | '.join(cells)} | {len(looks)} | {' | '.join(ratios)} |")
    judged = [x for bar in case.bars if (x := case.judged(bar, found)) is not None]
    if judged:
        lines += ["", f"| bar, by {case.clock} time | median, and best looks | |", "|---|---|---|"]
        lines += [f"| {' | '.join(x)} |" for x in judged]
    notes = [f"{name}: {', '.join(' '.join(x) for x in found_.items())}" for name, found_ in told.items() if found_]
    for name, looks in found.items():
        more = [key for key in looks[0] if key not in ("work", "wall", "cpu")]
        notes += [f"{name}: {key} {shown(statistics.median(one[key] for one in looks))}" for key in more]
    return "\n".join([*lines, "", *(f"- {note}" for note in [*case.notes(found), *notes])])


def shown(x: float) -> str:
    """With two digits after the point, or none from 1000 on."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.2f}"


def about(command: str) -> list[str]:
    """Command, date, machine and versions."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    models = re.findall(r"^(?:model name|cpu family)\s*:\s*(.*)$", text, re.MULTILINE) or [platform.machine()]
    found = {"python": platform.python_version(), **versions(("penstock", "torch", "numpy", "gymnasium"))}
    return [
        f"- `{command}`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"- {' '.join(dict.fromkeys(reversed(models[:2])))}, {os.cpu_count()} cores, one thread, "
        f"{os.getloadavg()[0]:.1f} runnable processes a minute before the start",
        f"- {', '.join(' '.join(x) for x in found.items())}",
    ]


def write(path: Path, title: str, text: str) -> None:
    """Puts a section into the file, in place of an older one."""
    found = path.read_text() if path.exists() else f"# {path.stem}\n"
    older = re.compile(rf"\n## {re.escape(title)}\n.*?(?=\n## |\Z)", re.DOTALL)
    path.write_text(f"{older.sub('', found).rstrip()}\n\n## {title}\n\n{text.rstrip()}\n")


def main(doc: str | None, cases: Mapping[str, Case], makers: Makers, peers: Mapping[str, str]) -> None:
    """Measures the cases asked for, or serves as a contestant. Exits with 1 unless every bar that was measured is met.

    Args:
        peers: by the option that takes a Python: the packages that it has to have.
    """
    if "--child" in sys.argv:
        child(makers)
        return
    script = Path(sys.argv[0])
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, packages in peers.items():
        parser.add_argument(f"--{option}", help=f"python of an environment with {packages}; without it, no such rows")
    parser.add_argument("--only", default="", help=f"cases by comma, by how they begin, of {', '.join(cases)}")
    parser.add_argument("--rounds", type=int, help="of each case; its own")
    parser.add_argument("--seconds", type=float, help="of a look; the case's own")
    parser.add_argument("--core", type=int, help="the core that contestants of one process are bound to; the last")
    parser.add_argument("--write", action="store_true", help="put the sections into the results")
    parser.add_argument("--to", type=Path, default=HERE / "results" / f"{script.stem}.md")
    args = parser.parse_args()
    wanted = tuple(args.only.split(","))
    picked = [case for name, case in cases.items() if name.startswith(wanted)]
    if not picked or (args.rounds is not None and args.rounds < 1):
        parser.error(f"--only {args.only!r} --rounds {args.rounds}: expected some of {', '.join(cases)}, and 1 or more")
    given: dict[str, str | None] = {"": sys.executable} | {option: getattr(args, option) for option in peers}
    words = ["PYTHON" if word in given.values() else word for word in sys.argv[1:]]
    header = about(" ".join(["python", f"benchmarks/{script.name}", *words]))
    cores, good = os.sched_getaffinity(0), True
    for case in picked:
        case = replace(
            case, rounds=args.rounds or case.rounds, seconds=case.seconds if args.seconds is None else args.seconds
        )
        commands: dict[str, list[str]] = {}
        for name, who in case.contestants.items():
            if (python := given[who.python]) is not None:
                spec = json.dumps([who.maker, {**who.settings, "seed": 1}])
                commands[name] = [python, str(HERE / who.script if who.script else script), "--child", spec]
        os.sched_setaffinity(0, {args.core if args.core is not None else max(cores)} if case.one_core else cores)
        found, told = by_turns(case, commands)
        text = report(case, found, told)
        print(f"## {case.title}\n\n{text}\n", flush=True)
        good &= "**" not in text
        if args.write:
            write(args.to, case.title, "\n".join([*header, "", text]))
    sys.exit(0 if good else 1)
