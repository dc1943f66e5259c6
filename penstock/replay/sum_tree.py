"""The sum tree: finds the leaf at a given share of the total while a million priorities change.

Sums in blocks of eight, one cache line each, lie below a broad top of at most `TOP` sums. The top is accumulated and
searched in one go; below it all masses of a batch descend together, one level at a time: gather the blocks of all, take
their children off the masses one after the other, and enter the child that leaves less than nothing. A sum is added up
from its block in a fixed order, never adjusted by a difference, so all sums are a function of the leaves alone: they
cannot drift, and a tree that is loaded from its leaves draws the same bits.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.memmap import chunks, releaser
from penstock.native import library
from penstock.native.trees import Levels

TOP = 2048
"""Largest size of the top level: searching it costs as much as one more level over an eighth as many sums."""
FAN = 8
_LOG_FAN = 3
# Arrays and dtypes, since numpy spends as long on converting a Python number as on a batch of 256.
_ONE, _SHIFT, _SIGN_BIT = np.array(1), np.array(_LOG_FAN), np.array(63)
_INT64 = np.dtype(np.int64)
_KEPT = 4096
_ROUNDING = 1e-9


class _Workspace:
    """The arrays that `find` and `set` of n leaves work in, and the parts of them that each step takes.

    To make these costs as much as to find the leaves, so those of the last n are kept.
    """

    def __init__(self, n: int) -> None:
        gathered, left = _zeros(n * FAN), _zeros(n * (FAN + 1))
        self.n = n
        self.blocks = gathered.reshape(n, FAN)
        # Row j is the rest of the masses after j children, and the child that takes it below 0 is entered. The rest
        # then is found in the last row, where the next level begins; the level after that begins in row 0 again.
        rests = left.reshape(FAN + 1, n)
        bits = rests.view(np.uint64)
        self.rest = rests[0]
        takes = [(rests[j], self.blocks[:, j], rests[j + 1]) for j in range(FAN - 1)]
        again = [(rests[FAN], *takes[0][1:]), *takes[1:]]
        self.turns = [(takes, bits[:FAN], bits[FAN]), (again, bits[1:], bits[0])]
        self.signs = rests[1:FAN].view(np.int64)
        self.counts = gathered.view(np.int64).reshape(FAN, n)  # the blocks are done with when these are written
        self.first, self.others = self.counts[0], self.counts[1:]
        self.node = np.zeros(n, np.int64)
        pairs, fours, self.sums = left[: 4 * n], left[4 * n : 6 * n], left[6 * n : 7 * n]
        self.adds = [(x[0::2], x[1::2], out) for x, out in ((gathered, pairs), (pairs, fours), (fours, self.sums))]


class SumTree:
    """Non-negative leaves with a fast search by cumulative sum (Schaul et al. 2016, appendix B.2.1).

    `leaves`: how many, all 0 at first; the sums take a seventh of their memory. Not for two threads at a time.
    """

    def __init__(self, leaves: int) -> None:
        if leaves < 1:
            raise ConfigError(f"SumTree(leaves={leaves}): expected 1 or more")
        self._size = leaves
        top, depth = leaves, 0
        while top > TOP:
            top, depth = -(-top // FAN), depth + 1
        top += top % 2  # it is summed up in pairs
        # A block of zeros on either side of each level: nodes are counted from 1, and masses outside come to them.
        padded = [_zeros(FAN + top * FAN**level + FAN) for level in range(depth + 1)]
        levels = [level[FAN:-FAN] for level in padded]
        self.bytes = sum(level.nbytes for level in levels)
        """Bytes of the leaves and all sums."""
        self._counted = padded[-1][FAN - 1 :]
        self._down = [level.reshape(-1, FAN) for level in padded[1:]]
        self._lowest = self._down[-1] if depth else None
        self._up = [(children, children.reshape(-1, FAN), sums) for sums, children in zip(levels, levels[1:])][::-1]
        self._leaves = levels[-1][:leaves]
        self._values = self._leaves.view()
        self._values.flags.writeable = False
        self._before = np.zeros(top + 2)  # [n + 1]: the sum of the top's first n
        self._ends = ends = self._before[1:]
        self._top, self._pairs = levels[0], np.zeros(top // 2)
        self._pair_starts, self._pair_middles, self._pair_ends = ends[:-2:2], ends[1::2], ends[2::2]
        self._stale = False
        self._total = 0.0
        self._space = _Workspace(0)
        self._native = None if library.found is None or not depth else Levels(padded[::-1], self._before)
        # No sum of leaves below this can overflow.
        self._largest = float(np.finfo(np.float64).max) / (2 * leaves)

    def __len__(self) -> int:
        return self._size

    @property
    def total(self) -> float:
        """The sum of all leaves, which bounds `find`'s masses."""
        if self._stale:
            self._accumulate()
        return self._total

    @property
    def values(self) -> NDArray[np.float64]:
        """The leaves, [leaves] float64: a read-only view of live memory; a checkpoint needs nothing else."""
        return self._values

    def load(self, values: NDArray[np.float64]) -> None:
        """Sets all leaves; values: [leaves], from `values` of another tree."""
        if np.shape(values) != (self._size,):
            raise ConfigError(
                f"SumTree.load of shape {np.shape(values)}: expected ({self._size},), as in the tree saved"
            )
        forget = releaser(values)
        for at in chunks(values):  # they may be a mapped file, larger than what memory is free
            self.set_range(at.start, values[at])
            forget()

    def get(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        """The leaves at index, [n] int64 -> [n] float64, a copy."""
        return self._leaves.take(self._known(index))

    def set(self, index: NDArray[np.int64], value: NDArray[np.float64]) -> None:
        """Sets the leaves at index, [n] int64, to value, [n] float64; of equal indices the last wins.

        Nothing is changed if one of them is refused.

        Raises:
            ConfigError: an index outside the tree, or a value that is negative, not finite, or enormous.
        """
        node, value = self._known(index), self._allowed(value)
        if node.shape != value.shape:
            raise ConfigError(f"SumTree.set: {node.shape} indices and {value.shape} values; expected as many")
        self._stale = True
        if self._native is not None:
            self._native.set(node, value)
            return
        self._leaves[node] = value
        space = self._space if self._space.n == len(node) else self._workspace(len(node))
        add = np.add
        for _, blocks, sums in self._up:
            node = np.right_shift(node, _SHIFT, space.node)
            blocks.take(node, 0, space.blocks, "clip")  # mode "raise" would copy the blocks once more
            for left, right, out in space.adds:
                add(left, right, out)
            sums[node] = space.sums

    def set_range(self, start: int, values: NDArray[np.float64]) -> None:
        """Sets the leaves from start on to values, [n] float64. Raises as `set` does."""
        values = self._allowed(values)
        stop = start + len(values)
        if not 0 <= start <= stop <= self._size:
            raise ConfigError(f"SumTree.set_range({start}) of {len(values)} values: expected a part of 0..{self._size}")
        self._leaves[start:stop] = values
        for children, blocks, sums in self._up:
            start, stop = start >> _LOG_FAN, (stop + FAN - 1) >> _LOG_FAN
            if stop - start <= 4:  # of a short range, nearly all levels; numpy would take twice as long
                for node in range(start, stop):
                    a, b, c, d, e, f, g, h = blocks[node].tolist()
                    sums[node] = ((a + b) + (c + d)) + ((e + f) + (g + h))
            else:
                part = children[start * FAN : stop * FAN]
                for _ in range(_LOG_FAN):
                    part = part[0::2] + part[1::2]
                sums[start:stop] = part
        self._stale = True

    def find(self, mass: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Finds the leaf with the interval of the cumulative sum that holds each mass: [n] float64 in [0, total) -> [n]
        int64, and the values of these leaves, [n] float64.

        Never a leaf that is 0. Sorted masses are found faster. A mass that rounding has carried to the total or an ulp
        beyond belongs to the last leaf that is not 0.

        Raises:
            ConfigError: a mass outside [0, total], or a tree whose leaves are all 0.
        """
        mass = np.asarray(mass, np.float64)
        if mass.ndim != 1:
            raise ConfigError(f"SumTree: masses of shape {mass.shape}; expected [n]")
        if self._stale:
            self._accumulate()
        if self._native is not None:
            node, value = self._native.find(mass)
        else:
            node, value = self._find(mass)
        np.subtract(node, _ONE, node)
        if len(mass) and value.item(value.argmin()) == 0.0:
            wrong = value == 0.0
            node[wrong] = self._find_nonzero(mass[wrong])
            value = self._leaves.take(node)
        return node, value

    def _find(self, mass: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The leaves, counted from 1, and their values; 0 for masses outside the tree."""
        space = self._space if self._space.n == len(mass) else self._workspace(len(mass))
        node = self._ends.searchsorted(mass, "right")  # counted from 1
        subtract = np.subtract
        subtract(mass, self._before.take(node), space.rest)
        for blocks, (takes, bits, least) in zip(self._down, cycle(space.turns)):
            blocks.take(node, 0, space.blocks, "clip")
            for rest, child, less in takes:
                subtract(rest, child, less)
            # The child entered is 8 * node less the rests below 0; the shift of a sign is -1 or 0.
            np.right_shift(space.signs, _SIGN_BIT, space.others)
            np.left_shift(node, _SHIFT, space.first)
            np.add.reduce(space.counts, 0, out=node)
            if blocks is not self._lowest:  # the remainder within a leaf is not needed
                # As unsigned integers, negative floats are larger than all others: the least is the last not below 0.
                np.minimum.reduce(bits, 0, out=least)
        return node, self._counted.take(node, None, None, "clip")

    def _find_nonzero(self, mass: NDArray[np.float64]) -> NDArray[np.int64]:
        """`find` for masses outside the tree, and those that rounding carried out of a node to its right: only children
        that are not 0 are entered, the last of them if there is too much left for all.
        """
        rest = self._within(mass)
        node = self._ends.searchsorted(rest, "right") - 1
        rest = rest - self._ends[node]
        for _, blocks, _ in self._up[::-1]:
            rests = np.subtract.accumulate(np.column_stack([rest, blocks[node]]), axis=1)
            enters = rests[:, 1:] < 0.0
            last = FAN - 1 - np.argmax(blocks[node][:, ::-1] > 0.0, axis=1)
            child = np.where(enters.any(axis=1), np.argmax(enters, axis=1), last)
            rest = rests[np.arange(len(rests)), child]
            node = FAN * node + child
        return node

    def __reduce__(self) -> Any:
        return _rebuilt, (self._size, self._leaves.copy())  # in memory of its own

    def _within(self, mass: NDArray[np.float64]) -> NDArray[np.float64]:
        """The masses, all at least +0 and below the total."""
        total = self.total
        if total <= 0.0:
            raise ConfigError("SumTree.find in a tree whose leaves are all 0; set one before drawing")
        if not np.all((mass >= 0.0) & (mass <= total * (1.0 + _ROUNDING))):
            raise ConfigError(f"SumTree.find of {_extremes(mass)}: expected masses in [0, {total})")
        return np.minimum(mass + 0.0, np.nextafter(total, 0.0))

    def _accumulate(self) -> None:
        """Sums up the top, two by two, as each sum must wait for the one before.

        Sums rise all the same: a pair is no less than the first of the two, however it rounds.
        """
        first, second = self._top[0::2], self._top[1::2]
        np.add(first, second, self._pairs)
        np.add.accumulate(self._pairs, 0, None, self._pair_ends)
        np.add(self._pair_starts, first, self._pair_middles)
        self._total = self._before.item(-1)
        self._stale = False

    def _workspace(self, n: int) -> _Workspace:
        space = _Workspace(n)
        if n <= _KEPT:
            self._space = space
        return space

    def _known(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices as int64, all inside the tree."""
        index = np.asarray(index)
        if index.dtype is not _INT64:
            if index.dtype.kind not in "iu" and index.size:
                raise ConfigError(f"SumTree: indices of dtype {index.dtype}; expected int64")
            index = index.astype(np.int64)
        if index.ndim != 1:
            raise ConfigError(f"SumTree: indices of shape {index.shape}; expected [n]")
        if len(index) and not (index.item(index.argmin()) >= 0 and index.item(index.argmax()) < self._size):
            raise ConfigError(f"SumTree: {_extremes(index)} as indices; expected 0..{self._size - 1}")
        return index

    def _allowed(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values as float64, all finite and not negative."""
        value = np.asarray(value, np.float64)
        if value.ndim != 1:
            raise ConfigError(f"SumTree: values of shape {value.shape}; expected [n]")
        if len(value):
            least = value.item(value.argmin())
            if not (least >= 0.0 and value.item(value.argmax()) <= self._largest):
                raise ConfigError(f"SumTree: {_extremes(value)} as values; expected finite, 0..{self._largest:.3g}")
            if least == 0.0:
                value = value + 0.0  # -0.0 becomes +0.0
        return value


def _rebuilt(leaves: int, values: NDArray[np.float64]) -> SumTree:
    tree = SumTree(leaves)
    tree.load(values)
    return tree


def _zeros(n: int) -> NDArray[np.float64]:
    """[n], beginning at a cache line: a block of 8 then never lies across two of them."""
    memory = np.zeros(n + FAN)
    start = -memory.ctypes.data // memory.itemsize % FAN
    return memory[start : start + n]


def _extremes(array: NDArray[np.float64] | NDArray[np.int64]) -> str:
    return f"{array.min()}..{array.max()}"
