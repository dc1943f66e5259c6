"""The actions of every open episode, kept so that a resumed run can replay environments that cannot save themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree, tree_leaves, tree_map


class Journal:
    """Copies of the actions of recent batches, back to the opening of the oldest open episode.

    A slot whose episode has more than `limit` actions cannot be replayed, and they are forgotten.
    """

    def __init__(self, B: int, limit: int) -> None:
        self._limit = limit
        self._chunks: list[tuple[int, Tree]] = []  # number of the first row, and actions [T, B, *A]; oldest first
        self._rows = 0  # recorded so far
        self._opened = np.zeros(B, np.int64)  # the row in which each episode opened; negative before the first batch
        self._known = np.ones(B, bool)
        self._before: list[Tree | None] = [None] * B  # [L, *A] actions of the episode from before row 0
        self._none: Tree = None  # [0, *A]

    def begin(self, b: int, actions: Tree | None) -> None:
        """Sets the actions [L, *A] that slot b took in its current episode before the first batch."""
        self._before[b], self._opened[b] = actions, self._rows - _length(actions)

    def record(self, batch: SampleBatch) -> None:
        """Adds the actions of a batch and forgets what no open episode needs."""
        T = batch.spec.T
        self._chunks.append((self._rows, tree_map(np.copy, batch.action)))
        first = batch.first[1:]
        opens = first.any(0)
        self._opened[opens] = self._rows + (T - np.argmax(first[::-1], 0))[opens]
        self._known |= opens
        self._rows += T
        self._known &= self._rows - self._opened <= self._limit
        for b in np.nonzero(opens | ~self._known)[0].tolist():
            self._before[b] = None
        needed = self._opened[self._known].min(initial=self._rows)
        self._none = tree_map(lambda x: x[:0, 0].copy(), batch.action)
        self._chunks = [(start, chunk) for start, chunk in self._chunks if start + _length(chunk) > needed]

    def actions(self, b: int) -> Tree | None:
        """[L, *A] the actions of slot b since its episode opened, or None if they are too many to have been kept."""
        if not self._known[b]:
            return None
        parts = [self._none if self._before[b] is None else self._before[b]]
        for start, chunk in self._chunks:
            skip = max(int(self._opened[b]) - start, 0)
            parts.append(tree_map(lambda x, s=skip: x[s:, b], chunk))
        return tree_map(lambda *xs: np.concatenate(xs), *parts)

    def state_dict(self) -> list[dict[str, Any]]:
        """For each slot whether its actions are known, and their tree."""
        return [{"known": known, "actions": self.actions(b)} for b, known in enumerate(self._known.tolist())]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """The inverse of `state_dict`."""
        self._chunks, self._rows = [], 0
        self._before = [slot["actions"] for slot in state]
        self._known = np.array([slot["known"] for slot in state], bool)
        self._opened = np.array([-_length(actions) for actions in self._before], np.int64)


def _length(actions: Tree | None) -> int:
    return 0 if actions is None else len(tree_leaves(actions)[0])
