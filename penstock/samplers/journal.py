"""The actions of every open episode, kept so that a resumed run can replay environments that cannot save themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree, tree_map


class Journal:
    """Copies of the actions of recent batches, back to the opening of the oldest open episode.

    At most `limit` rows a slot are kept; a slot whose episode is older cannot be replayed.
    """

    def __init__(self, B: int, limit: int) -> None:
        self._limit = limit
        self._chunks: list[Tree] = []  # action trees [T, B, *A], oldest first
        self._lengths: list[int] = []
        self._before: list[Tree | None] = [None] * B  # [L, *A] actions of the episode from before the first chunk
        self._opened = [0] * B  # rows from the start of the first chunk to the episode's opening
        self._known = [True] * B

    def begin(self, b: int, actions: Tree | None) -> None:
        """Sets the actions [L, *A] that slot b took in its current episode before the first batch."""
        self._before[b], self._opened[b], self._known[b] = actions, 0, True

    def record(self, batch: SampleBatch) -> None:
        """Adds the actions of a batch and forgets what no open episode needs."""
        kept = sum(self._lengths)
        self._chunks.append(tree_map(np.copy, batch.action))
        self._lengths.append(len(batch.valid))
        first = batch.first[1:]
        last_opening = len(first) - np.argmax(first[::-1], 0)
        for b in np.nonzero(first.any(0))[0].tolist():
            self._before[b], self._opened[b], self._known[b] = None, kept + int(last_opening[b]), True
        oldest = min(opened for opened, known in zip(self._opened, self._known) if known) if any(self._known) else 0
        while self._lengths and (oldest >= self._lengths[0] or sum(self._lengths) > self._limit):
            length = self._lengths.pop(0)
            self._chunks.pop(0)
            oldest -= length
            for b, opened in enumerate(self._opened):
                self._known[b] = self._known[b] and opened >= length
                self._opened[b] = max(opened - length, 0)

    def actions(self, b: int) -> Tree | None:
        """[L, *A] the actions of slot b since its episode opened, or None if they are too many to have been kept."""
        if not self._known[b]:
            return None
        parts = [] if self._before[b] is None else [self._before[b]]
        skip = self._opened[b]
        for chunk, length in zip(self._chunks, self._lengths):
            if skip < length:
                parts.append(tree_map(lambda x, s=skip: x[s:, b], chunk))
            skip = max(skip - length, 0)
        if not parts and self._chunks:
            parts.append(tree_map(lambda x: x[:0, b], self._chunks[-1]))
        return tree_map(lambda *xs: np.concatenate(xs), *parts) if parts else None

    def state_dict(self) -> list[dict[str, Any]]:
        """For each slot whether its actions are known, and their tree."""
        return [{"known": known, "actions": self.actions(b)} for b, known in enumerate(self._known)]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """The inverse of `state_dict`."""
        self._chunks, self._lengths = [], []
        self._before = [slot["actions"] for slot in state]
        self._opened = [0] * len(state)
        self._known = [bool(slot["known"]) for slot in state]
