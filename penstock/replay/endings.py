"""Endings: last observations of episodes in replay, of environments that reset in the step of an end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from penstock.core.batch import Inputs
from penstock.core.memmap import copy_rows
from penstock.core.tree import tree_leaves
from penstock.replay.columns import Array, DeviceMemory, Rows, on_host, ring_slices

_LEAST = 256
NUMBER, ROW, OBS = "final.number", "final.row", "final.obs"
"""Names of its arrays: of the storage's rows and slots, of the ring, and of the ring followed by a path."""


class Endings:
    """A ring of the observations that `SampleBatch.final` has where `resets`; it grows with the ends among kept rows.

    Ends are numbered from the first that was ever written. So a replay takes memory for the ends alone, besides 8 bytes
    a row.

    Args:
        rows, slots: of the storage. obs: shape and dtype of each leaf of an observation, by its path.
        memory: where the observations lie, as tensors; None for arrays of the host.
    """

    def __init__(
        self, rows: int, slots: int, obs: Mapping[str, tuple[tuple[int, ...], Any]], memory: DeviceMemory | None = None
    ) -> None:
        self._rows, self._obs = rows, obs
        self._zeros, self._sent = (np.zeros, lambda x: x) if memory is None else (memory.zeros, memory.send)
        self._number = np.full((rows, slots), -1, np.int64)
        self._head = self._tail = 0
        self._allocate(_LEAST)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays at present."""
        return self._number.nbytes + self._row.nbytes + sum(x.nbytes for x in self._ring.values())

    def write(self, head: int, start: int, resets: Array, final: Any, oldest: int) -> None:
        """Ends of the rows start, start + 1, ... of all slots; those of rows before `oldest` are forgotten.

        Args:
            head: number of the row after the last one written. resets: [T, B] bool. final: tree [T, B, ...].
        """
        for at, _ in ring_slices(head, start - head + len(resets), self._rows):
            self._number[at] = -1
        size = len(self._row)
        kept = np.arange(self._tail, self._head)
        self._tail += int(np.count_nonzero(self._row[kept % size] < oldest))
        t, b = resets.nonzero()
        if (needed := self._head - self._tail + len(t)) > size:
            kept, row, old = np.arange(self._tail, self._head), self._row, self._ring
            self._allocate(max(2 * size, needed))
            before, size = kept % size, len(self._row)
            self._row[kept % size] = row[before]
            for path, x in self._ring.items():
                x[self._sent(kept % size)] = old[path][self._sent(before)]
        number = np.arange(self._head, self._head + len(t))
        self._number[(start + t) % self._rows, b] = number
        self._row[number % size] = start + t
        for x, y in zip(self._ring.values(), tree_leaves(final)):
            x[self._sent(number % size)] = self._sent(y)[self._sent(t), self._sent(b)]
        self._head += len(t)

    def ended(self, t: Rows, b: Rows) -> Array:
        """[*N] bool: the environment has reset within rows t of slots b."""
        return self._number[t % self._rows, b] >= 0

    def put(self, path: str, x: Array, t: Rows, b: Rows) -> Array:
        """A leaf [*N, ...] of what followed rows t of slots b, in place with last observations where there are such."""
        number = self._number[t % self._rows, b]
        where = (number >= 0).nonzero()  # not as bools, for whose number a device would be waited
        x[tuple(map(self._sent, where))] = self._ring[path][self._sent(number[where] % len(self._row))]
        return x

    def unfolded(self, t: Rows, b: Rows, steps: Rows) -> tuple[Rows, Array]:
        """Rows [L + 1, N] from rows t on, with a reset row after each end as in records of other environments.

        Returns:
            The number of the row that stands there, or whose reset row does, and [L + 1, N] bool, it is a reset row.
        """
        ended = self.ended(t + steps, b)
        at = steps + np.cumsum(ended, 0) - ended
        shown = np.zeros((2 * len(steps), ended.shape[1]), np.int64)
        np.put_along_axis(shown, at, 1, 0)
        shown = shown[: len(steps)]
        return t + np.cumsum(shown, 0) - 1, shown == 0

    def state_dict(self) -> dict[str, Any]:
        """All of the state but the arrays."""
        return {"head": self._head, "tail": self._tail}

    def written(self, rows: int) -> Iterator[tuple[str, Array]]:
        """Each array's name and written part, `rows` of those that have as many as the storage."""
        yield NUMBER, self._number[:rows]
        yield ROW, self._row
        for path, x in self._ring.items():
            yield f"{OBS}{path}", on_host(x, np.dtype(self._obs[path][1]))

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Inverse of `state_dict` and `written`."""
        self._head, self._tail = int(state["head"]), int(state["tail"])
        self._number[: len(arrays[NUMBER])] = arrays[NUMBER]
        self._allocate(len(arrays[ROW]))
        self._row[:] = arrays[ROW]
        for path, x in self._ring.items():
            copy_rows(x, arrays[f"{OBS}{path}"], self._sent)

    def _allocate(self, size: int) -> None:
        self._row = np.zeros(size, np.int64)
        self._ring = {path: self._zeros((size, *shape), dtype) for path, (shape, dtype) in self._obs.items()}


def without_resets(inputs: Inputs, where: Array) -> Inputs:
    """The inputs, in place, of observations that open no episode where [*N] bool."""
    if inputs.first is not None:
        inputs.first[where] = False
    return inputs
