"""Partition: how the slots of one replay are shared between learners; and the store of one learner's slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.memmap import FetchedArray
from penstock.replay.columns import Array, Rows
from penstock.replay.index import SampledUnits
from penstock.replay.storage import Storage
from penstock.replay.view import View


class Partition(Protocol):
    """Facts about the slots of all learners; every learner calls the same methods in the same order."""

    @property
    def total(self) -> int:
        """Slots of all."""
        ...

    @property
    def local_slots(self) -> slice:
        """The own slots among all."""
        ...

    def fit(self, width: int) -> None:
        """Learns of every learner's number of slots."""
        ...

    def gather_array(self, x: Array) -> Array:
        """[n, total, ...] of every learner's [n, width, ...]."""
        ...

    def sum_array(self, x: Array) -> Array:
        """The sum of every learner's x, in float64."""
        ...

    def request_rows(self, name: str, start: int, stop: int) -> None:
        """Has the others give their part of these rows of an array next; only one learner asks."""
        ...


def local_units(
    drawing: SampledUnits, noise: Array | None, partition: Partition, spare: int
) -> tuple[SampledUnits, Array | None, bool]:
    """The drawn units of this learner's slots, by local numbers, with their noise; and True.

    If none were drawn here: a dummy, unit `spare` of the first slot, and False; its loss has weight 0.
    """
    at = _held(drawing, partition)
    held = bool(len(at))
    index = at if held else np.zeros(1, np.int64)
    slot = drawing.slot[index] - partition.local_slots.start if held else np.zeros(1, np.int64)
    unit = drawing.unit[index] if held else np.full(1, spare)
    weight = None if drawing.weight is None else drawing.weight[index]
    own = SampledUnits(unit, slot, weight, drawing.noise[index])
    return own, None if noise is None else noise[index], held


def priority_of_all(drawing: SampledUnits, priority: Array, partition: Partition) -> Array:
    """[N] priorities of all drawn units, from those of this learner's units; a dummy unit has none."""
    at, whole = _held(drawing, partition), np.zeros(len(drawing.unit))
    whole[at] = priority[: len(at)]
    return partition.sum_array(whole).astype(priority.dtype)


def _held(drawing: SampledUnits, partition: Partition) -> Rows:
    """Which of drawn units are of own slots."""
    return np.flatnonzero((drawing.slot >= partition.local_slots.start) & (drawing.slot < partition.local_slots.stop))


class PartitionedStore:
    """A `Store` of this learner's slots, with row numbers common to all learners; its state is that of all slots."""

    def __init__(self, storage: Storage, view: View, partition: Partition) -> None:
        self.storage, self.bytes = storage, storage.bytes
        self._view, self._partition = view, partition

    def write(self, batch: SampleBatch, terminated: Array | None) -> int:
        """Like `Storage.write`; a gap that one learner needs is left by all."""
        gap = self.storage.gap(batch, self.storage.goes_on(batch))
        return self.storage.write(batch, terminated, int(self._columns(gap).max()))

    def read(self, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        """Like `View.read`, for this learner's slots by local numbers."""
        return self._view.read(self.storage, t, b, noise)

    def set_discount(self, discount: float) -> None:
        """Like `View.set_discount`."""
        self._view.set_discount(discount)

    def state_dict(self) -> dict[str, Any]:
        """Like `Storage.state_dict`; frames before episodes are merged over learners."""
        known = [max(self._columns({None: 0, False: 1, True: 2}[zeros])) for zeros in self.storage.zeros]
        return {**self.storage.state_dict(), "zeros": [(None, False, True)[code] for code in known]}

    def written(self) -> Iterator[tuple[str, Any]]:
        """Like `Storage.written`, for all slots in one."""
        for name, x in self.storage.written():
            shape = len(x), self._partition.total, *x.shape[2:]
            yield name, FetchedArray(partial(self._joined, name, x), shape, x.dtype)

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Like `Storage.load`, for this learner's slots."""
        self.storage.load(
            state, {name: arrays[name][:, self._partition.local_slots] for name in self.storage.arrays.keys() & arrays}
        )

    def give(self, name: str, start: int, stop: int) -> None:
        """Takes part where another learner puts together these rows of an array."""
        self._partition.gather_array(dict(self.storage.written())[name][start:stop])

    def close(self) -> None:
        """Does nothing: memory goes with the last reference to it."""

    def _joined(self, name: str, own: Array, start: int, stop: int) -> Array:
        """Rows of an array with the columns of all learners, which give theirs when they are asked."""
        self._partition.request_rows(name, start, stop)
        return self._partition.gather_array(own[start:stop])

    def _columns(self, number: int) -> Array:
        """[total] a number of every learner, for each of its slots."""
        own = self._partition.local_slots
        return self._partition.gather_array(np.full((1, own.stop - own.start), number, np.int64))[0]
