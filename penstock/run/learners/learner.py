"""Learner: what ranks 1 and up are: the share of a run in another process. A plain class, which a Backend hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.envs.ids import take_shipped
from penstock.learn.policy_set import trained_policies
from penstock.processes.serialization import unship
from penstock.run.checkpoints.checkpoint import load_checkpoint
from penstock.run.learners.rank import Rank
from penstock.run.learners.rendezvous import FileMeeting, RayMeeting, address_of


class Learner:
    """Rank `rank` of `size`: builds its share of an experiment, and takes part in what rank 0 calls on all of them.

    Args:
        shipped: the class of its Trainer, the plan, `init` and entries of Gymnasium's registry,
            as `ship` made bytes of them.
        place: of the runners that it starts, see `place_runners`; None where they go anywhere.
    """

    def __init__(self, rank: int, size: int, shipped: bytes, place: Any = None) -> None:
        self._rank, self._size, self._shipped = rank, size, shipped
        self._trainer: Any = None
        if place is not None:
            from penstock.actors.on_ray import place_runners  # each backend needs its own imports only

            place_runners(place)

    def host(self, by_ray: bool) -> tuple[int, str]:
        """Returns its process, and on Ray the address of its machine."""
        return os.getpid(), address_of() if by_ray else ""

    def build(self, meeting: int | RayMeeting) -> None:
        """Builds its share, notes `READY`, and meets the other ranks.

        Args:
            meeting: place on Ray, or the descriptor of a file that all ranks share.
        """
        make, plan, init, entries = unship(self._shipped, elsewhere=isinstance(meeting, RayMeeting))
        take_shipped(entries)
        at = FileMeeting(meeting) if isinstance(meeting, int) else meeting
        own_gpus = isinstance(meeting, int)
        rank = Rank(
            self._rank, self._size, at.meet_as(self._rank, self._size), plan.exp.run.learner_timeout_s, own_gpus
        )
        try:
            self._trainer = make(plan, init=init, rank=rank)
        finally:
            if isinstance(at, FileMeeting):
                at.close()

    def train(self) -> None:
        """One iteration."""
        self.trainer.train()

    def state(self) -> None:
        """Gives rank 0 its part of all states, which are gathered over the ranks."""
        self.trainer.state()

    def give(self, policy: str, name: str, start: int, stop: int) -> None:
        """Gives rank 0 rows of its part of a policy's replay."""
        schedule = trained_policies(self.trainer.policy)[policy].replay_schedule
        assert schedule is not None
        schedule.replay.give(name, start, stop)

    def change(self, changes: Mapping[str, Any]) -> None:
        """Changes settings, as `Trainer.change`."""
        self.trainer.change(changes)

    def restore(self, path: str, changes: Mapping[str, Any]) -> None:
        """Restores its part of a checkpoint, with the settings changed until then."""
        self.trainer.restore_with(load_checkpoint(Path(path), replay=True), changes)

    def stop(self) -> None:
        """Closes its environments."""
        if self._trainer is not None:
            self._trainer.stop()

    @property
    def trainer(self) -> Any:
        """The Trainer of its share."""
        assert self._trainer is not None, "build comes first"
        return self._trainer
