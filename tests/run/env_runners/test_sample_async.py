"""`EnvRunnerGroup.sample_async`: who is asked, with which weights, and how a runner is noticed that does not answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.actors.in_process import FinishedCall, InProcess

pytestmark = pytest.mark.timeout(120)

EXP = ps.Experiment("CartPole-v1", ps.PPO(net=ps.Net(hidden=(8,))), ps.SerialSampler(4, 2), ps.RunConfig(seed=3))


class Deaf(InProcess):
    """In-process runners, of which one never answers when it is asked to sample, until it is killed."""

    def __init__(self, deaf: str) -> None:
        super().__init__()
        self.deaf, self.unheard = deaf, list[Any]()

    def call(self, runner: Any, method: str, *args: Any) -> FinishedCall:
        if method.startswith("sample") and repr(runner) == self.deaf:
            self.unheard.append(FinishedCall())
            return self.unheard[-1]
        return super().call(runner, method, *args)

    def wait(self, calls: Sequence[FinishedCall], timeout_s: float) -> list[FinishedCall]:
        found = [call for call in calls if not any(call is x for x in self.unheard)]
        if calls and not found:
            time.sleep(timeout_s)
        return found

    def kill(self, runner: Any) -> None:
        if repr(runner) == self.deaf:
            self.deaf = ""
        super().kill(runner)


def test_a_runner_that_hangs_is_lost_while_others_deliver() -> None:
    with ps.EnvRunnerGroup(EXP, 2, Deaf("<runner 1>"), deadline_s=0.4) as workers:
        until = time.monotonic() + 20.0
        stream = workers.sample_async(max_in_flight=1)
        with pytest.warns(UserWarning, match=r"runner 1.*no answer within 0.4 s"):
            _ = next(x for x in stream if workers.faults.counts or time.monotonic() > until)
        assert workers.faults.counts == {"timeout": 1, "restarts": 1}


def test_a_pause_of_the_consumer_is_no_hang() -> None:
    with ps.EnvRunnerGroup(EXP, 2, "in-process", deadline_s=0.1) as workers:
        stream = workers.sample_async(max_in_flight=2)
        for _ in range(3):
            next(stream)
            time.sleep(0.15)
        again = workers.sample_async(max_in_flight=2)  # goes on with what the first one asked for
        assert [next(again).spec for _ in range(5)] == [(4, 2)] * 5
        assert not workers.faults.counts


def test_without_remote_workers_the_local_one_samples() -> None:
    with ps.EnvRunnerGroup(EXP, 0, "in-process") as workers:
        stream = workers.sample_async()
        one, two = next(stream), next(stream)
        assert np.array_equal(one.obs[-1], two.obs[0])


def test_no_request_at_all_is_refused_and_not_waited_for() -> None:
    with ps.EnvRunnerGroup(EXP, 1, "in-process", deadline_s=1.0) as workers:
        with pytest.raises(ps.ConfigError, match=r"max_in_flight=0\); expected at least 1"):
            next(workers.sample_async(max_in_flight=0))


def test_weights_that_do_not_fit_are_an_error_and_never_left_out() -> None:
    other = ps.Experiment("CartPole-v1", ps.PPO(net=ps.Net(hidden=(16,))), ps.SerialSampler(4, 2))
    with ps.EnvRunnerGroup(EXP, 1, "in-process") as workers, ps.EnvRunnerGroup(other, 0, "in-process") as others:
        workers._local = others.local_worker
        with pytest.raises(ps.EnvWorkerError, match=r"the weights have \d+ bytes; expected \d+"):
            next(workers.sample_async())


def test_errors_of_sync_weights_come_with_the_next_fragment() -> None:
    other = ps.Experiment("CartPole-v1", ps.PPO(net=ps.Net(hidden=(16,))), ps.SerialSampler(4, 2))
    with ps.EnvRunnerGroup(EXP, 1, "in-process") as workers, ps.EnvRunnerGroup(other, 0, "in-process") as others:
        workers._local = others.local_worker
        workers.sync_weights()
        with pytest.raises(ps.EnvWorkerError, match=r"the weights have \d+ bytes; expected \d+"):
            workers.sample()
