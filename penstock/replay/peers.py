"""Peers: the learners between whom the slots of one replay are shared, as the replay sees them."""

from __future__ import annotations

from typing import Protocol

from penstock.replay.columns import Array


class Peers(Protocol):
    """What is known over the slots of all learners; every one of them calls the same methods in the same order."""

    def fit(self, width: int) -> None:
        """Learns of every learner's number of slots."""
        ...

    @property
    def total(self) -> int:
        """Slots of all."""
        ...

    @property
    def own(self) -> slice:
        """The own slots among all."""
        ...

    def whole(self, x: Array) -> Array:
        """[n, total, ...] of every learner's [n, width, ...]."""
        ...

    def totals(self, *numbers: float) -> list[float]:
        """The sum of each number over all learners."""
        ...
