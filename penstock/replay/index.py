"""The index draws units. A unit is a row, or the start of a sequence, of one slot.

Units are numbered over time like the rows they stand for, and lie in a ring. `extend` adds the next ones, `drop`
forgets the oldest; `draw` and `update` never see a unit that is not there, so nothing is rejected near the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.memmap import copy_rows
from penstock.replay.columns import Array, Rows, ring_slices
from penstock.replay.sum_tree import SumTree


class DrawnUnits(NamedTuple):
    """N units."""

    unit: Rows
    """[N] number of each unit."""
    slot: Rows
    """[N]."""
    probability: npt.NDArray[np.float64] | None
    """[N] with which each was drawn; None if uniform."""


class SampledUnits(NamedTuple):
    """N samples that were chosen and not read yet."""

    unit: Rows
    slot: Rows
    weight: Array | None
    """[N] float32 importance weights, the largest 1; None if every sample is as likely."""
    noise: Array
    """[N, k] uniforms for the view."""


class Index(Protocol):
    """An index: adds units, draws them, and updates their priorities."""

    tail: int
    """Number of the oldest unit."""
    head: int
    """Number of the unit that is added next."""
    bytes: int
    """Bytes of its arrays."""

    def extend(self, usable: Array, priority: Array | None) -> None:
        """Adds the next units [n, B]; where not `usable` they are never drawn. `priority` None: the largest so far."""
        ...

    def drop(self, tail: int) -> None:
        """Forgets the units before number `tail`."""
        ...

    def draw(self, n: int, rng: np.random.Generator) -> DrawnUnits: ...
    def update(self, unit: Rows, slot: Rows, priority: Array) -> None: ...
    def __len__(self) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def arrays(self) -> dict[str, Array]:
        """The rest of the state, by name: views of live memory [units, slots]."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None: ...


class UniformIndex:
    """Every usable unit with the same chance, with replacement."""

    def __init__(self, units: int, slots: int) -> None:
        self._usable = np.zeros((units, slots), bool)
        self._flat = self._usable.reshape(-1)
        self.bytes = self._usable.nbytes
        self.tail = self.head = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, usable: Array, priority: Array | None = None) -> None:
        self.drop(self.head + len(usable) - len(self._usable))
        for at, part in ring_slices(self.head, len(usable), len(self._usable)):
            self._usable[at] = usable[part]
        self.head += len(usable)
        self._count += int(np.count_nonzero(usable))

    def drop(self, tail: int) -> None:
        if tail > self.tail:
            for at, _ in ring_slices(self.tail, min(tail, self.head) - self.tail, len(self._usable)):
                self._count -= int(np.count_nonzero(self._usable[at]))
            self.tail = tail
            self.head = max(self.head, tail)

    def draw(self, n: int, rng: np.random.Generator) -> DrawnUnits:
        check_drawable(self._count, n)
        slots = self._usable.shape[1]
        low, high = self.tail * slots, self.head * slots
        drawn = rng.integers(low, high, n)
        if self._count < high - low:
            # Whatever share of the units is usable, the expected number of rounds is about log(n) over that share.
            wrong = self._refused(drawn)
            while len(wrong):
                drawn[wrong] = again = rng.integers(low, high, len(wrong))
                wrong = wrong[self._refused(again)]
        unit, slot = (drawn, np.zeros_like(drawn)) if slots == 1 else np.divmod(drawn, slots)
        return DrawnUnits(unit, slot, None)

    def _refused(self, drawn: Rows) -> Rows:
        """Which of drawn units, counted over all slots, are not usable."""
        return (~self._flat.take(drawn % len(self._flat))).nonzero()[0]

    def update(self, unit: Rows, slot: Rows, priority: Array) -> None:
        """Does nothing: every unit stays as likely as any."""

    def state_dict(self) -> dict[str, Any]:
        return {"tail": self.tail, "head": self.head}

    def arrays(self) -> dict[str, Array]:
        return {"usable": self._usable}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        copy_rows(self._usable, arrays["usable"])
        self.tail, self.head = int(state["tail"]), int(state["head"])
        self._count = int(np.count_nonzero(self._usable[np.arange(self.tail, self.head) % len(self._usable)]))


class FifoIndex(UniformIndex):
    """Every usable unit once, oldest first."""

    def __init__(self, units: int, slots: int) -> None:
        super().__init__(units, slots)
        self._next = 0

    def draw(self, n: int, rng: np.random.Generator) -> DrawnUnits:
        if self._count < n:
            raise ConfigError(
                f"{n} of {self._count} undrawn samples were asked of a FIFO replay; collect more, or draw fewer"
            )
        slots = self._usable.shape[1]
        low = max(self._next, self.tail * slots)
        found = [
            low + part.start + np.flatnonzero(self._flat[at])
            for at, part in ring_slices(low, self.head * slots - low, len(self._flat))
        ]
        drawn = np.concatenate(found)[:n]
        # A unit that was drawn is usable no more, so it is not counted either, now or when it is forgotten.
        self._flat[drawn % len(self._flat)] = False
        self._count -= n
        self._next = int(drawn[-1]) + 1 if n else low
        return DrawnUnits(drawn // slots, drawn % slots, None)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        super().load_state_dict(state, arrays)
        self._next = int(state["next"])


class PrioritizedIndex:
    """Units by priority^alpha (Schaul et al. 2016, eq. 1), one from each of n equal strata of the total (app. B.2.1).

    Fresh units get the largest priority so far, unless they bring one.
    """

    def __init__(self, units: int, slots: int, alpha: float, epsilon: float = 1e-6) -> None:
        self._tree = SumTree(units * slots)
        self.bytes = self._tree.bytes
        self._units, self._slots, self._alpha, self._epsilon = units, slots, alpha, epsilon
        self.tail = self.head = 0
        self._count = 0
        self._largest = 1.0

    def __len__(self) -> int:
        return self._count

    def extend(self, usable: Array, priority: Array | None = None) -> None:
        n = len(usable)
        self.drop(self.head + n - self._units)
        if priority is None:
            mass = np.where(usable, self._largest, 0.0)
        else:
            scaled = self._scaled(priority)
            mass = np.where(usable, scaled, 0.0)
            self._largest = max(self._largest, float(mass.max(initial=0.0)))
        for at, part in ring_slices(self.head, n, self._units):
            self._tree.set_range(at.start * self._slots, mass[part].ravel())
        self.head += n
        self._count += int(np.count_nonzero(usable))

    def drop(self, tail: int) -> None:
        if tail > self.tail:
            for at, _ in ring_slices(self.tail, min(tail, self.head) - self.tail, self._units):
                start, stop = at.start * self._slots, at.stop * self._slots
                if stop > start:
                    self._count -= int(np.count_nonzero(self._tree.values[start:stop]))
                    self._tree.set_range(start, np.zeros(stop - start))
            self.tail = tail
            self.head = max(self.head, tail)

    def draw(self, n: int, rng: np.random.Generator) -> DrawnUnits:
        check_drawable(self._count, n)
        total = self._tree.total
        mass = (np.arange(n) + rng.random(n)) * (total / n)
        leaf, value = self._tree.find(np.minimum(mass, math.nextafter(total, 0.0)))
        at, slot = np.divmod(leaf, self._slots)
        unit = self.tail + (at - self.tail) % self._units
        return DrawnUnits(unit, slot, value / total)

    def update(self, unit: Rows, slot: Rows, priority: Array) -> None:
        """Sets priorities [N], such as absolute errors; for a unit that was drawn twice the last one counts."""
        if not len(unit):
            return
        scaled = self._scaled(priority)
        largest = scaled.item(scaled.argmax())
        if not (unit.item(unit.argmin()) >= self.tail and unit.item(unit.argmax()) < self.head):
            kept = (unit >= self.tail) & (unit < self.head)
            unit, slot, scaled = unit[kept], slot[kept], scaled[kept]
        self._tree.set((unit % self._units) * self._slots + slot, scaled)
        self._largest = max(self._largest, largest)

    def set_alpha(self, alpha: float) -> None:
        """Has priorities count by another power; those that are kept are raised to it."""
        if alpha != self._alpha:
            power = alpha / self._alpha if self._alpha else 0.0
            kept = self._tree.values
            self._tree.load(np.where(kept > 0.0, kept**power, 0.0))
            self._largest, self._alpha = self._largest**power, alpha

    def state_dict(self) -> dict[str, Any]:
        return {"tail": self.tail, "head": self.head, "largest": self._largest}

    def arrays(self) -> dict[str, Array]:
        return {"mass": self._tree.values.reshape(self._units, self._slots)}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        self._tree.load(arrays["mass"].reshape(-1))
        self.tail, self.head, self._largest = int(state["tail"]), int(state["head"]), float(state["largest"])
        self._count = int(np.count_nonzero(self._tree.values))

    def _scaled(self, priority: Array) -> npt.NDArray[np.float64]:
        """(|priority| + epsilon)^alpha, which is never 0."""
        return (np.abs(priority, dtype=np.float64) + self._epsilon) ** self._alpha


def make_index(kind: Literal["uniform", "prioritized", "fifo"], units: int, slots: int, priority_alpha: float) -> Index:
    """The index of `replay.index`, empty."""
    if kind == "prioritized":
        return PrioritizedIndex(units, slots, priority_alpha)
    return (FifoIndex if kind == "fifo" else UniformIndex)(units, slots)


def check_drawable(count: int, n: int) -> None:
    """Raises ConfigError if there is nothing to draw."""
    if not count:
        raise ConfigError(f"{n} samples were asked of a replay that holds none yet; collect more first")
