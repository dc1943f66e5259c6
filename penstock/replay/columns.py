"""What one array of the record is kept in: a ring of rows, or a ring of frames from which stacks are rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]
"""(name, shape, dtype) -> zeroed memory."""


class Column(Protocol):
    """One leaf of the record over the ring's rows. Rows are numbered from the first that was ever written."""

    history: int
    """Rows before a row that reading it needs."""

    def write(self, start: int, rows: Array, first: Array, follows: Array) -> None:
        """Rows start, start + 1, ... of all slots: [n, B, ...].

        Args:
            first: [n, B], the row opens an episode. follows: [n - 1, B], row i + 1 is the successor of row i.
        """
        ...

    def read(self, t: Rows, b: Rows) -> Array:
        """[*N, ...] of rows t and slots b, which have one shape [*N]."""
        ...


class RingColumn:
    """Rows as they are; float64 is kept as float32."""

    history = 0

    def __init__(self, name: str, rows: int, slots: int, shape: tuple[int, ...], dtype: Any, allocate: Allocate) -> None:
        self.data = allocate(name, (rows, slots, *shape), stored_dtype(dtype))
        self._rows, self._slots = rows, slots
        self._flat = self.data.reshape(rows * slots, *shape)

    def write(self, start: int, rows: Array, first: Array | None = None, follows: Array | None = None) -> None:
        for at, part in ring_slices(start, len(rows), self._rows):
            self.data[at] = rows[part]

    def read(self, t: Rows, b: Rows) -> Array:
        return self._flat.take(t % self._rows * self._slots + b, 0)


class FrameColumn:
    """The newest frame of each stacked observation [C, H, W]; the C - 1 before it are other rows' newest frames.

    Where an episode opened less than C rows ago, the stack repeats its first frame or holds zeros, whichever the
    wrapper does: that is learned from the first stacks of episodes, and every stack that is written is compared with
    what would be rebuilt (so a wrapper that skips or reorders frames is refused, not stored wrongly).
    """

    def __init__(self, name: str, rows: int, slots: int, shape: tuple[int, ...], dtype: Any, allocate: Allocate) -> None:
        self._stack, *self._frame = shape
        self.history = self._stack - 1
        self.data = allocate(name, (rows, slots, *self._frame), np.dtype(dtype))
        self._age = allocate(f"{name}.age", (rows, slots), np.dtype(np.uint8))
        self._rows, self._slots = rows, slots
        self._flat, self._flat_age = self.data.reshape(rows * slots, *self._frame), self._age.reshape(rows * slots)
        self.zeros: bool | None = None
        """Frames before an episode are zeros; None: not known yet."""

    def write(self, start: int, rows: Array, first: Array, follows: Array) -> None:
        ages = self._ages(start, first)
        self._check(rows, first, follows)
        for at, part in ring_slices(start, len(rows), self._rows):
            self.data[at] = rows[part, :, -1]
            self._age[at] = ages[part]

    def read(self, t: Rows, b: Rows) -> Array:
        newest = t % self._rows * self._slots + b
        age = self._flat_age[newest]
        out = np.empty((*t.shape, self._stack, *self._frame), self.data.dtype)
        ring = len(self._flat)
        for back in range(self._stack):
            steps = np.minimum(age, back)
            frame = self._flat.take((newest - steps.astype(np.int64) * self._slots) % ring, 0)
            if self.zeros:
                frame[age < back] = 0
            out[..., self._stack - 1 - back, :, :] = frame
        return out

    def _ages(self, start: int, first: Array) -> Array:
        """[n, B] rows since the episode opened, at most C - 1; rows before the storage count as another episode's."""
        ages = np.empty(first.shape, np.uint8)
        before = self._age[(start - 1) % self._rows] if start else np.full(first.shape[1], self.history, np.uint8)
        for i, opened in enumerate(first):
            before = np.where(opened, 0, np.minimum(before + 1, self.history)).astype(np.uint8)
            ages[i] = before
        return ages

    def _check(self, rows: Array, first: Array, follows: Array) -> None:
        """Raises ConfigError unless every stack can be rebuilt from single frames."""
        if not self.history:
            return
        if first.any():
            opening = rows[first]
            repeated, zeros = bool((opening[:, :-1] == opening[:, -1:]).all()), not opening[:, :-1].any()
            if self.zeros is None and repeated != zeros:
                self.zeros = zeros
            if not (zeros if self.zeros else repeated):
                raise ConfigError(_REFUSED)
        for i, slots in enumerate(follows & ~first[1:]):
            if not (rows[i + 1, slots, :-1] == rows[i, slots, 1:]).all():
                raise ConfigError(_REFUSED)


_REFUSED = ("observations are no stacks of the frames of single rows, so they cannot be kept frame by frame; "
            "use replay.deduplicate_frames=False")  # fmt: skip


def stored_dtype(dtype: Any) -> np.dtype[Any]:
    """float32 for float64: networks compute in it, and it takes half the memory."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def ring_slices(start: int, count: int, rows: int) -> list[tuple[slice, slice]]:
    """Where `count` rows from number `start` lie in a ring: pairs (slice of the ring, slice of the rows)."""
    at = start % rows
    head = min(count, rows - at)
    parts = [(slice(at, at + head), slice(0, head))]
    if head < count:
        parts.append((slice(0, count - head), slice(head, count)))
    return parts
