"""Fragments: whole batches of what runners have sampled, in which those that are missing keep their columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.batch import AnyBatch, batches_of
from penstock.core.batch_parts import concat_samples
from penstock.core.tree import Tree
from penstock.samplers.acting_agents import ActingAgents, last_row
from penstock.samplers.runners.columns import stand_still


class Fragments:
    """Joins fragments side by side, and remembers where each runner's slots stand.

    Args:
        installed: the agents for the slots of one runner, by which a fragment has its arrays. runners: how many.
    """

    def __init__(self, installed: ActingAgents, runners: int) -> None:
        self._installed, self._runners = installed, runners
        self._rows: dict[int, list[dict[str, Tree]]] = {}  # of each runner the last row, for each policy

    def joined(self, fragments: Mapping[int, Any]) -> Any:
        """A batch with the columns of all runners; those of a runner that is not among these stand still, not valid."""
        parts = [fragments[i] if i in fragments else self._missing(i) for i in range(self._runners)]
        for i, fragment in enumerate(parts):
            self._rows[i] = [last_row(batch) for batch in batches_of(fragment).values()]
        return concat_samples(parts)

    def last_rows(self, i: int) -> dict[str, dict[str, Tree]] | None:
        """The last row of a runner's slots, by policy id; None before its first fragment."""
        rows = self._rows.get(i)
        return None if rows is None else self._installed.by_id(rows)

    def _missing(self, i: int) -> AnyBatch:
        batches = self._installed.allocate()
        rows = self._rows.get(i, [None] * len(batches))
        for batch, row, spec in zip(batches, rows, self._installed.seating.specs):
            stand_still(batch, row, spec.null_action)
        return self._installed.together(batches)
