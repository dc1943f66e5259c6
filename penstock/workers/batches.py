"""SharedMemoryBatches: the buffers of a ProcessPool, and the columns of workers that die while they write them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.batch import ROWS_AND_NEXT, SampleBatch
from penstock.core.tree import Tree, tree_assign, tree_map
from penstock.envs.pools.pool import Ints
from penstock.workers.shares import LogAndTurns, carry_columns, columns, cut, cut_turns, mark_ends


class SharedBatches:
    """Buffers in shared memory, of which one is written at a time, by workers that each own some slots of every part.

    Args:
        batches: of each buffer one for each policy. seats: of each policy. nulls: its null action.
        log_and_turns: of pools of many agents. takes_turns: rows are turns, not steps of all slots.
        episode_table: [E, TABLE_WORDS] of the slots.
    """

    def __init__(
        self,
        batches: Sequence[SampleBatch],
        seats: Sequence[int],
        nulls: Sequence[Tree],
        log_and_turns: LogAndTurns | None,
        takes_turns: bool,
        episode_table: Ints,
    ) -> None:
        P = len(seats)
        self.buffers = [list(batches[k : k + P]) for k in range(0, len(batches), P)]
        self._seats, self._nulls, self._log_and_turns, self._takes_turns = seats, nulls, log_and_turns, takes_turns
        self.current = self.previous = -1
        """Numbers of the buffer that is being written, and of the one before."""
        self.owed: set[int] = set()
        """Parts with incomplete rows in the current batch."""
        self._edge: list[dict[str, Tree]] = []
        self._episode_table, self._left = episode_table, episode_table[:, 1].copy()

    def open(self, outs: Sequence[SampleBatch], parts: int) -> None:
        """Starts batches `outs` with all rows of `parts` parts outstanding."""
        self.previous, self.current = self.current, self.index(outs)
        self.owed = set(range(parts))
        self._left = self._episode_table[:, 1].copy()
        written = self.buffers[self.current] if self.previous == self.current else []
        self._edge = [{x: tree_map(lambda a: a[-1].copy(), getattr(out, x)) for x in ROWS_AND_NEXT} for out in written]

    def index(self, outs: Sequence[SampleBatch]) -> int:
        """Number of a buffer."""
        return next(i for i, batches in enumerate(self.buffers) if batches[0] is outs[0])

    @property
    def rows(self) -> int:
        """T of every buffer."""
        return self.buffers[0][0].spec.T

    def go_on_from(self, buffer: int) -> None:
        """Makes this the buffer that was written last, if not -1."""
        self.current = self.previous = buffer
        self.owed.clear()

    def restore(self, slots: slice) -> None:
        """Puts row T of the batch before back, where a worker that died had begun to write the same buffer."""
        self._episode_table[slots, 1] = self._left[slots]
        for batch, edge, n in zip(self.buffers[self.current], self._edge, self._seats):
            own = columns(slots, n)
            for name, rows in edge.items():
                tree_assign(getattr(batch, name), (-1, own), rows, own)

    def lose(self, part: int, slots: slice, row: int, whole: bool) -> int:
        """Invalidates the rows of a part that a dead worker had not delivered: from `row` on, or after each last turn.

        Args:
            row: of steps of all slots. whole: of turns, where the worker had said that it has no room for another.

        Returns:
            the number of rows lost.
        """
        if part not in self.owed or (self._takes_turns and whole):
            return 0
        lost = self.cut(slots, None if self._takes_turns else row)
        left = self._left[slots]
        self._episode_table[slots, 1] = np.where(left < 0, left, left - self._ended(slots))  # -1: no limit
        return lost

    def _ended(self, slots: slice) -> Ints:
        """[n] int64: number of episodes of each of these slots that end in the current batch."""
        if self._log_and_turns is not None:
            return self._log_and_turns.log.count[slots]
        (batch,) = self.buffers[self.current]
        return np.logical_or(batch.terminated, batch.truncated)[:, slots].sum(0)

    def room(self, slots: slice) -> bool:
        """True if turns of these environments wait for an action."""
        return self._log_and_turns is not None and bool((self._log_and_turns.turns[slots, 0] >= 0).any())

    def cut(self, slots: slice, row: int | None) -> int:
        """Marks the columns of these slots invalid in the current batch, from a row on; None: after the last turn.

        Episodes that ended in those rows are taken out of the log. One of turns that is in it has all of its rows.

        Returns:
            the number of rows lost.
        """
        lost, log_and_turns = 0, self._log_and_turns
        unmarked = [] if log_and_turns is None or row is not None else log_and_turns.log.unmarked(slots)
        for batch, null, n in zip(self.buffers[self.current], self._nulls, self._seats):
            own = columns(slots, n)
            for e in unmarked:
                mark_ends(batch, columns(slice(e, e + 1), n))
            lost += cut_turns(batch, own, null) if row is None else cut(batch, own, row, null)
        if log_and_turns is not None:
            log_and_turns.turns[slots] = -1
            if row is not None:
                log_and_turns.log.cut(slots, row)
        return lost

    def leave_out(self, slots: slice) -> int:
        """Writes the columns of a worker that takes no part: the last row of the batch before, and nothing valid.

        Returns:
            the number of rows lost.
        """
        if self.previous >= 0:
            for before, out, n in zip(self.buffers[self.previous], self.buffers[self.current], self._seats):
                carry_columns(before, out, columns(slots, n))
        return self.cut(slots, 0)
