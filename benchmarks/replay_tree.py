"""Duration of 256 draws and changes in a sum tree of a million priorities: penstock's and its peers', by turns (turns.py).

One cycle finds the leaves of 256 stratified masses (the total included), reads them and sets them anew; then 16 rows are
appended, which is timed apart. Every tree gets the same numbers. `swept`: before each cycle 64 MB are swept through, as a
training step would, so that no tree is in a cache.

Peers run by a Python of their own, which needs numpy and one or both of them (Tianshou 2.0.1 pins packages that this does
not need, hence --no-deps):

    python -m venv .venv-tree
    .venv-tree/bin/pip install -c constraints.txt torch==2.13.0 numba torchrl gymnasium h5py "pandas<3" pettingzoo \\
        overrides deepdiff sensai-utils tensorboard tqdm matplotlib optree
    .venv-tree/bin/pip install --no-deps tianshou==2.0.1
    python benchmarks/replay_tree.py --tianshou .venv-tree/bin/python --torchrl .venv-tree/bin/python
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import turns
from numpy.typing import NDArray
from turns import Bar, Case, Who

BATCH, ROWS, LEAVES, CYCLES = 256, 16, 1_000_000, 20
PARTS = ("find", "get", "set", "append")
SWEEP_MB = 64
Floats, Indices = NDArray[np.float64], NDArray[np.int64]


class Penstock:
    """`SumTree`, which gives the leaves that it finds together with their values."""

    def __init__(self, values: Floats) -> None:
        from penstock.replay.sum_tree import SumTree

        self.tree = SumTree(len(values))
        self.tree.load(values)
        self.set, self.append = self.tree.set, self.tree.set_range
        self.found, self.value = np.zeros(0, np.int64), np.zeros(0)

    def find(self, share: Floats) -> Indices:
        self.found, self.value = self.tree.find(share * self.tree.total)
        return self.found

    def get(self, index: Indices) -> Floats:
        return self.value if index is self.found else self.tree.get(index)


class Tianshou:
    """Its `SegmentTree`: numpy code that numba compiles."""

    def __init__(self, values: Floats) -> None:
        from tianshou.data.utils.segtree import SegmentTree

        self.tree = SegmentTree(len(values))
        self.tree[np.arange(len(values))] = values
        self.get, self.set = self.tree.__getitem__, self.tree.__setitem__

    def find(self, share: Floats) -> Any:
        return self.tree.get_prefix_sum_idx(share * self.tree.reduce())

    def append(self, start: int, values: Floats) -> None:
        self.tree[np.arange(start, start + len(values))] = values


class TorchRL:
    """Its C++ `SumSegmentTreeFp64`."""

    def __init__(self, values: Floats) -> None:
        from torchrl._torchrl import SumSegmentTreeFp64

        self.tree = SumSegmentTreeFp64(len(values))
        self.tree[np.arange(len(values))] = values
        self.size = len(values)
        self.get, self.set = self.tree.__getitem__, self.tree.__setitem__

    def find(self, share: Floats) -> Any:
        return self.tree.scan_lower_bound(share * self.tree.query(0, self.size))

    def append(self, start: int, values: Floats) -> None:
        self.tree[np.arange(start, start + len(values))] = values


class BinaryNumpy:
    """What one writes first, and what rlpyt does: one heap, a level at a time, differences added on the way up."""

    def __init__(self, values: Floats) -> None:
        self.depth = math.ceil(math.log2(len(values)))
        self.first = 1 << self.depth
        self.heap = np.zeros(2 * self.first)
        self.set(np.arange(len(values)), values)

    def find(self, share: Floats) -> Indices:
        rest, node = share * self.heap[1], np.ones(len(share), np.int64)
        for _ in range(self.depth):
            node = 2 * node
            left = self.heap[node]
            right = rest >= left
            rest = np.where(right, rest - left, rest)
            node = node + right
        return node - self.first

    def get(self, index: Indices) -> Floats:
        return self.heap[index + self.first]

    def set(self, index: Indices, value: Floats) -> None:
        index, at = np.unique(index[::-1], return_index=True)  # of equal indices the last wins, as in the others
        node = index + self.first
        change = value[::-1][at] - self.heap[node]
        while len(node) and node[0] > 0:
            np.add.at(self.heap, node, change)
            node = node >> 1

    def append(self, start: int, values: Floats) -> None:
        self.set(np.arange(start, start + len(values)), values)


TREES: dict[str, type[Any]] = {"penstock": Penstock, "tianshou": Tianshou, "torchrl": TorchRL, "numpy": BinaryNumpy}


@contextmanager
def cycles(tree: str, sweep: bool, seed: int) -> Iterator[turns.Unit]:
    """Cycles of a tree; microseconds of the parts, and the mean leaf of all draws, by which trees can be told to agree."""
    rng = np.random.default_rng(seed)
    made = TREES[tree](rng.random(LEAVES))
    swept = np.zeros(SWEEP_MB * 1_000_000 // 8)
    clock = time.perf_counter

    def unit() -> turns.Look:
        spent, wall, cpu, drawn = list[Any](), 0.0, 0.0, 0.0
        for _ in range(CYCLES):
            share, value = (np.arange(BATCH) + rng.random(BATCH)) / BATCH, rng.random(BATCH)
            start = int(rng.integers(0, LEAVES - ROWS))
            if sweep:
                swept[:] += 1.0
            began, marks = time.process_time(), [clock()]
            index = made.find(share)
            marks.append(clock())
            made.get(index)
            marks.append(clock())
            made.set(index, value)
            marks.append(clock())
            cpu += time.process_time() - began
            made.append(start, value[:ROWS])
            marks.append(clock())
            spent.append(np.diff(marks))
            wall += marks[3] - marks[0]
            drawn += float(np.asarray(index).mean()) / CYCLES
        parts = {f"{part} us": x * 1e6 for part, x in zip(PARTS, np.median(spent, 0).tolist())}
        return {"work": CYCLES, "wall": wall, "cpu": cpu, **parts, "mean leaf": drawn}

    yield unit


def agreement(found: turns.Found) -> list[str]:
    """Raises RuntimeError if a tree draws other leaves from the same numbers; where sums round differently one may be next."""
    apart = {
        name: max(abs(x["mean leaf"] - y["mean leaf"]) for x, y in zip(rows, found["penstock"]))
        for name, rows in found.items()
    }
    wrong = {name: x for name, x in apart.items() if x > 1.0}
    if wrong:
        raise RuntimeError(
            f"from the same numbers other leaves than penstock's were drawn, by {wrong} on average; expected 0"
        )
    return []


def case(title: str, sweep: bool) -> Case:
    """One unit a look, so that all trees have had the same numbers."""
    who = {
        name: Who(
            "cycles",
            {"tree": name, "sweep": sweep},
            *(("replay_tree.py", name) if name in ("tianshou", "torchrl") else ()),
        )
        for name in TREES
    }
    bars = Bar("penstock", 0.9, ("tianshou",), below=True), Bar("penstock", 10.0, below=True, of="append us")
    return Case(
        f"cycles, {LEAVES:,} leaves, {title}", "us", who, bars[: 2 - sweep], seconds=0.0, rounds=51, notes=agreement
    )


CASES = {"row": case("one after another", False), "swept": case("swept", True)}

if __name__ == "__main__":
    turns.main(__doc__, CASES, {"cycles": cycles}, {"tianshou": "tianshou", "torchrl": "torchrl"})
