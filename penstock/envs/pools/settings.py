"""PoolSettings: how a pool in this process plays its environments, whether they are of one agent or of many."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Reset = Literal["next_step", "batch_end"]
MAKING, RESETTING, STEPPING, CLOSING, CALLING = 1, 2, 3, 4, 5
"""Activities that `PoolSettings.activity` tells; 0: no environment is at work."""
CHECK_EVERY = 64
"""Ticks between looks at the values of all slots."""
NUMBERS = frozenset([float, int, np.float32, np.float64, np.int64, np.int32])
FLAGS = frozenset([bool, np.bool_])
"""Classes of rewards and of ends that need no closer look."""


@dataclass(frozen=True)
class PoolSettings:
    """Settings of `SerialPool`, `SimultaneousPool` and `TurnPool`, in all of which a slot is an environment."""

    reset: Reset = "next_step"
    """`next_step` resets in the row after an end. `batch_end` lets a finished slot idle to the end of the batch and
    resets in row 0 of the next."""
    max_decorrelation_steps: int = 0
    """Each slot takes 1 to this many random steps before the first batch; 0 for none."""
    episodes: Sequence[int] | None = None
    """For each slot how many episodes it plays before it idles for good; None for no limit."""
    evaluation: bool = False
    """Use the evaluation seeds, which no training episode uses."""
    activity: MutableSequence[int] | None = None
    """Six words kept up to date, for messages about a process that died: slot within this pool, activity, a count that
    goes on outside `send`, first slot of the pool, tick, whether it is for evaluation."""
    episode_table: Any = None
    """[B, TABLE_WORDS] int64 of each slot: number of its episode, episodes left or -1, tick of its reset, and for many
    agents steps after which an episode is cut, 0 for none, and lost rewards."""
    evaluation_table: Callable[[int], Any] | None = None
    """Makes the episode table of a pool for evaluation with this many slots."""
    discount: float = 0.99
    """Discount of logged episodes of many agents, which the pool accounts for; with one agent the sampler does."""
    journal_steps: int = 100_000
    """Steps, of agents that take turns moves, that pools of many agents keep to replay an open episode on resume."""

    @classmethod
    def of(cls, sampler: Any) -> PoolSettings:
        """Pool settings from a sampler with fields of these names; its discount may be None for the usual one."""
        given = {} if sampler.discount is None else {"discount": sampler.discount}
        return cls(sampler.reset, sampler.max_decorrelation_steps, journal_steps=sampler.journal_steps, **given)

    def for_evaluation(self, B: int, activity: MutableSequence[int] | None = None) -> PoolSettings:
        """Settings of a pool for evaluation with B slots, which notes its activity in the same `activity`."""
        episode_table = None if self.evaluation_table is None else self.evaluation_table(B)
        return PoolSettings(evaluation=True, activity=activity, episode_table=episode_table, discount=self.discount)


DEFAULTS = PoolSettings()
