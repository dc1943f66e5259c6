"""Gang: rank 0's side of several learners: it starts the others, tells them what to do, and knows which is lost."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch

import penstock.core.errors as errors
from penstock.learn.algorithm import TrainingStep, TrainingStepFn
from penstock.learn.comm import Comm, GroupComm
from penstock.learn.policy_set import AnyPolicy, each
from penstock.run.experiment import Experiment
from penstock.run.gang.ranks import RankHandle, start_ranks
from penstock.run.gang.shared import SharedSampler, shared_step, shares
from penstock.samplers.sampler import SamplerSettings

MOST_RESTARTS = 5
"""Restarts from one checkpoint, after which the run ends."""
START_TIMEOUT_S = 300.0
"""Longest wait until a rank has built its sampler and policy."""
_SETTLE_S = 3.0
"""Longest wait, once a collective has failed, for the death or the report that explains it."""
_GRACE_S = 5.0
"""Longest wait for ranks that are told to stop."""


class Member:
    """One rank of a gang: its share of the sampler, its device, and the Comm over which it meets the others.

    Args:
        meet: makes the process group of a backend, gloo or nccl, together with all other ranks.
        entering: notes the number of each collective as it begins.
        own_gpus: ranks that each have a GPU of their own may use nccl.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        meet: Callable[[str], Any],
        entering: Callable[[int], None],
        timeout_s: float,
        own_gpus: bool = True,
    ) -> None:
        self.rank, self.size = rank, size
        self._meet, self._entering, self._timeout_s, self._own_gpus = meet, entering, timeout_s, own_gpus
        self._entered = 0
        self._comm: Comm | None = None

    def device(self, device: str) -> str:
        """The device of this rank: of `cuda` the one of its number, ranks taking turns where there are too few."""
        return f"cuda:{self.rank % torch.cuda.device_count()}" if device == "cuda" else device

    def comm(self, device: str) -> Comm:
        """The Comm; the first call meets the others. nccl where every rank has a GPU of its own, else gloo."""
        if self._comm is None:
            own_gpu = self._own_gpus and device.startswith("cuda") and torch.cuda.device_count() >= self.size
            group = self._meet("nccl" if own_gpu else "gloo")
            where = device if own_gpu else "cpu"
            self._comm = GroupComm(group, self._timeout_s, where, entering=self._enter)
        return self._comm

    def sampler(self, settings: SamplerSettings, env: Any, seed: int, device: str) -> SharedSampler:
        """The live sampler of this rank's slots. Raises ConfigError, as `shares`."""
        own = shares(settings, self.size)
        starts = np.cumsum([0, *(x.spec.B for x in own)]).tolist()
        slots = [slice(a, b) for a, b in zip(starts, starts[1:])]
        live = own[self.rank].build(env, seed, first_slot=slots[self.rank].start, total_slots=starts[-1])
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

    def tell(self, do: str, **how: Any) -> None:
        """Does nothing: rank 0 gives the orders."""

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Does nothing: rank 0 looks for causes."""
        yield

    def close(self) -> None:
        """Does nothing: the process ends by itself."""

    def _enter(self, number: int) -> None:
        self._entered = number
        self._entering(number)


class Gang(Member):
    """Rank 0, in the process of the run, and the handles of all other ranks."""

    def __init__(self, exp: Experiment, init: dict[str, Any] | None) -> None:
        shares(exp.sampler_settings, exp.run.learners)  # refused before anything is started
        self._ranks = start_ranks(exp, init)
        run = exp.run
        local = run.learner_backend == "processes"
        super().__init__(0, run.learners, self._ranks.meet, self._ranks.entering, run.learner_timeout_s, local)

    def comm(self, device: str) -> Comm:
        if self._comm is None:
            with self.explained():
                self._wait_until_ready()
                super().comm(device)
        return super().comm(device)

    def join(self, policy: AnyPolicy, step: TrainingStepFn) -> TrainingStepFn:
        with self.explained():
            whole = super().join(policy, step)
        for id_, own in each(policy).items():
            assert own.columns is not None
            own.columns.ask = functools.partial(self._ask, id_)

        def ordered(policy: AnyPolicy, sampler: Any, itr: int) -> TrainingStep:
            with self.explained():
                self.tell("train")
                return whole(policy, sampler, itr)

        return ordered

    def _ask(self, policy: str, name: str, start: int, stop: int) -> None:
        """Has the others give rows of their part of a policy's replay."""
        self.tell("give", policy=policy, name=name, start=start, stop=stop)

    def tell(self, do: str, **how: Any) -> None:
        """Orders every other rank to do something, in which this one takes part."""
        for rank in self._ranks.handles:
            rank.order({"do": do, **how})

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Inside the block an error of a collective becomes what its cause is on another rank.

        Raises:
            LearnerLostError: a rank was killed, has ended or hangs; names it.
            PenstockError: what a rank raised.
        """
        try:
            yield
        except errors.LearnerLostError as error:
            raise self._cause(error) from error

    def close(self) -> None:
        """Ends all other ranks. A second call does nothing."""
        self.tell("stop")
        until = time.monotonic() + _GRACE_S
        for rank in self._ranks.handles:
            rank.end(max(until - time.monotonic(), 0.0))
        self._ranks.close()

    def kill(self) -> None:
        """Ends all other ranks at once."""
        for rank in self._ranks.handles:
            rank.end(0.0)
        self._ranks.close()

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while waiting := [rank for rank in self._ranks.handles if not rank.said_ready]:
            left = until - time.monotonic()
            self._ranks.wait(max(left, 0.0))
            for rank in waiting:
                if rank.exited and not rank.said_ready:
                    raise errors.LearnerLostError("a rank has ended before it was ready")
            if left < 0:
                raise errors.LearnerLostError(
                    f"{waiting[0].label} was not ready within {START_TIMEOUT_S:g} s; it was here:\n"
                    f"{waiting[0].stacks()}"
                )

    def _cause(self, error: errors.LearnerLostError) -> errors.PenstockError:
        until = time.monotonic() + _SETTLE_S
        reported, ended = list[RankHandle](), list[RankHandle]()
        while time.monotonic() < until and not (reported or ended):
            time.sleep(0.05)
            over = [rank for rank in self._ranks.handles if rank.exited]
            # One that was merely left alone by another is no cause.
            reported = [x for x in over if x.report is not None and x.report["error"] != "LearnerLostError"]
            ended = [x for x in over if x.report is None]
        if reported:
            told = reported[0].report or {}
            kind = getattr(errors, told["error"], errors.LearnerError)
            trace = "" if issubclass(kind, errors.ConfigError) or hasattr(errors, told["error"]) else told["trace"]
            return kind(f"rank {reported[0].rank}: {told['text']}{trace}")
        if ended:
            return errors.LearnerLostError(ended[0].ending())
        behind = [x for x in self._ranks.handles if not x.exited and x.is_behind(self._entered)]
        if behind:
            return errors.LearnerLostError(
                f"{behind[0].label} hangs: it has not come to collective {self._entered} within "
                f"run.learner_timeout_s={self._timeout_s:g} s, and was here:\n{behind[0].stacks()}"
            )
        return error


class Restarts:
    """How often a gang began anew from one checkpoint."""

    def __init__(self) -> None:
        self._count, self._step = 0, -1

    def count(self, step: int, error: errors.LearnerLostError) -> None:
        """Counts a restart from the checkpoint of this step. Raises LearnerLostError if there were too many."""
        self._count = self._count + 1 if step == self._step else 1
        self._step = step
        if self._count > MOST_RESTARTS:
            raise errors.LearnerLostError(
                f"learners began anew {MOST_RESTARTS} times from step {step:,} and did not come to the next checkpoint "
                f"(run.checkpoint_interval): {error}"
            ) from error
