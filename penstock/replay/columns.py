"""Columns: one array of the record in a ring of rows, or in a ring of frames; and where each row's trajectory ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.memmap import FetchedArray

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
Plan = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of arrays by name."""


class DeviceMemory(Protocol):
    """Memory of a device, in which tensors lie."""

    device: Any

    @property
    def free(self) -> int | None:
        """Bytes that are left; None: it is the host's memory."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A tensor of zeros there. Raises MemoryError if there is no room."""
        ...

    def send(self, x: Any) -> Any:
        """An array of the host, or a tensor, as a tensor there; nothing waits for it."""
        ...

    def joined(self, parts: Sequence[Any]) -> Any:
        """Tensors there, one after the other along their first axis."""
        ...


class Column(Protocol):
    """One leaf of the record over the ring's rows. Rows are numbered from the first that was ever written."""

    history: int
    """Rows before a row that reading it may need."""
    plan: Plan
    """The arrays that it needs, zeroed."""

    def bind(self, arrays: Mapping[str, Array]) -> None:
        """Takes the arrays of its plan; nothing else is called before."""
        ...

    def write(self, start: int, rows: Array, first: Array, valid: Array) -> None:
        """Rows start, start + 1, ... of all slots: [T + 1, B, ...].

        Args:
            first: [T + 1, B], the row opens an episode. valid: [T, B], row i + 1 is the successor of row i.
        """
        ...

    def skip(self, start: int, count: int, row: Array) -> None:
        """Fills the `count` rows before row `start` so that `row` [B, ...] can be written there next."""
        ...

    def goes_on(self, start: int, row: Array, valid: Array) -> bool:
        """True if the last row written, number `start`, equals `row` [B, ...], in full where `valid` [B]."""
        ...

    def read(self, at: Rows) -> Array:
        """[*N, ...] of places [*N], row in the ring times slots plus slot; memory of its own."""
        ...


class RingColumn:
    """A ring of whole rows; float64 is kept as float32 unless `exact`."""

    history = 0
    data: Array

    def __init__(
        self, name: str, rows: int, slots: int, shape: tuple[int, ...], dtype: Any, exact: bool = False
    ) -> None:
        self.plan: Plan = {name: ((rows, slots, *shape), np.dtype(dtype) if exact else stored_dtype(dtype))}
        self._name, self._rows, self._slots = name, rows, slots

    def bind(self, arrays: Mapping[str, Array]) -> None:
        self.data = np.asarray(arrays[self._name])  # the array read is a plain copy, no memmap
        self._flat = self.data.reshape(self._rows * self._slots, *self.data.shape[2:])

    def write(self, start: int, rows: Array, first: Array | None = None, valid: Array | None = None) -> None:
        at = start % self._rows
        if at + len(rows) <= self._rows:
            self.data[at : at + len(rows)] = rows
            return
        for place, part in ring_slices(start, len(rows), self._rows):
            self.data[place] = rows[part]

    def skip(self, start: int, count: int, row: Array) -> None:
        self.write(start - count, np.broadcast_to(row, (count, *self.data.shape[1:])))

    def goes_on(self, start: int, row: Array, valid: Array) -> bool:
        held = self.data[start % self._rows]
        if held.dtype == row.dtype and held.tobytes() == row.tobytes():  # a tenth of the time for a short row
            return True
        return np.array_equal(held, row.astype(held.dtype), equal_nan=held.dtype.kind == "f")

    def read(self, at: Rows) -> Array:
        return self._flat.take(at, 0)


class DeviceColumn:
    """A ring of whole rows, as `RingColumn` keeps them, in a tensor on a device: rows that come and go are tensors."""

    history = 0

    def __init__(
        self, name: str, rows: int, slots: int, shape: tuple[int, ...], dtype: Any, exact: bool = False
    ) -> None:
        self.plan = RingColumn(name, rows, slots, shape, dtype, exact).plan
        self._name, self._rows, self._slots = name, rows, slots

    def bind(self, arrays: Mapping[str, Any]) -> None:
        self.data = arrays[self._name]
        self._flat = self.data.reshape(self._rows * self._slots, *self.data.shape[2:])

    def write(self, start: int, rows: Any, first: Array | None = None, valid: Array | None = None) -> None:
        for place, part in ring_slices(start, len(rows), self._rows):
            self.data[place] = rows[part]

    def skip(self, start: int, count: int, row: Any) -> None:
        self.write(start - count, row.expand(count, *row.shape))

    def goes_on(self, start: int, row: Any, valid: Array) -> bool:
        held = self.data[start % self._rows]
        row = row.to(held.dtype)
        return bool(((held == row) | ((held != held) & (row != row))).all())

    def read(self, at: Any) -> Any:
        """[*N, ...] of places [*N], a tensor on the device."""
        found = self._flat.index_select(0, at.reshape(-1))
        return found if at.ndim == 1 else found.reshape(*at.shape, *found.shape[1:])


class FrameColumn:
    """The newest frame of each stack [C, H, W], or [C, ...] of colours; the C - 1 before it are newest in other rows.

    Where an episode opened less than C rows ago, the stack repeats its first frame or holds zeros, as the wrapper
    does: the first stacks of episodes tell. Every stack of a valid row, and of its successor,
    is compared with what would be rebuilt as it is written; a wrapper that skips or reorders frames is refused.
    """

    data: Array

    def __init__(self, name: str, rows: int, slots: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._stack, *self._frame = shape
        self.history = self._stack - 1
        self.plan: Plan = {
            name: ((rows, slots, *self._frame), np.dtype(dtype)),
            f"{name}.age": ((rows, slots), np.dtype(np.uint8)),
        }
        self._name, self._rows, self._slots = name, rows, slots
        self._back = np.arange(self.history, -1, -1)
        self.zeros: bool | None = None
        """Frames before an episode are zeros; None: not known yet."""

    def bind(self, arrays: Mapping[str, Array]) -> None:
        self.data, self._age = np.asarray(arrays[self._name]), np.asarray(arrays[f"{self._name}.age"])
        self._flat = self.data.reshape(self._rows * self._slots, *self._frame)
        self._flat_age = self._age.reshape(-1)

    def write(self, start: int, rows: Array, first: Array, valid: Array) -> None:
        self._put(start, rows[:, :, -1], self._ages(start, first))
        self._check(start, rows, first, valid)

    def skip(self, start: int, count: int, row: Array) -> None:
        frames = np.broadcast_to(row[:, -1], (count, *self.data.shape[1:])).copy()
        older = min(count, self.history)
        frames[count - older :] = row[:, self.history - older : self.history].swapaxes(0, 1)
        self._put(start - count, frames, np.full((count, self._slots), self.history, np.uint8))

    def goes_on(self, start: int, row: Array, valid: Array) -> bool:
        """Compares only the newest frame of an idle slot: its older frames cannot be rebuilt, and are not used.

        The same holds where an episode has just opened and the padding is not known yet.
        """
        if not np.array_equal(self.data[start % self._rows], row[:, -1]):
            return False
        known = valid if self.zeros is not None else valid & (self._age[start % self._rows] == self.history)
        return np.array_equal(self._row(start)[known], row[known])

    def read(self, at: Rows) -> Array:
        age = self._flat_age.take(at)[..., None]
        frames = at[..., None] - np.minimum(age, self._back) * self._slots
        # One gather for all frames; "wrap" leads rows before the ring's first around to its end.
        out = self._flat.take(frames, 0, mode="wrap")
        if self.zeros:
            out[age < self._back] = 0
        return out

    def _row(self, t: int) -> Array:
        """[B, C, H, W] as rebuilt."""
        return self.read(t % self._rows * self._slots + np.arange(self._slots))

    def _put(self, start: int, frames: Array, ages: Array) -> None:
        for at, part in ring_slices(start, len(frames), self._rows):
            self.data[at] = frames[part]
            self._age[at] = ages[part]

    def _ages(self, start: int, first: Array) -> Array:
        """[n, B] rows since the episode opened, at most C - 1."""
        ages = np.empty(first.shape, np.uint8)
        before = self._age[(start - 1) % self._rows] if start else np.full(first.shape[1], self.history, np.uint8)
        for i, opened in enumerate(first):
            before = np.where(opened, 0, np.minimum(before + 1, self.history)).astype(np.uint8)
            ages[i] = before
        return ages

    def _check(self, start: int, rows: Array, first: Array, valid: Array) -> None:
        """Raises ConfigError unless every stack that will be used is rebuilt to the same bits."""
        nobody = np.zeros((1, self._slots), bool)
        used = np.concatenate([valid, nobody]) | np.concatenate([nobody, valid])
        opening = rows[first & used]
        if len(opening):
            repeated, zeros = bool((opening[:, :-1] == opening[:, -1:]).all()), not opening[:, :-1].any()
            if self.zeros is None and repeated != zeros:
                self.zeros = zeros
            if not (zeros if self.zeros else repeated):
                raise ConfigError(_REFUSED)
        # Whether a stack is rebuilt right follows from the one before it, if that one is and the frames move on by one.
        right = _all(self._row(start) == rows[0])
        for i in range(len(rows)):
            if i:
                moved = _all(rows[i, :, :-1] == rows[i - 1, :, 1:])
                right = first[i] | (valid[i - 1] & right & moved)
            if not right[used[i]].all():
                raise ConfigError(_REFUSED)


def on_host(x: Any, dtype: np.dtype[Any]) -> Any:
    """A tensor of the device as an array of this dtype, fetched slice by slice; an array of the host as it is."""
    if isinstance(x, np.ndarray):
        return x
    return FetchedArray(lambda start, stop: x[start:stop].cpu().numpy(), tuple(x.shape), dtype)


class Trajectories:
    """Rows of one slot in which each is the successor of the one before, numbered within the slot. 16 bytes a row.

    The last row of each is kept by that number in a second ring, which is long enough as every trajectory has a row at
    least; so a batch is appended without touching the rows of an episode that goes on.
    """

    def __init__(self, rows: int, slots: int) -> None:
        names = "stretch", "stretch.last"
        self.plan: Plan = {name: ((rows, slots), np.dtype(np.int64)) for name in names}
        self._rows = rows

    def bind(self, arrays: Mapping[str, Array]) -> None:
        """Takes the arrays of its plan."""
        self._number, self._last = arrays["stretch"], arrays["stretch.last"]

    def write(self, start: int, valid: Array, ended: Array, going_on: Array) -> None:
        """Rows start, start + 1, ... [n, B] of all slots.

        Args:
            ended: [n, B] bool, last row of its episode. going_on: [B] bool, row start - 1 is valid and no end.
        """
        number = self._number[(start - 1) % self._rows]
        for i in range(len(valid)):
            number = number + (valid[i] & ~going_on)
            slots = np.flatnonzero(valid[i])
            self._number[(start + i) % self._rows] = number
            self._last[number[slots] % self._rows, slots] = start + i
            going_on = valid[i] & ~ended[i]

    def last(self, t: Rows, b: Rows) -> Rows:
        """[*N] last row of the trajectories of valid rows t, slots b."""
        return self._last[self._number[t % self._rows, b] % self._rows, b]


def _all(x: Array) -> Array:
    """[B] bool of [B, ...]: all are true."""
    return np.logical_and.reduce(x.reshape(len(x), -1), 1)


_REFUSED = (
    "observations are no stacks [C, H, W] of the frames of single rows, so they cannot be kept frame by frame; "
    "use replay.deduplicate_frames=False"
)


def stored_dtype(dtype: Any) -> np.dtype[Any]:
    """float32 for float64: networks compute in it, and it takes half the memory."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def ring_slices(start: int, count: int, rows: int) -> list[tuple[slice, slice]]:
    """The places of `count` rows from number `start` in a ring: pairs (slice of the ring, slice of the rows)."""
    at = start % rows
    if at + count <= rows:
        return [(slice(at, at + count), slice(0, count))]
    head = rows - at
    return [(slice(at, rows), slice(0, head)), (slice(0, count - head), slice(head, count))]
