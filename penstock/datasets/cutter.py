"""Whole episodes cut out of successive batches: the rows of each slot are kept until its episode ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree, tree_map
from penstock.datasets.episode import ENV, Episode


class EpisodeCutter:
    """Returns from `add`, called with each batch in order, the episodes that ended in it, in arrays of their own.

    An episode that a fault cut is dropped, and so is one that had begun before the first batch.

    Args:
        B: slots. keys: leaves of the agent's info to keep, such as `logp`; the env info columns are all kept.
        counts: of the first episodes to return, for each slot; None for all.
    """

    def __init__(self, B: int, keys: Sequence[str] = (), counts: Sequence[int] | None = None) -> None:
        self._left = [math.inf] * B if counts is None else list[float](counts)
        self._keys = tuple(keys)
        self._parts: list[list[Tree]] = [[] for _ in range(B)]
        self._whole = [False] * B  # the rows kept begin with the episode's first

    def add(self, batch: SampleBatch) -> list[Episode]:
        """The episodes that ended in the next batch, by row, then by slot."""
        T, B = batch.spec
        found: list[tuple[int, int, Episode]] = []
        ended = np.logical_or(batch.terminated, batch.truncated)
        for b in range(B):
            t = 0
            while t < T:
                if not batch.valid[t, b]:
                    self._parts[b], self._whole[b] = [], False  # of a fault; after an end there are none
                    t += 1
                    continue
                if batch.first[t, b]:
                    self._parts[b], self._whole[b] = [], True
                stops = np.flatnonzero(ended[t:, b] | ~batch.valid[t:, b])
                stop = t + int(stops[0]) if len(stops) else T
                end = stop + 1 if stop < T and batch.valid[stop, b] else stop
                self._parts[b].append(self._rows(batch, t, end, b))
                if end > stop:
                    if self._whole[b] and self._left[b] > 0:
                        self._left[b] -= 1
                        found.append((stop, b, self._episode(batch, stop, b)))
                    self._parts[b], self._whole[b] = [], False
                t = end
        return [episode for _, _, episode in sorted(found, key=lambda x: x[:2])]

    def _rows(self, batch: SampleBatch, t: int, end: int, b: int) -> Tree:
        info = {key: batch.info[key] for key in self._keys}
        info |= {f"{ENV}{key}": column for key, column in batch.info.get("env", {}).items()}
        rows = {"obs": batch.obs, "action": batch.action, "reward": batch.reward, "info": info}
        return tree_map(lambda x: x[t:end, b].copy(), rows)

    def _episode(self, batch: SampleBatch, row: int, b: int) -> Episode:
        whole = tree_map(lambda *xs: np.concatenate(xs), *self._parts[b])
        last, at = (batch.obs, row + 1) if batch.final is None or not batch.resets[row, b] else (batch.final, row)
        obs = tree_map(lambda x, y: np.concatenate([x, y[at : at + 1, b]]), whole["obs"], last)
        terminated, truncated = bool(batch.terminated[row, b]), bool(batch.truncated[row, b])
        return Episode(obs, whole["action"], whole["reward"], terminated, truncated, whole["info"])
