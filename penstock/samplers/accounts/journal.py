"""The journal: actions of open episodes and digests of their rows, from which a resumed run replays them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree, tree_leaves, tree_structure, tree_unflatten
from penstock.envs.pools.pool import OpenEpisode
from penstock.envs.pools.restoring import thinned

_FIRST_ROWS = 64


class JournalViews:
    """Views of a batch that a journal copies from and digests, made once for each buffer."""

    def __init__(self, batch: SampleBatch) -> None:
        self.opens = batch.first[1:]
        self.structure = tree_structure(batch.prev_action)
        self.actions = [x[1:] for x in tree_leaves(batch.prev_action)]
        seen = [*tree_leaves(batch.obs), batch.prev_reward]
        self.row_0 = [thinned(x[:1]) for x in seen]
        self.rows = [thinned(x[1:]) for x in seen]


class Journal:
    """Copies of the actions of recent batches, back to the opening of the oldest open episode.

    They lie in a ring that grows up to `limit` rows, so a batch costs the same however long an episode is. A slot
    whose episode has more than `limit` actions cannot be replayed, and they are forgotten.
    """

    def __init__(self, B: int, limit: int) -> None:
        self._B, self._limit = B, limit
        self._structure = tree_structure(None)
        self._ring: list[npt.NDArray[Any]] = []  # [R, B, *A]; row n is at n % R
        self._rows = 0  # recorded so far
        self._opened = np.zeros(B, np.int64)  # the row in which each episode opened
        self._known = np.ones(B, bool)
        self._oldest = 0  # the row in which the first of the known episodes opened
        self._unseen = np.zeros(B, np.int64)
        self._digests: list[list[int]] = []  # of each leaf and slot

    def begin(self, views: JournalViews, before: Sequence[Tree | None]) -> None:
        """Takes the actions [L, *A] of each slot's episode from before the first batch, which opens with row 0."""
        self._set(before)
        self._unseen[:] = self._rows - self._opened
        self._digest(views.row_0, [0] * self._B)

    def record(self, views: JournalViews) -> None:
        """Adds the actions of a batch and forgets what no open episode needs."""
        T, start = len(views.opens), self._rows
        self._rows += T
        since: list[int] | None = None
        if b"\1" in views.opens.tobytes():
            opens, last = views.opens.any(0), T - 1 - np.argmax(views.opens[::-1], 0)
            self._opened[opens], self._unseen[opens] = start + 1 + last[opens], 0
            self._known |= opens
            since = np.where(opens, last, -1).tolist()
            self._find_oldest()
        if self._rows - self._oldest > self._limit:
            self._known &= self._rows - self._opened <= self._limit
            self._find_oldest()
        if self._limit:
            self._digest(views.rows, since)
        if not self._ring:
            self._structure, self._ring = views.structure, [np.empty((0, *x.shape[1:]), x.dtype) for x in views.actions]
        self._write(views.actions, min(T, self._rows - self._oldest))

    def episode(self, b: int) -> OpenEpisode | None:
        """The open episode of slot b, or None if its actions are too many to have been kept."""
        if not self._known[b]:
            return None
        rows = np.arange(self._opened[b], self._rows)
        actions = [x[rows % max(len(x), 1), b] for x in self._ring]
        digest = [sums[b] for sums in self._digests]
        return OpenEpisode(tree_unflatten(self._structure, actions), int(self._unseen[b]), digest)

    def state_dict(self) -> list[dict[str, Any]]:
        """For each slot whether its actions are known, and its open episode."""
        found = [self.episode(b) for b in range(self._B)]
        return [{"known": x is not None, **(OpenEpisode(None) if x is None else x)._asdict()} for x in found]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of `state_dict`. An episode stored by 0.1.0 has no digest; it gets one of what follows."""
        self._known = np.array([slot["known"] for slot in state], bool)
        self._set([slot["actions"] for slot in state])
        lengths = self._rows - self._opened
        self._unseen[:] = [slot.get("unseen", n + 1) for slot, n in zip(state, lengths.tolist())]
        digests = [slot.get("digest", ()) for slot in state]
        leaves = max(map(len, digests), default=0)
        self._digests = [list(sums) for sums in zip(*([*x, *[0] * (leaves - len(x))] for x in digests))]

    def _set(self, actions: Sequence[Tree | None]) -> None:
        """Makes these the actions [L, *A] of each slot's open episode."""
        known = [x for x in actions if x is not None]
        lengths = [0 if x is None else len(tree_leaves(x)[0]) for x in actions]
        self._rows, self._ring = max(lengths), []
        self._opened[:] = self._rows - np.array(lengths, np.int64)
        self._find_oldest()
        if known:
            self._structure = tree_structure(known[0])
            self._ring = [np.empty((self._rows, self._B, *x.shape[1:]), x.dtype) for x in tree_leaves(known[0])]
        for b, (mine, n) in enumerate(zip(actions, lengths)):
            for x, y in zip(self._ring, tree_leaves(mine)):
                x[self._rows - n :, b] = y

    def _find_oldest(self) -> None:
        self._oldest = int(self._opened[self._known].min(initial=self._rows))

    def _write(self, actions: Sequence[npt.NDArray[Any]], count: int) -> None:
        """Writes the last `count` rows of a batch, which have been counted already, into the ring."""
        if not count:
            return
        held, needed = len(self._ring[0]), self._rows - self._oldest
        if needed > held:
            size = min(max(needed, 2 * held, _FIRST_ROWS), self._limit)
            kept = np.arange(self._oldest, self._rows - count)
            grown = [np.empty((size, *x.shape[1:]), x.dtype) for x in self._ring]
            for x, y in zip(grown, self._ring):
                x[kept % size] = y[kept % max(held, 1)]
            self._ring, held = grown, size
        at = (self._rows - count) % held
        where = slice(at, at + count) if at + count <= held else np.arange(at, at + count) % held
        for x, y in zip(self._ring, actions):
            x[where] = y[len(y) - count :]

    def _digest(self, views: Sequence[npt.NDArray[Any]], since: Sequence[int] | None) -> None:
        """Adds rows to the digests; those of slots with `since` of 0 or more begin anew, with that row of the views."""
        if not self._digests:
            self._digests = [[0] * self._B for _ in views]
        for sums, view in zip(self._digests, views):
            B, T, _ = view.shape
            data = memoryview(view.tobytes())
            row = len(data) // (B * T)
            for b in range(B):
                first = -1 if since is None else since[b]
                part = data[(b * T + max(first, 0)) * row : (b + 1) * T * row]
                sums[b] = zlib.crc32(part, sums[b] if first < 0 else 0)
