"""Per-seat records of turns, and the open turns carried to the next batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.batch import SampleBatch
from penstock.core.tree import tree_leaves


class SeatColumn:
    """One seat of one environment: a column of a policy's batch."""

    __slots__ = ("closed", "cursor", "e", "index", "open", "policy", "seen")

    def __init__(self, policy: int, index: int, e: int) -> None:
        self.policy, self.index, self.e = policy, index, e
        self.cursor = 0
        """The row of its next turn."""
        self.open = False
        """The turn in the row before `cursor` has not closed."""
        self.closed = True
        """No episode goes on here: the next turn is the first of one."""
        self.seen = False
        """Something stands in row 0 of the first batch, or that is past."""


class Player:
    """An agent in the open episode of its environment."""

    __slots__ = ("column", "discounted", "return_", "turns", "weight")

    def __init__(self) -> None:
        self.column: SeatColumn | None = None
        """Where it sits, from its first turn on."""
        self.return_ = self.discounted = 0.0
        self.weight = 1.0
        """Weight of the next reward in `discounted`."""
        self.turns = 0


def idle_rest(
    out: SampleBatch, columns: Sequence[SeatColumn], written: Sequence[Any], nulls: Sequence[Any]
) -> list[tuple[SeatColumn, list[Any]]]:
    """Takes the open turns out of a batch that is whole, and makes the rest of each column idle.

    Row T of a column with an open turn equals the row of that turn: it is row 0 of the next batch.

    Args:
        written: leaves [T, B, ...] that the agent writes. nulls: leaves of the null action.

    Returns:
        columns with an open turn, and the leaves that the agent wrote for it.
    """
    T = out.spec.T
    held: list[tuple[SeatColumn, list[Any]]] = []
    obs, prev_actions, info = tree_leaves(out.obs), tree_leaves(out.prev_action), written[len(nulls) : -1]
    for column in columns:
        b, c, open_ = column.index, column.cursor - column.open, column.open
        if open_:
            held.append((column, [x[c, b].copy() for x in written]))
        if c >= T:
            continue
        for x in obs:
            x[c + 1 :, b] = x[c, b]
        for x in info:  # an open turn's own stays: targets that stop before its row bootstrap there
            x[c + open_ :, b] = 0
        for x, null in zip(prev_actions, nulls):
            x[c + 1 : T, b] = null
            x[T, b] = x[c, b] if open_ else null
        out.prev_reward[T, b] = out.prev_reward[c, b] if open_ else 0.0
        out.first[T, b] = out.first[c, b] and open_
    return held
