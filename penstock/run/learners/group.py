"""LearnerGroup: rank 0's side of several learners: it starts the others, calls them, and knows which is lost."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import penstock.core.errors as errors
from penstock.actors.backend import Backend, RunnerError
from penstock.actors.link import LentDescriptor
from penstock.envs.ids import entries_to_ship
from penstock.learn.algorithm import TrainingStep, TrainingStepFn
from penstock.learn.comm import Comm
from penstock.learn.policy_set import AnyPolicy, trained_policies
from penstock.processes.serialization import CURE, ship
from penstock.run.learners.learner import Learner
from penstock.run.learners.places import RankPlaces
from penstock.run.learners.rank import READY, Rank
from penstock.run.learners.rendezvous import FileMeeting, RayMeeting
from penstock.run.plan import Plan

MOST_RESTARTS = 5
"""Restarts from one checkpoint, after which the run ends."""
START_TIMEOUT_S = 300.0
"""Longest wait until a rank has built its sampler and policy."""
_LOOK_S = 0.2
_ANSWER_S = 30.0
"""Longest wait for a new process to say where it is, once others have come up."""
_SETTLE_S = 3.0
"""Longest wait, once a collective has failed, for the death or the error that explains it."""
_GRACE_S = 5.0
"""Longest wait for ranks that are told to stop."""
_TAIL = 20_000


class LearnerGroup(Rank):
    """Rank 0, in the process of the run, and its handles of all other ranks, which end with it, however it ends.

    What rank 0 calls the others carry out in the order in which it was sent; it never waits for an answer, as all of
    them meet in the next collective.

    Args:
        make: the class of a Trainer.

    Raises:
        ConfigError: the experiment cannot be divided or sent, or the cluster cannot be reached or has no room.
        LearnerLostError: a rank did not come up.
    """

    def __init__(self, plan: Plan, init: Any, make: type) -> None:
        exp, run = plan.exp, plan.exp.run
        size = run.learners
        plan.sampler.shares(size)  # refused before anything is started
        without_display = replace(exp, run=replace(run, progress="off", trace=None, each=None))
        what = "the experiment cannot be sent to the processes of run.learners"
        shipped = ship(
            (make, replace(plan, exp=without_display), init, entries_to_ship(plan.env.name, plan.eval_env.name)),
            what,
            CURE,
        )
        self._places = RankPlaces(plan)
        self._backend: Backend = self._places.backend
        self._calls: list[tuple[int, Any]] = []
        """Those that have not ended, each with its rank."""
        self._failed: list[tuple[int, RunnerError]] = []
        self._learners: dict[int, Any] = {}
        self._labels: dict[int, str] = {}
        self._meeting: FileMeeting | RayMeeting | None = None
        self._comm, self._entered = None, 0
        try:
            for rank in range(1, size):
                args = (rank, size, shipped, self._places.place(rank))
                self._learners[rank] = self._places.start(Learner, args, rank)
            self._meeting = self._met_at()
            local = isinstance(self._meeting, FileMeeting)
            super().__init__(0, size, self._meeting.meet_as(0, size), run.learner_timeout_s, local, self._look)
            meeting = self._meeting
            self.call("build", LentDescriptor(meeting.fd) if isinstance(meeting, FileMeeting) else meeting)
        except BaseException:
            self._release()
            raise

    def comm(self, device: str) -> Comm:
        if self._comm is None:
            with self.explained():
                self._wait_until_ready()
                super().comm(device)
        return super().comm(device)

    def join(self, policy: AnyPolicy, step: TrainingStepFn) -> TrainingStepFn:
        with self.explained():
            whole = super().join(policy, step)
        for id_, own in trained_policies(policy).items():
            assert own.partition is not None
            own.partition.ask = functools.partial(self.call, "give", id_)

        def ordered(policy: AnyPolicy, sampler: Any, itr: int) -> TrainingStep:
            with self.explained():
                self.call("train")
                return whole(policy, sampler, itr)

        return ordered

    def call(self, method: str, *args: Any) -> None:
        """Has every other rank do something, in which this one takes part."""
        self._take_in(0.0)
        self._calls += [(rank, self._backend.call(x, method, *args)) for rank, x in self._learners.items()]

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Inside the block an error of a collective is replaced by its cause on another rank.

        Raises:
            LearnerLostError: a rank was killed, has ended or hangs; names it.
            PenstockError: a rank raised it.
        """
        try:
            yield
        except errors.LearnerLostError as error:
            raise self._cause(error) from error

    def close(self) -> None:
        """Has the others close their environments, and ends them. A second call does nothing."""
        self.call("stop")
        until = time.monotonic() + _GRACE_S
        while self._calls and (left := until - time.monotonic()) > 0:
            self._take_in(left)
        self.kill()

    def kill(self) -> None:
        """Ends all other ranks at once, and releases shared resources."""
        self._release()
        super().close()

    def _release(self) -> None:
        for learner in self._learners.values():
            self._backend.kill(learner)
        self._learners.clear()
        self._calls.clear()
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
        self._places.close()

    def _met_at(self) -> FileMeeting | RayMeeting:
        """The place to meet, once every process is up."""
        by_ray, until = self._backend.name == "ray", time.monotonic() + START_TIMEOUT_S
        calls = {rank: self._backend.call(x, "host", by_ray) for rank, x in self._learners.items()}
        addresses = [self._places.address()]
        for rank, call in calls.items():
            try:
                pid, address = self._backend.result(call, max(until - time.monotonic(), _ANSWER_S))
            except RunnerError as error:
                self._failed.append((rank, error))
                raise self._cause(errors.LearnerLostError(str(error))) from error
            self._labels[rank] = f"rank {rank} (pid {pid}{f' at {address}' if address else ''})"
            addresses.append(address)
        return RayMeeting.opened(addresses) if by_ray else FileMeeting.opened()

    def _take_in(self, timeout_s: float) -> None:
        """Takes in the calls that have ended, after waiting so long for one."""
        if not self._calls:
            return
        ended = self._backend.wait([call for _, call in self._calls], timeout_s)
        for rank, call in [(rank, call) for rank, call in self._calls if any(call is x for x in ended)]:
            try:
                self._backend.result(call, _ANSWER_S)
            except RunnerError as error:
                self._failed.append((rank, error))
        self._calls = [(rank, call) for rank, call in self._calls if not any(call is x for x in ended)]

    def _look(self) -> None:
        """Raises LearnerLostError, while a collective waits, if one that is to come to it has failed."""
        self._take_in(0.0)
        if self._failed:
            raise errors.LearnerLostError(f"rank {self._failed[0][0]} has failed")

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while waiting := [rank for rank in self._learners if not self._note(rank)]:
            self._take_in(_LOOK_S)
            if self._failed:
                raise errors.LearnerLostError("a rank has failed before it was ready")
            if time.monotonic() > until:
                raise errors.LearnerLostError(
                    f"{self._labels[waiting[0]]} was not ready within {START_TIMEOUT_S:g} s{self._here(waiting[0])}"
                )

    def _note(self, rank: int) -> int:
        """The note of a rank, 0 if it does not answer."""
        words = self._backend.look(self._learners[rank], stacks=False).words
        return words[0] if words else 0

    def _here(self, rank: int) -> str:
        found = self._backend.look(self._learners[rank]).stacks
        return f", and was here:\n{found}" if found else ", and does not say where: it is stopped, or in native code"

    def _cause(self, error: errors.LearnerLostError) -> errors.PenstockError:
        until = time.monotonic() + _SETTLE_S
        while True:
            self._take_in(max(min(until - time.monotonic(), _LOOK_S), 0.0))
            # One that was merely left alone by another is no cause.
            found = [(rank, x) for rank, x in self._failed if x.error_type != "LearnerLostError"]
            if found or time.monotonic() > until or not self._calls:
                break
        if found:  # an exception says more than a death
            return self._explained(*min(found, key=lambda x: x[1].kind != "exception"))
        behind = [rank for rank in self._learners if self._note(rank) < READY + self._entered]
        if behind:
            return errors.LearnerLostError(
                f"{self._labels[behind[0]]} hangs: it has not come to collective {self._entered} within "
                f"run.learner_timeout_s={self._timeout_s:g} s{self._here(behind[0])}"
            )
        return error

    def _explained(self, rank: int, error: RunnerError) -> errors.PenstockError:
        """The error of this process for a rank's exception, or for its loss."""
        if error.kind != "exception":
            said = f"; what is known of it:\n{error.trace[-_TAIL:]}" if error.trace else ""
            label = self._labels.get(rank, f"rank {rank}")
            return errors.LearnerLostError(f"{label}{str(error).removeprefix(f'rank {rank}')}{said}")
        kind = getattr(errors, error.error_type, None)
        if isinstance(kind, type) and issubclass(kind, errors.PenstockError):
            return kind(f"rank {rank}: {_said(error)}")
        return errors.LearnerError(f"rank {rank}: {_said(error)}\n{error.trace[-_TAIL:]}")


def _said(error: RunnerError) -> str:
    """The text of an exception, without its place and class."""
    return str(error).partition(f"{error.error_type}: ")[2] or str(error)


class Restarts:
    """How often the learners began anew from one checkpoint."""

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
