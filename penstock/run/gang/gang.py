"""Gang: rank 0's side of several learners: it starts the others, tells them what to do, and knows which is lost."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import select
import shutil
import tempfile
import time
import weakref
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import penstock.core.errors as errors
from penstock.learn.algorithm import TrainingStep, TrainingStepFn
from penstock.learn.comm import Comm, GroupComm, meet
from penstock.learn.policy_set import AnyPolicy, each
from penstock.run.experiment import Experiment
from penstock.run.gang.process import RankProcess
from penstock.run.gang.shared import SharedSampler, shared_step, shares
from penstock.samplers.sampler import SamplerSettings
from penstock.workers.process import require_linux

MOST_RESTARTS = 5
"""Restarts from one checkpoint, after which the run ends."""
START_TIMEOUT_S = 300.0
"""Longest wait until a rank has built its sampler and policy."""
_MEET_TIMEOUT_S = 60.0
_SETTLE_S = 3.0
"""Longest wait, once a collective has failed, for the death or the report that explains it."""
_GRACE_S = 5.0
"""Longest wait for ranks that are told to stop."""


class Member:
    """One rank of a gang: its share of the sampler, its device, and the Comm over which it meets the others.

    Args:
        progress: descriptor of [size] int64, in which each rank notes the number of its last collective.
    """

    def __init__(self, rank: int, size: int, meeting: str, progress: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._timeout_s = meeting, timeout_s
        self.progress = np.frombuffer(mmap.mmap(progress, size * 8), np.int64)
        self._comm: Comm | None = None

    def device(self, device: str) -> str:
        """The device of this rank: of `cuda` the one of its number, ranks taking turns where there are too few."""
        return f"cuda:{self.rank % torch.cuda.device_count()}" if device == "cuda" else device

    def comm(self, device: str) -> Comm:
        """The Comm; the first call meets the others. nccl where every rank has a GPU of its own, else gloo."""
        if self._comm is None:
            own_gpu = device.startswith("cuda") and torch.cuda.device_count() >= self.size
            backend = "nccl" if own_gpu else "gloo"
            group = meet(self._meeting, self.rank, self.size, backend, _MEET_TIMEOUT_S)
            where = device if own_gpu else "cpu"
            self._comm = GroupComm(group, self._timeout_s, where, entering=self._entering)
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

    def _entering(self, number: int) -> None:
        self.progress[self.rank] = number


class Gang(Member):
    """Rank 0, in the process of the run, and the processes of all other ranks."""

    def __init__(self, exp: Experiment, init: dict[str, Any] | None) -> None:
        require_linux()
        shares(exp.sampler_settings, exp.run.learners)  # refused before anything is started
        size = exp.run.learners
        self._folder = _folder()
        self._alive = list(os.pipe2(os.O_CLOEXEC))
        progress = os.memfd_create("penstock-progress", os.MFD_CLOEXEC)
        os.ftruncate(progress, size * 8)
        super().__init__(0, size, os.path.join(self._folder, "meeting"), progress, exp.run.learner_timeout_s)
        self._ranks: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, _abandon, self._ranks, self._alive, self._folder)
        boot = {"size": size, "meeting": self._meeting, "progress": progress}
        quiet = replace(exp.run, progress="off", trace=None, each=None)
        payload = replace(exp, run=quiet), init
        try:
            for rank in range(1, size):
                self._ranks.append(RankProcess(rank, boot, payload, [progress], self._alive[0]))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(progress)

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
        for rank in self._ranks:
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
        for rank in self._ranks:
            rank.end(max(until - time.monotonic(), 0.0))
        self._finalizer()

    def kill(self) -> None:
        """Ends all other ranks at once."""
        for rank in self._ranks:
            rank.end(0.0)
        self._finalizer()

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while waiting := [rank for rank in self._ranks if not rank.said_ready]:
            poll = select.poll()
            for rank in waiting:
                rank.register(poll)
            left = until - time.monotonic()
            poll.poll(max(int(left * 1e3), 0))
            for rank in waiting:
                if rank.exited and not rank.said_ready:
                    raise errors.LearnerLostError("a rank has ended before it was ready")
            if left < 0:
                raise errors.LearnerLostError(
                    f"rank {waiting[0].rank} (pid {waiting[0].process.pid}) was not ready within {START_TIMEOUT_S:g} "
                    f"s; it was here:\n{waiting[0].stacks()}"
                )

    def _cause(self, error: errors.LearnerLostError) -> errors.PenstockError:
        until = time.monotonic() + _SETTLE_S
        reported, ended = list[RankProcess](), list[RankProcess]()
        while time.monotonic() < until and not (reported or ended):
            time.sleep(0.05)
            over = [rank for rank in self._ranks if rank.exited]
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
        here = int(self.progress[0])
        behind = [x for x in self._ranks if not x.exited and int(self.progress[x.rank]) < here]
        if behind:
            return errors.LearnerLostError(
                f"rank {behind[0].rank} (pid {behind[0].process.pid}) hangs: it has not come to collective {here} "
                f"within run.learner_timeout_s={self._timeout_s:g} s, and was here:\n{behind[0].stacks()}"
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


def _folder() -> str:
    """A folder of this user alone, where the ranks meet."""
    try:
        return tempfile.mkdtemp(prefix="penstock-gang-")
    except OSError as error:
        raise errors.ConfigError(
            f"no folder for learners to meet in can be made in {tempfile.gettempdir()}: {error.strerror or error}; set "
            "TMPDIR to one that you may write"
        ) from error


def _abandon(ranks: list[RankProcess], alive: list[int], folder: str) -> None:
    for fd in alive:
        os.close(fd)
    for rank in ranks:
        rank.end(0.0)
    shutil.rmtree(folder, ignore_errors=True)
