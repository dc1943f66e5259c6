"""ReplayShard: the rows of some slots of a replay, in an actor. A plain class without torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.machine import free_memory
from penstock.core.tree import tree_leaves
from penstock.processes.serialization import unship, versions
from penstock.replay.columns import Array, Rows

PACKAGES = ("numpy",)
"""Packages that need the same version on learner and shards, for equal samples."""
Zeros = Sequence[bool | None]
"""See `Storage.zeros`: over all shards, as one may know it of slots that another has not seen open an episode."""


class ReplayShard:
    """A `Storage` of some slots, which are counted from 0 here, and the view that makes samples of it.

    Args:
        payload: StoragePlan, View and number of slots, by `penstock.processes.serialization.ship`.

    Raises:
        ConfigError: there is no room.
    """

    def __init__(self, payload: bytes) -> None:
        plan, self._view, slots = unship(payload, elsewhere=True)
        self._free = free_memory()
        self._storage = plan.made(slots)

    def describe(self) -> dict[str, Any]:
        """Returns its arrays' shapes and dtypes, its place, and what must be equal on driver and shards."""
        return {
            "arrays": {name: [list(x.shape), x.dtype.str] for name, x in self._storage.arrays.items()},
            "bytes": self._storage.bytes,
            "free": self._free,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": versions(PACKAGES),
        }

    def goes_on(self, batch: SampleBatch, zeros: Zeros) -> bool:
        """Like `Storage.goes_on`; one row of the batch is enough."""
        self._storage.zeros = zeros
        return self._storage.goes_on(batch)

    def write(self, batch: SampleBatch, terminated: Array | None, gap: int) -> list[bool | None]:
        """Like `Storage.write`; returns the known frames before episodes."""
        self._storage.write(batch, terminated, gap)
        return self._storage.zeros

    def read(self, t: Rows, b: Rows, noise: Array, zeros: Zeros) -> list[Array]:
        """Returns the leaves of the view's samples of rows t [N] of slots b [N]."""
        self._storage.zeros = zeros
        return tree_leaves(self._view.read(self._storage, t, b, noise))

    def set_discount(self, discount: float) -> None:
        """Like `View.set_discount`."""
        self._view.set_discount(discount)

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Returns rows of an array, by their places in the ring: [stop - start, slots, ...]."""
        return np.array(self._storage.arrays[name][start:stop])

    def set_rows(self, name: str, start: int, rows: Array) -> None:
        """Sets rows of an array."""
        self._storage.arrays[name][start : start + len(rows)] = rows

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Like `Storage.load_state`."""
        self._storage.load_state(state)
