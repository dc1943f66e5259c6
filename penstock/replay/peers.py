"""Peers: the learners between whom the slots of one replay are shared, and the store of one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.mapped import chunks
from penstock.replay.columns import Array, Rows
from penstock.replay.index import Drawing
from penstock.replay.storage import Storage
from penstock.replay.view import View


class Peers(Protocol):
    """Facts about the slots of all learners; every learner calls the same methods in the same order."""

    @property
    def total(self) -> int:
        """Slots of all."""
        ...

    @property
    def own(self) -> slice:
        """The own slots among all."""
        ...

    def fit(self, width: int) -> None:
        """Learns of every learner's number of slots."""
        ...

    def whole(self, x: Array) -> Array:
        """[n, total, ...] of every learner's [n, width, ...]."""
        ...

    def summed(self, x: Array) -> Array:
        """The sum of every learner's x, in float64."""
        ...

    def asked(self, name: str, start: int, stop: int) -> None:
        """Has the others give their part of these rows of an array next; only one learner asks."""
        ...


def share_of(drawing: Drawing, noise: Array | None, peers: Peers, spare: int) -> tuple[Drawing, Array | None, bool]:
    """The drawn units of this learner's slots, by local numbers, with their noise; and True.

    If none were drawn here: a dummy, unit `spare` of the first slot, and False; its loss has weight 0.
    """
    at = _held(drawing, peers)
    held = bool(len(at))
    index = at if held else np.zeros(1, np.int64)
    slot = drawing.slot[index] - peers.own.start if held else np.zeros(1, np.int64)
    unit = drawing.unit[index] if held else np.full(1, spare)
    weight = None if drawing.weight is None else drawing.weight[index]
    own = Drawing(unit, slot, weight, drawing.noise[index])
    return own, None if noise is None else noise[index], held


def priority_of_all(drawing: Drawing, priority: Array, peers: Peers) -> Array:
    """[N] priorities of all drawn units, from those of this learner's units; a dummy unit has none."""
    at, whole = _held(drawing, peers), np.zeros(len(drawing.unit))
    whole[at] = priority[: len(at)]
    return peers.summed(whole).astype(priority.dtype)


def _held(drawing: Drawing, peers: Peers) -> Rows:
    """Which of drawn units are of own slots."""
    return np.flatnonzero((drawing.slot >= peers.own.start) & (drawing.slot < peers.own.stop))


class SharedStore:
    """A `Store` of this learner's slots, with row numbers common to all learners; its state is that of all slots."""

    def __init__(self, storage: Storage, view: View, peers: Peers) -> None:
        self.storage, self.bytes = storage, storage.bytes
        self._view, self._peers = view, peers
        self.set_discount = view.set_discount

    def write(self, batch: SampleBatch, terminated: Array | None) -> int:
        """Like `Storage.write`; a gap that one learner needs is left by all."""
        gap = self.storage.gap(batch, self.storage.goes_on(batch))
        return self.storage.write(batch, terminated, int(self._columns(gap).max()))

    def read(self, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        """Like `View.read`, for this learner's slots by local numbers."""
        return self._view.read(self.storage, t, b, noise)

    def state_dict(self) -> dict[str, Any]:
        """Like `Storage.state_dict`; frames before episodes are merged over learners."""
        known = [max(self._columns({None: 0, False: 1, True: 2}[zeros])) for zeros in self.storage.zeros]
        return {**self.storage.state_dict(), "zeros": [(None, False, True)[code] for code in known]}

    def written(self) -> Iterator[tuple[str, Any]]:
        """Like `Storage.written`, for all slots in one."""
        return ((name, Spread(self._peers, name, x)) for name, x in self.storage.written())

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Like `Storage.load`, for this learner's slots."""
        self.storage.load(
            state, {name: arrays[name][:, self._peers.own] for name in self.storage.arrays.keys() & arrays}
        )

    def give(self, name: str, start: int, stop: int) -> None:
        """Takes part where another learner puts together these rows of an array."""
        self._peers.whole(dict(self.storage.written())[name][start:stop])

    def close(self) -> None:
        """Does nothing: memory goes with the last reference to it."""

    def _columns(self, number: int) -> Array:
        """[total] a number of every learner, for each of its slots."""
        own = self._peers.own
        return self._peers.whole(np.full((1, own.stop - own.start), number, np.int64))[0]


class Spread:
    """An array [rows, total, ...] of which each learner holds its slots: rows are put together when they are read."""

    def __init__(self, peers: Peers, name: str, own: Array) -> None:
        self._peers, self._name, self._own = peers, name, own
        self.shape, self.dtype = (len(own), peers.total, *own.shape[2:]), own.dtype
        self.nbytes = math.prod(self.shape) * own.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        start, stop, _ = rows.indices(len(self))
        self._peers.asked(self._name, start, stop)
        return self._peers.whole(self._own[start:stop])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = np.empty(self.shape, self.dtype)
        for rows in chunks(found) if self.nbytes else ():
            found[rows] = self[rows]
        return found if dtype is None else found.astype(dtype)
