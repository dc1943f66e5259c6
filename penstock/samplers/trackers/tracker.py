"""EpisodeTracker: the Protocol of what follows a sampler's episodes; and that of many agents, from their pool's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.core.batch import SampleBatch
from penstock.envs.pools.pool import OpenEpisode, Source
from penstock.envs.seats import Seating
from penstock.samplers.episodes import Episodes, logged


class EpisodeTracker(Protocol):
    """Follows the batches of a sampler."""

    def attach(self, batches: Sequence[SampleBatch]) -> None:
        """Takes the buffers that will be filled, one policy after the other in each."""
        ...

    def begin(self, pool: Source, buffer: int) -> None:
        """Counts the random steps from before the first batch, which has just been filled."""
        ...

    def record(self, pool: Source, buffer: int) -> Episodes:
        """Takes a batch that has been filled; returns the episodes that ended in it."""
        ...

    def open_episodes(self) -> list[OpenEpisode | None]:
        """For each slot the episode that is open, if its actions are kept here."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches, `stats` and `journal`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


class LogEpisodeTracker:
    """The episode tracker of environments of many agents; their pool keeps sums, log and journal itself."""

    def __init__(self, seating: Seating, B: int) -> None:
        self._seating, self._B = seating, B

    def attach(self, batches: Sequence[SampleBatch]) -> None:
        """Does nothing: the rows of a batch do not tell their agents."""

    def begin(self, pool: Source, buffer: int) -> None:
        """Does nothing: the pool counts from the first reset on."""

    def record(self, pool: Source, buffer: int) -> Episodes:
        assert pool.log is not None
        return logged(pool.log, self._seating.agents, self._seating.policies)

    def open_episodes(self) -> list[OpenEpisode | None]:
        return [None] * self._B

    def state_dict(self) -> dict[str, Any]:
        return {"stats": {}, "journal": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: the state is the pool's."""
