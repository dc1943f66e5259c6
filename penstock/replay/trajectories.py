"""Trajectories: the last stored row of the episode that a stored row belongs to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.replay.columns import Array, Plan, Rows


class Trajectories:
    """Rows of one slot in which each is the successor of the one before, numbered within the slot. 16 bytes a row.

    The last row of each is kept by that number in a second ring, which is long enough as every trajectory has a row at
    least; so a batch is appended without touching the rows of an episode that goes on.
    """

    def __init__(self, rows: int, slots: int) -> None:
        names = "stretch", "stretch.last"  # in checkpoints since 0.1.0
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
