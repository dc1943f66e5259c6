"""Duration of 256 draws and changes in a sum tree of a million priorities: penstock's and its peers'.

One cycle finds the leaves of 256 stratified masses (the total included), reads them and sets them anew. The trees take turns,
cycle by cycle, A B C, C B A, in one process and with the same numbers; the table gives medians. Half of the cycles come right
after one another; before each of the others 64 MB are swept through, as a training step would, so that no tree is in a cache.

The process needs all of them, so the script runs in an environment of its own (Tianshou 2.0.1 pins packages that this does
not need, hence --no-deps); peers that are not there are left out:

    python -m venv .venv-tree
    .venv-tree/bin/pip install -c constraints.txt torch==2.13.0 numba torchrl gymnasium h5py "pandas<3" pettingzoo \\
        overrides deepdiff sensai-utils tensorboard tqdm matplotlib optree
    .venv-tree/bin/pip install --no-deps tianshou==2.0.1 -e .
    python benchmarks/replay_tree.py --peer .venv-tree/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.replay.sum_tree import SumTree

RESULTS = Path(__file__).parent / "results"
BATCH, ROWS = 256, 16
PARTS = ("find", "get", "set")
SWEEP_MB = 64
BAR = 0.9


class Penstock:
    """`SumTree`, which gives the leaves that it finds together with their values."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        self.tree = SumTree(len(values))
        self.tree.load(values)
        self.set, self.append = self.tree.set, self.tree.set_range
        self.found, self.value = np.zeros(0, np.int64), np.zeros(0)

    def find(self, share: NDArray[np.float64]) -> NDArray[np.int64]:
        self.found, self.value = self.tree.find(share * self.tree.total)
        return self.found

    def get(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.value if index is self.found else self.tree.get(index)


class Tianshou:
    """Its `SegmentTree`: numpy code that numba compiles."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        from tianshou.data.utils.segtree import SegmentTree

        self.tree = SegmentTree(len(values))
        self.tree[np.arange(len(values))] = values
        self.get, self.set = self.tree.__getitem__, self.tree.__setitem__

    def find(self, share: NDArray[np.float64]) -> Any:
        return self.tree.get_prefix_sum_idx(share * self.tree.reduce())

    def append(self, start: int, values: NDArray[np.float64]) -> None:
        self.tree[np.arange(start, start + len(values))] = values


class TorchRL:
    """Its C++ `SumSegmentTreeFp64`."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        from torchrl._torchrl import SumSegmentTreeFp64

        self.tree = SumSegmentTreeFp64(len(values))
        self.tree[np.arange(len(values))] = values
        self.size = len(values)
        self.get, self.set = self.tree.__getitem__, self.tree.__setitem__

    def find(self, share: NDArray[np.float64]) -> Any:
        return self.tree.scan_lower_bound(share * self.tree.query(0, self.size))

    def append(self, start: int, values: NDArray[np.float64]) -> None:
        self.tree[np.arange(start, start + len(values))] = values


class BinaryNumpy:
    """What one writes first, and what rlpyt does: one heap, a level at a time, differences added on the way up."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        self.depth = math.ceil(math.log2(len(values)))
        self.first = 1 << self.depth
        self.heap = np.zeros(2 * self.first)
        self.set(np.arange(len(values)), values)

    def find(self, share: NDArray[np.float64]) -> NDArray[np.int64]:
        rest, node = share * self.heap[1], np.ones(len(share), np.int64)
        for _ in range(self.depth):
            node = 2 * node
            left = self.heap[node]
            right = rest >= left
            rest = np.where(right, rest - left, rest)
            node = node + right
        return node - self.first

    def get(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.heap[index + self.first]

    def set(self, index: NDArray[np.int64], value: NDArray[np.float64]) -> None:
        index, at = np.unique(index[::-1], return_index=True)  # of equal indices the last wins, as in the others
        node = index + self.first
        change = value[::-1][at] - self.heap[node]
        while len(node) and node[0] > 0:
            np.add.at(self.heap, node, change)
            node = node >> 1

    def append(self, start: int, values: NDArray[np.float64]) -> None:
        self.set(np.arange(start, start + len(values)), values)


TREES: dict[str, type[Any]] = {"penstock": Penstock, "tianshou": Tianshou, "torchrl": TorchRL, "numpy": BinaryNumpy}
Times = dict[str, dict[str, list[float]]]


def cycle(
    tree: Any, share: NDArray[np.float64], value: NDArray[np.float64], start: int, times: dict[str, list[float]]
) -> Any:
    """One draw, read and update, and one append; microseconds are added to `times`. Returns what was drawn."""
    clock, marks = time.perf_counter, [time.perf_counter()]
    index = tree.find(share)
    marks.append(clock())
    tree.get(index)
    marks.append(clock())
    tree.set(index, value)
    marks.append(clock())
    tree.append(start, value[:ROWS])
    marks.append(clock())
    for part, a, b in zip((*PARTS, "append"), marks, marks[1:]):
        times[part].append((b - a) * 1e6)
    times["cycle"].append((marks[3] - marks[0]) * 1e6)
    return index


def measure(leaves: int, cycles: int) -> tuple[Times, Times, dict[str, str]]:
    """Microseconds by tree and part, in a row and after sweeps; and why a tree is missing."""
    rng = np.random.default_rng(0)
    values = rng.random(leaves)
    trees: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name, make in TREES.items():
        try:
            trees[name] = make(values)
        except ImportError as error:
            absent[name] = " ".join(str(error).split(": ")[-2:])[:60]
    swept = np.zeros(SWEEP_MB * 1_000_000 // 8)
    found: list[Times] = []
    for sweep in (False, True):
        times: Times = {name: {part: [] for part in (*PARTS, "append", "cycle")} for name in trees}
        for i in range(cycles):
            share, value = (np.arange(BATCH) + rng.random(BATCH)) / BATCH, rng.random(BATCH)
            start, drawn = int(rng.integers(0, leaves - ROWS)), {}
            for name in list(trees)[:: 1 if i % 2 == 0 else -1]:
                if sweep:
                    swept += 1.0
                drawn[name] = np.asarray(cycle(trees[name], share, value, start, times[name]))
            for name, index in drawn.items():
                wrong = np.count_nonzero(index != drawn["penstock"])
                if wrong > 2:
                    raise RuntimeError(
                        f"cycle {i}: {name} drew {wrong} other leaves than penstock from the same numbers"
                    )
                if wrong:  # where sums round differently; the trees hold the same again afterwards
                    both = np.unique(np.concatenate([index, drawn["penstock"]]))
                    trees[name].set(both, trees["penstock"].get(both))
        found.append(times)
    return found[0], found[1], absent


def table(times: Times) -> list[str]:
    """Medians as Markdown; the ratio is that of each cycle, where both trees had the same neighbours."""
    lines = [
        "| tree | find | get | set | cycle | lowest tenth | append | penstock / it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, parts in times.items():
        shown = [f"{statistics.median(parts[part]):.1f}" for part in (*PARTS, "cycle")]
        low, append = statistics.quantiles(parts["cycle"], n=10)[0], statistics.median(parts["append"])
        last = "" if name == "penstock" else f"{ratio(times, name):.2f}"
        lines.append(f"| {name} | {' | '.join(shown)} | {low:.1f} | {append:.1f} | {last} |")
    return lines


def ratio(times: Times, name: str) -> float:
    """The median over cycles of penstock's time over the other's."""
    return statistics.median(a / b for a, b in zip(times["penstock"]["cycle"], times[name]["cycle"]))


def about(command: str) -> list[str]:
    """Command, date, machine and versions."""
    out = [f"command: {command}", f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
           f"machine: {_cpu()}, {len(os.sched_getaffinity(0))} cores, one thread, {os.getloadavg()[0]:.1f} runnable processes "
           "a minute before the start", f"python: {platform.python_version()}"]  # fmt: skip
    for package in ("numpy", "tianshou", "numba", "torchrl", "torch"):
        try:
            out.append(f"{package}: {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            out.append(f"{package}: absent")
    return [f"- {line}" for line in out]


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(argv: list[str]) -> int:
    """Measures and writes results/replay_tree.md. 1 if a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", help="python of an environment with the peers and penstock; the measurement runs there"
    )
    parser.add_argument("--leaves", type=int, default=1_000_000)
    parser.add_argument("--cycles", type=int, default=2_000)
    parser.add_argument("--command", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    command = args.command or " ".join(
        ["python benchmarks/replay_tree.py", *(".venv-tree/bin/python" if word == args.peer else word for word in argv)]
    )
    if args.peer:
        options = ["--leaves", str(args.leaves), "--cycles", str(args.cycles), "--command", command]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.run([args.peer, __file__, *options], env=environment, timeout=900, check=False).returncode
    header = about(command)
    warm, swept, absent = measure(args.leaves, args.cycles)
    append = statistics.median(warm["penstock"]["append"])
    bars = [(f"append of {ROWS} rows <= 10 us", f"{append:.1f} us", append <= 10.0)]
    if "tianshou" in warm:
        seen = [(where, ratio(times, "tianshou")) for where, times in (("in a row", warm), ("swept", swept))]
        bars = [(f"cycle / tianshou <= {BAR}, {where}", f"{x:.2f}", x <= BAR) for where, x in seen] + bars
    lines = ["# Sum tree", "", *header, *(f"- left out: {name}, {why}" for name, why in absent.items()), "",
             f"Microseconds, {args.leaves:,} leaves, batches of {BATCH}, {args.cycles} cycles of each tree; append: {ROWS} rows.",
             "penstock's find gives the values of what it finds, so nothing is left to get.", "",
             "In a row:", "", *table(warm), "", f"After a sweep of {SWEEP_MB} MB:", "", *table(swept), "",
             "| bar | measured | |", "|---|---|---|",
             *(f"| {text} | {seen} | {'met' if met else '**missed**'} |" for text, seen, met in bars), ""]  # fmt: skip
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "replay_tree.md").write_text("\n".join(lines))
    return 0 if all(met for _, _, met in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
