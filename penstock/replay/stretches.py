"""How far does the episode of a stored row go on in the storage?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.replay.columns import Array, Plan, Rows


class Stretches:
    """Runs of rows of one slot in which each is the successor of the one before. 16 bytes a row.

    Each is numbered within its slot. Its last row is kept by that number in a second ring, which is long enough as
    every run has a row at least; so a batch is appended without touching the rows of an episode that goes on.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.plan: Plan = {name: ((rows, slots), np.dtype(np.int64)) for name in ("stretch", "stretch.last")}
        self._rows = rows

    def bind(self, arrays: Mapping[str, Array]) -> None:
        """Gives it the arrays of its plan."""
        self._number, self._last = arrays["stretch"], arrays["stretch.last"]

    def write(self, start: int, valid: Array, ended: Array, going_on: Array) -> None:
        """Rows start, start + 1, ... [n, B] of all slots.

        Args:
            ended: [n, B], the row is the last of its episode. going_on: [B], row start - 1 is valid and did not end.
        """
        number = self._number[(start - 1) % self._rows]
        for i in range(len(valid)):
            number = number + (valid[i] & ~going_on)
            slots = np.flatnonzero(valid[i])
            self._number[(start + i) % self._rows] = number
            self._last[number[slots] % self._rows, slots] = start + i
            going_on = valid[i] & ~ended[i]

    def last(self, t: Rows, b: Rows) -> Rows:
        """[*N] last row of the runs of valid rows t, slots b."""
        return self._last[self._number[t % self._rows, b] % self._rows, b]
