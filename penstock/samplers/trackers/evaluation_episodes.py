"""Episodes of an evaluation: the first k of each slot, out of batches that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.envs.pools.pool import EvaluationSource
from penstock.envs.seats import Seating
from penstock.samplers.episodes import Episodes, join_episodes, logged


class EvaluationEpisodes:
    """The first `counts[b]` episodes of each slot b, cut after `max_steps`, out of batches that follow each other.

    Args:
        stats: `EpisodeStats`, or `TensorStats`, of as many slots.
    """

    def __init__(self, counts: list[int], stats: Any, max_steps: int) -> None:
        self._counts, self._stats, self._max_steps = counts, stats, max_steps
        self.found = Episodes()
        self.left = list(counts)
        """Episodes that each slot has yet to play."""

    @property
    def over(self) -> bool:
        """True once every slot has played its episodes, or its open episode was cut and might never end."""
        cut = self._stats.length >= self._max_steps
        return all(stuck or not n for stuck, n in zip(cut.tolist(), self.left))

    def add(self, batches: Sequence[SampleBatch]) -> None:
        """Takes the rows of a batch; writes into its `truncated` where it cuts an episode."""
        (batch,) = batches
        cut = self._stats.cut(batch, self._max_steps)
        ended = self._stats.update(batch)
        self._stats.length[cut[-1]] = self._max_steps  # the episode goes on, and its own end counts no more
        ended = ended.no_longer_than(self._max_steps)
        self.found = join_episodes([self.found, ended]).first_of_each_slot(self._counts)
        self.left = (np.asarray(self._counts) - np.bincount(self.found.slot, minlength=len(self._counts))).tolist()


class LoggedEvaluationEpisodes:
    """The same for environments of many agents; their pool cuts long episodes itself and logs them."""

    def __init__(self, pool: EvaluationSource, counts: list[int], seating: Seating) -> None:
        self._pool, self._counts, self._seating = pool, counts, seating
        self.found = Episodes()
        self.left = list(counts)

    @property
    def over(self) -> bool:
        """Every environment has played its episodes."""
        return not any(self.left)

    def add(self, batches: Sequence[SampleBatch]) -> None:
        """Takes the log of the batches that have just been filled."""
        log = self._pool.log
        assert log is not None
        ended = logged(log, self._seating.agents, self._seating.policies)
        self.found = join_episodes([self.found, ended]).first_of_each_slot(self._counts)
        self.left = (np.asarray(self._counts) - np.bincount(self.found.slot, minlength=len(self._counts))).tolist()
