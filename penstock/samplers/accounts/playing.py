"""Episodes of an evaluation: the first k of each slot, out of batches that follow each other."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.envs.pools.pool import EnvPool
from penstock.envs.seats import Seating
from penstock.samplers.accounts.slots import EpisodeStats
from penstock.samplers.episodes import Episodes, join_episodes, logged


class Play:
    """The first `counts[b]` episodes of each slot b, cut after `max_steps`, out of batches that follow each other."""

    def __init__(self, counts: list[int], discount: float, max_steps: int) -> None:
        self._counts, self._max_steps = counts, max_steps
        self._stats = EpisodeStats(len(counts), discount)
        self.found = Episodes()
        self.left = list(counts)
        """Episodes that each slot has yet to play."""

    @property
    def over(self) -> bool:
        """No slot gets on: each has played its episodes, or its open one was cut and might never end."""
        cut = self._stats.length >= self._max_steps
        return all(stuck or not n for stuck, n in zip(cut.tolist(), self.left))

    def add(self, batches: Sequence[SampleBatch]) -> None:
        """Takes the rows of a batch; writes into its `truncated` where it cuts an episode."""
        (batch,) = batches
        time = np.arange(batch.spec.T)[:, None]
        opened = np.maximum.accumulate(np.where(batch.first[:-1], time, -1), 0)
        age = np.where(opened >= 0, time - opened, time + self._stats.length)
        cut = batch.valid & (age == self._max_steps - 1) & ~np.logical_or(batch.terminated, batch.truncated)
        np.logical_or(batch.truncated, cut, out=batch.truncated)
        ended = self._stats.update(batch)
        self._stats.length[cut[-1]] = self._max_steps  # the episode goes on, and its own end counts no more
        ended = ended.no_longer_than(self._max_steps)
        self.found = join_episodes([self.found, ended]).first_of_each_slot(self._counts)
        self.left = (np.asarray(self._counts) - np.bincount(self.found.slot, minlength=len(self._counts))).tolist()


class LogPlay:
    """The same of environments of many agents, whose episodes are in the pool's log.

    An episode that has not ended after `max_steps` is left out, with a warning: what its agents earned is in no log.
    """

    def __init__(self, pool: EnvPool, counts: list[int], seating: Seating, max_steps: int) -> None:
        self._pool, self._counts, self._seating, self._max_steps = pool, counts, seating, max_steps
        self._open = np.zeros(len(counts), np.int64)  # steps of the open episodes
        self.found = Episodes()
        self.left = list(counts)

    @property
    def over(self) -> bool:
        """Every environment has played its episodes, or its open one might never end."""
        return not any(self.left)

    def add(self, batches: Sequence[SampleBatch]) -> None:
        """Takes the log of the batches that have just been filled."""
        log, E = self._pool.log, len(self._counts)
        assert log is not None
        valid = [batch.valid.reshape(len(batch.valid), E, -1) for batch in batches]
        if self._pool.takes_turns:
            self._open += sum(x.sum((0, 2)) for x in valid)
        else:
            self._open += np.any([x.any(2) for x in valid], 0).sum(0)
        played = np.arange(log.steps.shape[1]) < log.count[:, None]
        self._open -= np.where(played, log.steps, 0).sum(1)
        ended = logged(log, self._seating.agents, self._seating.policies)
        self.found = join_episodes([self.found, ended]).first_of_each_slot(self._counts)
        left = np.asarray(self._counts) - np.bincount(self.found.slot, minlength=E)
        stuck = (left > 0) & (self._open >= self._max_steps)
        if stuck.any() and (stuck == (left > 0)).all():
            warnings.warn(
                f"an evaluation leaves out {left.sum()} of {sum(self._counts)} episodes: in evaluation slot(s) "
                f"{np.flatnonzero(stuck).tolist()} one has not ended after {self._max_steps:,} steps; give the "
                "environment a limit (PettingZoo's max_cycles), or evaluate with a larger max_steps",
                stacklevel=3,
            )
            left[:] = 0
        self.left = left.tolist()
