"""The account of a sampler's episodes: by slot from the rows of its batches, or by agent from the log of its pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.tree import tree_map
from penstock.envs.pools.pool import EnvPool, OpenEpisode
from penstock.envs.seats import Seating
from penstock.samplers.accounts.journal import Journal, JournalViews
from penstock.samplers.accounts.stats import EpisodeStats
from penstock.samplers.episodes import Episodes, logged


class Account(Protocol):
    """Follows the batches of a sampler."""

    def attach(self, batches: Sequence[SampleBatch]) -> None:
        """Takes the buffers that will be filled, one policy after the other in each."""
        ...

    def begin(self, pool: EnvPool, buffer: int) -> None:
        """Counts the random steps from before the first batch, which has just been filled."""
        ...

    def record(self, pool: EnvPool, buffer: int) -> Episodes:
        """Takes a batch that has been filled; returns the episodes that ended in it."""
        ...

    def open_episodes(self) -> list[OpenEpisode | None]:
        """For each slot the episode that is open, if its actions are kept here."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches, `stats` and `journal`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""


class SlotAccount:
    """The account of B slots of one agent each.

    Args:
        journal_steps: rows of actions kept to replay open episodes.
    """

    def __init__(self, B: int, discount: float, journal_steps: int) -> None:
        self._stats = EpisodeStats(B, discount)
        self._journal = Journal(B, journal_steps)
        self._batches: Sequence[SampleBatch] = ()
        self._views: list[JournalViews] = []

    def attach(self, batches: Sequence[SampleBatch]) -> None:
        self._batches = batches
        self._views = [JournalViews(batch) for batch in batches]

    def begin(self, pool: EnvPool, buffer: int) -> None:
        warmup = pool.warmup()
        for b, (_, rewards) in enumerate(warmup):
            self._stats.begin(b, rewards)
        before = [tree_map(lambda *xs: np.stack(xs), *taken) if taken else None for taken, _ in warmup]
        self._journal.begin(self._views[buffer], before)

    def record(self, pool: EnvPool, buffer: int) -> Episodes:
        self._journal.record(self._views[buffer])
        return self._stats.update(self._batches[buffer])

    def open_episodes(self) -> list[OpenEpisode | None]:
        return [self._journal.episode(b) for b in range(len(self._stats.length))]

    def state_dict(self) -> dict[str, Any]:
        return {"stats": self._stats.state_dict(), "journal": self._journal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stats.load_state_dict(state["stats"])
        self._journal.load_state_dict(state["journal"])


class LogAccount:
    """The account of environments of many agents, whose pool keeps sums, log and journal itself."""

    def __init__(self, seating: Seating, B: int) -> None:
        self._seating, self._B = seating, B

    def attach(self, batches: Sequence[SampleBatch]) -> None:
        """Nothing: rows of a batch do not tell which agents they are of."""

    def begin(self, pool: EnvPool, buffer: int) -> None:
        """Nothing: the pool counts from the first reset on."""

    def record(self, pool: EnvPool, buffer: int) -> Episodes:
        assert pool.log is not None
        return logged(pool.log, self._seating.agents, self._seating.policies)

    def open_episodes(self) -> list[OpenEpisode | None]:
        return [None] * self._B

    def state_dict(self) -> dict[str, Any]:
        return {"stats": {}, "journal": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: the state is the pool's."""
