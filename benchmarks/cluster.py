"""Cost of runners on Ray: a round, a fragment at the driver, a push of weights; RLlib's runners beside ours; endurance.

    python benchmarks/cluster.py [--only round,rate,rllib,driver,push,faults,memory] [--peer .venv-rllib/bin/python]
        [--minutes 30]

Those that are compared take turns, A B A B, each with one thread; the table has medians, and bars hold for the median of
each turn's ratio or difference. CPU time stands beside wall time: waiting for a busy machine is no part of it. The peer
is a Python that has `ray[rllib]==2.60.0`. Parts that were not asked for keep what `results/cluster.json` has of them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cluster.json"
RLLIB_ENV = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_DEDUP_LOGS": "0",
}  # fmt: skip
"""One thread, the priority of any process, and the loopback interface, as penstock's own clusters have."""
Found = dict[str, list[float]]


class Bar(NamedTuple):
    """A promise: its text, what was measured, and the limit, from above or below."""

    text: str
    measured: float
    limit: float
    below: bool = True

    @property
    def met(self) -> bool:
        """True if what was measured keeps to the limit."""
        return self.measured <= self.limit if self.below else self.measured >= self.limit


@dataclass(frozen=True)
class Part:
    """What is measured by which processes, and what is promised.

    Args:
        jobs: name and settings of each measurement of `cluster_parts.py` or `cluster_endurance.py`; those of the peer
            begin with `rllib`. turns: how often all of them run, one after the other. limit_s: of one of them.
    """

    title: str
    jobs: tuple[tuple[str, dict[str, Any]], ...]
    bars: Callable[[Found], list[Bar]]
    turns: int = 1
    limit_s: float = 300.0


def ratio(found: Found, a: str, b: str) -> float:
    """The median over turns of one's value over the other's."""
    return statistics.median(x / y for x, y in zip(found[a], found[b], strict=True))


def more(found: Found, a: str, b: str) -> float:
    """The median over turns of one's value less the other's."""
    return statistics.median(x - y for x, y in zip(found[a], found[b], strict=True))


def round_bars(found: Found) -> list[Bar]:
    """A round against the same sampler in this process."""
    return [
        Bar(f"{name}: {unit} a round more than serial", more(found, f"{name} {unit}", f"serial {unit}"), 3.0)
        for name in ("ray", "processes")
        for unit in ("ms", "CPU ms")
    ]


def rate_bars(found: Found) -> list[Bar]:
    """The rate against that of the same sampler in this process."""
    return [
        Bar(f"{name}: serial's {unit} over its own", ratio(found, f"serial {unit}", f"{name} {unit}"), 0.9, False)
        for name in ("ray", "processes")
        for unit in ("ms", "CPU ms")
    ]


def rllib_bars(least: float) -> Callable[[Found], list[Bar]]:
    """Rate and cost against RLlib's."""
    return lambda found: [
        Bar("rate over RLlib's", ratio(found, "penstock steps/s", "rllib steps/s"), least, False),
        Bar("RLlib's CPU time of a step over ours", ratio(found, "rllib CPU us", "penstock CPU us"), least, False),
    ]


def ppo_bars(found: Found) -> list[Bar]:
    """The same, and the rate with rounds one ahead, where the learner trains while runners collect."""
    bars = rllib_bars(4.0)(found)
    if "one ahead steps/s" in found:  # not in results from before it was measured
        over = ratio(found, "one ahead steps/s", "rllib steps/s")
        bars.append(Bar("rate one round ahead (depth=1) over RLlib's", over, 4.0, False))
    return bars


def driver_bars(found: Found) -> list[Bar]:
    """The driver's cost of a fragment, and how it grows with runners."""
    out = [Bar(f"{name}: CPU ms a fragment", statistics.median(values), 0.6) for name, values in found.items()]
    few, many = out[0].measured, out[-1].measured
    return [*out, Bar("32 runners over 8", many / few, 1.15)]


def push_bars(found: Found) -> list[Bar]:
    """A push against a put of as many bytes."""
    return [Bar("received over raw put", ratio(found, "received ms", "raw put ms"), 3.0)]


def fault_bars(found: Found) -> list[Bar]:
    """Exact counts, a policy that learned all the same, and nothing that stays."""
    return [
        Bar("kills", found["kills"][0], 20, False),
        Bar("replacements besides kills", abs(found["replacements"][0] - found["kills"][0]), 0),
        Bar("rows lost besides those counted", abs(found["rows lost"][0] - found["rows counted as lost"][0]), 0),
        Bar("steps besides valid rows", abs(found["steps"][0] - found["valid rows"][0]), 0),
        Bar("mean return of 100 episodes, highest", found["highest return"][0], 475.0, False),
        Bar("processes and folders left behind", found["left behind"][0], 0),
    ]


def memory_bars(found: Found) -> list[Bar]:
    """Growth once warm."""
    return [Bar(f"{name} a minute", found[f"{name} a minute"][0], 0.5) for name in ("driver MB", "store MB")]


def driver_jobs(mode: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """A measurement for each number of runners."""
    return tuple(("driver", {"runners": n, "mode": mode, "turns": 5}) for n in (8, 16, 32))


PARTS = {
    "round": Part("a round, CartPole-v1, one runner, T=128, B=16", (("rounds", {"T": 128, "turns": 15}),), round_bars),
    "rate": Part("the same, T=512", (("rounds", {"T": 512, "turns": 15}),), rate_bars),
    "rllib": Part("sampling, CartPole-v1, two runners, T=128, B=16 each",
                  (("sampling", {"seconds": 6.0}), ("rllib sampling", {"seconds": 6.0})), rllib_bars(5.0), 5),
    "rllib-ppo": Part("PPO, CartPole-v1, two runners, T=128, B=16 each",
                      (("training", {"seconds": 8.0, "depth": 0}), ("training", {"seconds": 8.0, "depth": 1}),
                       ("rllib training", {"seconds": 8.0})), ppo_bars, 5),
    "driver": Part("CPU of the driver, CartPole-v1, T=16, B=2 a runner, rounds", driver_jobs("rounds"), driver_bars, 2),
    "driver-ready": Part("the same, ready mode", driver_jobs("ready"), driver_bars, 2),
    "push": Part("50 MB of weights to four runners", (("push", {"turns": 25}),), push_bars),
    "faults": Part("20 random kills -9 of runners in two minutes of PPO, preset of CartPole-v1, four runners",
                   (("faults", {"kills": 20, "seconds": 120.0}),), fault_bars),
    "memory": Part("IMPALA, preset of CartPole-v1, ready mode, two runners",
                   (("memory", {"minutes": 30.0}),), memory_bars, limit_s=3600.0),
}  # fmt: skip
"""`--only rllib` means both that begin so, and `--only driver` too."""


# ---- one measurement, in a process of its own ----


def child(name: str, settings: dict[str, Any]) -> None:
    """Measures and prints one line of JSON."""
    parts = importlib.import_module("cluster_endurance" if name in ("faults", "memory") else "cluster_parts")
    parts.prepare()
    print(json.dumps(parts.PARTS[name](**settings)))


def measure(name: str, settings: dict[str, Any], peer: str, limit_s: float) -> Found:
    """Runs one measurement in a fresh process. Raises RuntimeError with what it printed if it fails."""
    if name.startswith("rllib"):
        options = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        command = [peer, str(HERE / "peers" / "rllib_sample.py"), "--what", name.split()[1], *options]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | RLLIB_ENV
    else:
        command = [sys.executable, __file__, "--child", json.dumps([name, settings])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        raise RuntimeError(f"{' '.join(command)} took more than {limit_s:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}:\n{said[-3000:]}")
    return json.loads(out.splitlines()[-1])


def end(process: subprocess.Popen[str]) -> None:
    """Kills a process and all below it."""
    for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.Error):  # it has just ended
            one.kill()
    process.communicate(timeout=30)


# ---- all of them ----


def run_part(key: str, part: Part, peer: str) -> Found:
    """Everything that the part's processes found, turn by turn."""
    found: Found = {}
    for turn in range(part.turns):
        for name, settings in part.jobs if turn % 2 == 0 else part.jobs[::-1]:
            one = measure(name, {**settings, "seed": turn + 1}, peer, part.limit_s)
            print(f"{key} {turn + 1}, {name}: {_brief(one)}", file=sys.stderr, flush=True)
            for what, values in one.items():
                found.setdefault(what, []).extend(values)
    return found


def report(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = ["# Runners on Ray", "", "`python benchmarks/cluster.py`: what is measured, and how.", "",
             "| bar | measured | limit | |", "|---|---|---|---|"]  # fmt: skip
    for key, part in PARTS.items():
        if key in results:
            lines += [
                f"| {part.title}: {bar.text} | {_shown(bar.measured)} | {'at most' if bar.below else 'at least'} "
                f"{_shown(bar.limit)} | {'met' if bar.met else '**missed**'} |"
                for bar in part.bars(results[key]["found"])
            ]
    for key, part in PARTS.items():
        if key not in results:
            continue
        lines += ["", f"## {part.title}", "", *(f"- {k}: {v}" for k, v in results[key]["about"].items()), "",
                  "| what | median | lowest | highest | n |", "|---|---|---|---|---|"]  # fmt: skip
        for name, values in results[key]["found"].items():
            shown = [_shown(x) for x in (statistics.median(values), min(values), max(values))]
            lines.append(f"| {name} | {' | '.join(shown)} | {len(values)} |")
    return "\n".join([*lines, ""])


def about(command: Sequence[str]) -> dict[str, str]:
    """Command, date, machine and versions."""
    packages = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("ray", "torch", "numpy", "gymnasium")
    )
    return {
        "command": f"python benchmarks/cluster.py {' '.join(command)}",
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, shared with other jobs: "
        f"{os.getloadavg()[0]:.1f} runnable processes a minute before the start",
        "versions": f"Python {platform.python_version()}, {packages}",
    }


def _brief(found: Found) -> str:
    return ", ".join(f"{name} {_shown(statistics.median(values))}" for name, values in found.items())


def _shown(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 or x == int(x) else f"{x:.2f}"


def main(argv: list[str]) -> int:
    """Runs the parts asked for, and writes results/cluster.md and cluster.json. 1 if one of their bars is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"parts by comma, of {', '.join(PARTS)}; all")
    parser.add_argument("--peer", default="", help="python of an environment with ray[rllib]==2.60.0")
    parser.add_argument("--turns", type=int, default=0, help="turns of each part; its own")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the part memory (30)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(*json.loads(args.child))
        return 0
    wanted = [text for text in args.only.split(",") if text]
    keys = [key for key in PARTS if not wanted or key in wanted or key.split("-")[0] in wanted]
    if not keys or (any(key.startswith("rllib") for key in keys) and not args.peer):
        parser.error(
            f"--only {args.only!r} --peer {args.peer!r}: expected some of {', '.join(PARTS)}; rllib needs a peer"
        )
    missed = False
    for key in keys:
        part, header = PARTS[key], about([".venv-rllib/bin/python" if x == args.peer else x for x in argv])
        if key == "memory":
            part = Part(part.title, (("memory", {"minutes": args.minutes}),), part.bars, limit_s=part.limit_s)
        if args.turns:
            part = Part(part.title, part.jobs, part.bars, args.turns, part.limit_s)
        found = run_part(key, part, args.peer)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[key] = {"about": header, "found": found}
        for bar in part.bars(found):
            missed |= not bar.met
            print(f"{key}: {bar.text} {_shown(bar.measured)}, {'met' if bar.met else 'missed'}", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(report(results))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
