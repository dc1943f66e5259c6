"""One iteration of a run, as it is handed to code between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.batch import AnyBatch
from penstock.learn.algorithm import ResultDict
from penstock.learn.policy_set import LoadedPolicy
from penstock.samplers.episodes import Episodes

if TYPE_CHECKING:
    from penstock.run.loop import Run


@dataclass(repr=False, eq=False)
class Iteration:
    """One iteration of a run, after training and before it is logged."""

    itr: int
    """Its number from 1."""
    env_steps: int
    """Environment steps since the run began."""
    metrics: ResultDict
    """The row that is logged. Numbers added to it are logged too, even between two log intervals."""
    batch: AnyBatch
    """The SampleBatch or MultiAgentBatch that was collected last, valid until the next iteration.

    None where a resumed run only evaluates.
    """
    episodes: Episodes
    """The training episodes that ended in it."""
    evaluation: Episodes | None
    """The episodes of its evaluation; None if none was due."""
    run: Run
    """The run, for `set`, `stop`, `save` and `evaluate`."""

    @property
    def policy(self) -> LoadedPolicy:
        """The policy in training; a change to it is trained on."""
        return self.run.policy

    def __repr__(self) -> str:
        return f"Iteration({self.itr}, {self.env_steps:,} steps, {len(self.metrics)} metrics)"


@dataclass
class PendingIteration:
    """An iteration that was handed out and is not logged yet."""

    it: Iteration
    shown: ResultDict
    """Its metrics as they were handed out."""
    before: int
    """Environment steps before it."""
    best: float
    """The best score before it."""
