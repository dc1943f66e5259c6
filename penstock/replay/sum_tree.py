"""Which leaf holds a given share of the total, when a million priorities change all the time?

A binary tree of sums below a broad top. The top, at most `TOP` sums, is accumulated and searched in one go; below it all
masses of a batch descend together, one level at a time. Each sum is recomputed from its two children, never adjusted by a
difference, so all sums are a function of the leaves alone: they cannot drift, and a tree that is loaded from its leaves
draws the same bits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.mapped import releaser, stretches

TOP = 2048
"""Beyond this an accumulation costs more than the level of the tree that it saves: 1024 and 2048 are equal, 4096 is slower."""
# Arrays, since numpy spends as long on converting a Python number as on a batch of 256.
_ONE, _SIGN_BIT = np.array(1), np.array(63)
_ROUNDING = 1e-9


class SumTree:
    """Non-negative leaves with a fast search by cumulative sum (proportional prioritization: Schaul et al. 2016, appendix
    B.2.1). `leaves`: how many, all 0 at first; memory is twice theirs.
    """

    def __init__(self, leaves: int) -> None:
        if leaves < 1:
            raise ConfigError(f"SumTree(leaves={leaves}): expected 1 or more")
        self._size = leaves
        depth = max(0, math.ceil(math.log2(leaves / TOP)))
        top = -(-leaves // (1 << depth))
        # Two unused zeros in front of each level: `find` counts nodes from 1, and a node's left child is then at 2 * node.
        self._padded = [np.zeros(2 + (top << level)) for level in range(depth + 1)]
        sums = [padded[2:] for padded in self._padded]
        self._leaves = sums[-1][:leaves]
        self._values = self._leaves.view()
        self._values.flags.writeable = False
        self._pairs = [(child.reshape(-1, 2), parent) for parent, child in zip(sums, sums[1:])][::-1]
        self._halves = [(child[0::2], child[1::2], parent) for parent, child in zip(sums, sums[1:])][::-1]
        self._top = sums[0]
        self._before = np.zeros(top + 2)  # [n + 1]: the sum of the top's first n
        self._stale = False
        self._total = 0.0
        # No sum of leaves below this can overflow.
        self._largest = float(np.finfo(np.float64).max) / (2 * leaves)
        self._largest_bits = np.float64(self._largest).view(np.uint64)

    def __len__(self) -> int:
        return self._size

    @property
    def total(self) -> float:
        """The sum of all leaves, which bounds `find`'s masses."""
        if self._stale:
            np.add.accumulate(self._top, out=self._before[2:])
            self._total = float(self._before[-1])
            self._stale = False
        return self._total

    @property
    def values(self) -> NDArray[np.float64]:
        """The leaves, [leaves] float64: a read-only view that later changes show through; a checkpoint needs nothing else."""
        return self._values

    def load(self, values: NDArray[np.float64]) -> None:
        """Sets all leaves; values: [leaves], from `values` of another tree."""
        if np.shape(values) != (self._size,):
            raise ConfigError(
                f"SumTree.load of shape {np.shape(values)}: expected ({self._size},), as in the tree saved"
            )
        forget = releaser(values)
        for at in stretches(values):  # they may be a mapped file, larger than what memory is free
            self.set_range(at.start, values[at])
            forget()

    def get(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        """The leaves at index, [n] int64 -> [n] float64, a copy."""
        return self._leaves.take(self._known(index))

    def set(self, index: NDArray[np.int64], value: NDArray[np.float64]) -> None:
        """Sets the leaves at index, [n] int64, to value, [n] float64; of equal indices the last wins. Nothing is changed
        if one of them is refused.

        Raises:
            ConfigError: an index outside the tree, or a value that is negative, not finite, or enormous.
        """
        node, value = self._known(index), self._allowed(value)
        if node.shape != value.shape:
            raise ConfigError(f"SumTree.set: {node.shape} indices and {value.shape} values; expected as many")
        self._leaves[node] = value
        pair = np.empty((len(node), 2))
        left, right, total = pair[:, 0], pair[:, 1], np.empty(len(node))
        for children, parents in self._pairs:
            node = np.right_shift(node, _ONE)
            children.take(node, 0, pair, "clip")  # mode "raise" would copy `pair`
            np.add(left, right, out=total)
            parents[node] = total
        self._stale = True

    def set_range(self, start: int, values: NDArray[np.float64]) -> None:
        """Sets the leaves from start on to values, [n] float64. Raises as `set` does."""
        values = self._allowed(values)
        stop = start + len(values)
        if not 0 <= start <= stop <= self._size:
            raise ConfigError(f"SumTree.set_range({start}) of {len(values)} values: expected a part of 0..{self._size}")
        self._leaves[start:stop] = values
        for left, right, parents in self._halves:
            start, stop = start >> 1, (stop + 1) >> 1
            if stop - start == 1:  # most levels above a short range; slices would take twice as long
                parents[start] = left[start] + right[start]
            else:
                np.add(left[start:stop], right[start:stop], out=parents[start:stop])
        self._stale = True

    def find(self, mass: NDArray[np.float64]) -> NDArray[np.int64]:
        """The leaf whose interval of the cumulative sum holds each mass: [n] float64 in [0, total) -> [n] int64; never a
        leaf that is 0. Sorted masses are found faster. A mass that rounding has carried to the total or an ulp beyond
        belongs to the last leaf that is not 0.

        Raises:
            ConfigError: a mass outside [0, total], or a tree whose leaves are all 0.
        """
        rest = self._within(mass)
        node = self._before[1:].searchsorted(rest, "right")  # counted from 1
        rest = rest - self._before.take(node)
        over, left = np.empty_like(rest), np.empty_like(rest)
        # As unsigned integers, negative floats are larger than all others: the minimum is the remainder if that is not
        # negative, else what there was. The shifted sign is -1 if it was negative and 0 if not.
        rest_bits, over_bits, sign = rest.view(np.uint64), over.view(np.uint64), over.view(np.int64)
        for children in self._padded[1:]:
            np.add(node, node, out=node)
            children.take(node, None, left, "clip")
            np.subtract(rest, left, out=over)
            np.minimum(rest_bits, over_bits, out=rest_bits)
            np.right_shift(sign, _SIGN_BIT, out=sign)
            np.add(node, sign, out=node)
        np.subtract(node, _ONE, out=node)
        found = self._padded[-1][2:].take(node)
        if not np.logical_and.reduce(found):
            node[found == 0.0] = self._find_nonzero(np.asarray(mass)[found == 0.0])
        return node

    def _find_nonzero(self, mass: NDArray[np.float64]) -> NDArray[np.int64]:
        """`find` for masses that rounding carried out of a node to its right: only children that are not 0 are entered."""
        rest = self._within(mass)
        node = self._before[1:].searchsorted(rest, "right") - 1
        rest = rest - self._before[node + 1]
        for children, _ in self._pairs[::-1]:
            left, right = children[node].T
            goes_right = (right > 0.0) & ((rest >= left) | (left == 0.0))
            rest = np.where(goes_right, np.maximum(rest - left, 0.0), rest)
            node = 2 * node + goes_right
        return node

    def _within(self, mass: NDArray[np.float64]) -> NDArray[np.float64]:
        """The masses, all at least +0 and below the total; one comparison of bits if they are as they should be."""
        mass = np.asarray(mass, np.float64)
        if mass.ndim != 1:
            raise ConfigError(f"SumTree: masses of shape {mass.shape}; expected [n]")
        total = self.total
        if len(mass) and total > 0.0 and np.maximum.reduce(mass.view(np.uint64)) < np.float64(total).view(np.uint64):
            return mass
        if total <= 0.0:
            raise ConfigError("SumTree.find in a tree whose leaves are all 0; set one before drawing")
        if not np.all((mass >= 0.0) & (mass <= total * (1.0 + _ROUNDING))):
            raise ConfigError(f"SumTree.find of {_extremes(mass)}: expected masses in [0, {total})")
        return np.minimum(mass + 0.0, np.nextafter(total, 0.0))

    def _known(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices as int64, all inside the tree."""
        index = np.asarray(index)
        if index.dtype != np.int64:
            if index.dtype.kind not in "iu" and index.size:
                raise ConfigError(f"SumTree: indices of dtype {index.dtype}; expected int64")
            index = index.astype(np.int64)
        if index.ndim != 1:
            raise ConfigError(f"SumTree: indices of shape {index.shape}; expected [n]")
        if len(index) and np.maximum.reduce(index.view(np.uint64)) >= self._size:  # as unsigned, -1 is beyond any size
            raise ConfigError(f"SumTree: {_extremes(index)} as indices; expected 0..{self._size - 1}")
        return index

    def _allowed(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values as float64, all finite and not negative."""
        value = np.asarray(value, np.float64)
        if value.ndim != 1:
            raise ConfigError(f"SumTree: values of shape {value.shape}; expected [n]")
        if len(value) and np.maximum.reduce(value.view(np.uint64)) > self._largest_bits:
            if not np.all((value >= 0.0) & (value <= self._largest)):
                raise ConfigError(f"SumTree: {_extremes(value)} as values; expected finite, 0..{self._largest:.3g}")
            value = value + 0.0  # -0.0 becomes +0.0
        return value


def _extremes(array: NDArray[np.float64] | NDArray[np.int64]) -> str:
    return f"{array.min()}..{array.max()}"
