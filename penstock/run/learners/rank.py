"""Rank: one learner among several: its share of the sampler, its device, and the Comm that joins it to the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import penstock.actors.note as note
from penstock.core.spec import Share
from penstock.learn.algorithm import TrainingStepFn
from penstock.learn.comm import Comm, GroupComm
from penstock.learn.policy_set import AnyPolicy
from penstock.run.learners.shared_sampler import SharedSampler, shared_step

if TYPE_CHECKING:  # it makes ranks
    from penstock.run.plan import Plan

READY = 1
"""The note of a rank that waits to meet the others; of one that has entered collective k it is READY + k."""


class Rank:
    """One of `size` learners, which train the same policy on shares of the same batches.

    Args:
        meet: makes the process group of a backend, gloo or nccl, together with all other ranks.
        own_gpus: ranks that each have a GPU of their own may use nccl.
        looking: called now and then while a collective waits; an exception from it ends the wait.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        meet: Callable[[str], Any],
        timeout_s: float,
        own_gpus: bool = True,
        looking: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, size
        self._meet, self._timeout_s, self._own_gpus, self._looking = meet, timeout_s, own_gpus, looking
        self._entered = 0
        self._comm: GroupComm | None = None

    def device(self, device: str) -> str:
        """The device of this rank: of `cuda` the one of its number, ranks taking turns where there are too few."""
        return f"cuda:{self.rank % torch.cuda.device_count()}" if device == "cuda" else device

    def comm(self, device: str) -> Comm:
        """The Comm; the first call meets the others. nccl where every rank has a GPU of its own, else gloo."""
        if self._comm is None:
            note.write(READY)
            own_gpu = self._own_gpus and device.startswith("cuda") and torch.cuda.device_count() >= self.size
            group = self._meet("nccl" if own_gpu else "gloo")
            where = device if own_gpu else "cpu"
            self._comm = GroupComm(group, self._timeout_s, where, entering=self._enter, looking=self._looking)
        return self._comm

    def sampler(self, plan: Plan, device: str) -> SharedSampler:
        """The live sampler of this rank's slots. Raises ConfigError, as `SamplerSettings.shares`."""
        own = plan.sampler.shares(self.size)
        starts = np.cumsum([0, *(x.spec.B for x in own)]).tolist()
        slots = [slice(a, b) for a, b in zip(starts, starts[1:])]
        mine = replace(plan, sampler=own[self.rank], share=Share(slots[self.rank].start, starts[-1]))
        live = mine.make_sampler()
        try:
            return SharedSampler(live, self.comm(device), slots)
        except BaseException:
            live.shutdown()
            raise

    def join(self, policy: AnyPolicy, step: TrainingStepFn) -> TrainingStepFn:
        """Has the policy train with those of the others; returns the step by which all train at once."""
        assert self._comm is not None
        policy.join(self._comm)
        return shared_step(step)

    def call(self, method: str, *args: Any) -> None:
        """Unused: rank 0 calls the others."""

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Unused: rank 0 looks for causes."""
        yield

    def close(self) -> None:
        """Lets go of the others; every one of them must have ended, or be about to."""
        if self._comm is not None:
            self._comm.close()

    def _enter(self, number: int) -> None:
        self._entered = number
        note.write(READY + number)
