"""Ranks: the Protocols of the place where the other ranks of a gang live, and of rank 0's handle of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from penstock.core.config import import_object
from penstock.run.experiment import Experiment

LearnerBackend = Literal["processes", "ray"]

BACKENDS: dict[str, str] = {
    "processes": "penstock.run.gang.local:LocalRanks",
    "ray": "penstock.distributed.learners:RayRanks",
}
"""Classes of places by name: called with the experiment and `init`, they start ranks 1 to `run.learners` - 1."""
MEET_TIMEOUT_S = 60.0
"""Longest wait of a rank that is ready for the others to meet it."""


class RankHandle(Protocol):
    """Another rank as rank 0 sees it: orders, reports, and how it ended."""

    rank: int
    said_ready: bool
    """It has built its share of the run, and waits for the others."""
    report: dict[str, Any] | None
    """The error that it reported before it ended."""

    @property
    def label(self) -> str:
        """Its number, its process and where that is, for messages."""
        ...

    @property
    def exited(self) -> bool:
        """True if it has ended, and all that it reported was taken in."""
        ...

    def order(self, order: dict[str, Any]) -> None:
        """Sends an order; orders are carried out one after the other. One that has ended gets none."""
        ...

    def is_behind(self, number: int) -> bool:
        """True if it has not come to the collective of this number."""
        ...

    def stacks(self) -> str:
        """Where it is now, if it can say so."""
        ...

    def ending(self) -> str:
        """How it ended, with the end of its output."""
        ...

    def end(self, grace_s: float) -> None:
        """Waits so long for its end, then kills it with all that it started. A second call does nothing."""
        ...


class Ranks(Protocol):
    """All ranks of a gang but 0."""

    handles: Sequence[RankHandle]

    def wait(self, timeout_s: float) -> None:
        """Returns once a rank may have said that it is ready, or may have ended, or after so long."""
        ...

    def meet(self, backend: str) -> Any:
        """Rank 0's process group, once all are ready."""
        ...

    def entering(self, number: int) -> None:
        """Notes the number of rank 0's last collective."""
        ...

    def close(self) -> None:
        """Ends what is left, and removes what was made for them."""
        ...


def start_ranks(exp: Experiment, init: dict[str, Any] | None) -> Ranks:
    """The other ranks of an experiment's gang, started. Raises ConfigError if they cannot be."""
    return import_object(BACKENDS[exp.run.learner_backend])(exp, init)
