"""Groups that lose runners, and fragments that come one by one: all columns are there, and a replay takes them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.actors.backend import RunnerError
from penstock.actors.in_process import FinishedCall, InProcess
from penstock.core.errors import ConfigError
from penstock.envs.make import EnvConfig
from penstock.testing.samplers import bits
from penstock.workers import faults
from tests.samplers.levels import Levels
from tests.slow import slow

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:runner .*the runner is replaced")]

NET = ps.Net(hidden=(4,))
DQN = ps.DQN(learning_starts=50, batch_size=8, replay_ratio=1, net=NET)
EXP = ps.Experiment("CartPole-v1", DQN, ps.SerialSampler(T=8, B=4), ps.RunConfig(seed=3, steps=2_000))


def killed() -> RunnerError:
    return RunnerError("signal", "killed")


def follows(before: Any, after: Any) -> bool:
    """Row 0 of a batch is row T of the one before."""
    names = ("obs", "first", "prev_action", "prev_reward")
    return all(np.array_equal(getattr(after, name)[0], getattr(before, name)[-1]) for name in names)


@pytest.mark.slow
def test_a_batch_of_a_group_keeps_its_columns_when_a_runner_is_lost() -> None:
    with ps.EnvRunnerGroup(EXP, 2, "processes") as group:
        for i in range(12):
            if i == 5:
                os.kill(group.get([group.remote_workers[0].ping.remote()])[0], signal.SIGKILL)
                time.sleep(0.2)
            batch: Any = group.sample()
            assert batch.spec.B == 8
            ps.train_one_step(group.local_worker.policy, batch)
            group.sync_weights()


@pytest.mark.parametrize("absent", [0, 1])
def test_a_successor_goes_on_from_the_last_row_in_episodes_of_its_own(absent: int) -> None:
    with ps.EnvRunnerGroup(EXP, 2, "in-process", fault_policy="restart") as group:
        batches: list[Any] = [group.sample() for _ in range(3)]
        group.runners.lost(1, killed())
        if absent:
            group.runners._later[1] = time.monotonic() + 60.0
            batches.append(group.sample())
            group.runners._later[1] = 0.0
        for _ in range(3):
            batches.append(group.sample())
            ps.train_one_step(group.local_worker.policy, batches[-1])
        assert all(follows(before, after) for before, after in zip(batches, batches[1:]))
        assert [bool(batch.valid[:, 4:].any()) for batch in batches] == [True] * 3 + [False] * absent + [True] * 3
        back = batches[3 + absent]
        assert not back.valid[0, 4:].any() and back.first[1, 4:].all(), "a reset row"
        assert not np.array_equal(back.obs[1, 4:], batches[0].obs[0, 4:]), "episodes that were not played before"


def test_a_runner_that_is_lost_before_its_first_fragment_has_columns_too() -> None:
    with ps.EnvRunnerGroup(EXP, 2, "in-process", fault_policy="drop") as group:
        group.runners.lost(0, killed())
        batch: Any = group.sample()
        assert batch.spec == (8, 8) and batch.valid[:, 4:].any(0).all() and not batch.valid[:, :4].any()
        ps.train_one_step(group.local_worker.policy, batch)


class Slow(InProcess):
    """In-process runners, of which the last one answers every third time only."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.slow, self.asked = slow, 0
        self.names: dict[int, str] = {}
        self.calls: list[FinishedCall] = []

    def call(self, runner: Any, method: str, *args: Any) -> FinishedCall:
        done = super().call(runner, method, *args)
        self.calls.append(done)  # so that no other one has its identity
        self.names[id(done)] = repr(runner)
        return done

    def wait(self, calls: Sequence[FinishedCall], timeout_s: float) -> list[FinishedCall]:
        self.asked += 1
        return [call for call in calls if self.names[id(call)] != self.slow or self.asked % 3 == 0]


R2D1 = ps.R2D1(
    batch_size=2,
    learning_starts=50,
    burn_in=4,
    train_length=4,
    net=ps.Net(hidden=(4,), recurrent="lstm", recurrent_size=4),
)


@pytest.mark.parametrize("algo", [DQN, *slow(R2D1)], ids=["dqn", "r2d1"])
def test_fragments_as_they_come_go_into_a_replay(algo: Any) -> None:
    with ps.EnvRunnerGroup(replace(EXP, algo=algo), 2, Slow("<runner 1>")) as group:
        policy, batches = group.local_worker.policy, []
        for batch in group.sample_async():
            ps.train_one_step(policy, batch)
            batches.append(batch)
            if len(batches) == 12:
                break
        came = [bool(batch.valid[:, 4:].any()) for batch in batches]
        assert 2 < sum(came) < 8, came
        assert all(batch.spec == (8, 8) and batch.valid[:, :4].any() for batch in batches)
        for half, these in ((slice(0, 4), batches), (slice(4, 8), [b for b, here in zip(batches, came) if here])):
            parts = [batch[:, half] for batch in these]
            assert all(follows(before, after) for before, after in zip(parts, parts[1:]))
        metrics = ps.train_one_step(policy, group.sample())
        assert np.isfinite(metrics["train/loss"])


def test_the_columns_that_come_are_those_of_the_runners_themselves() -> None:
    ppo = replace(EXP, algo=ps.PPO(net=NET))
    with ps.EnvRunnerGroup(ppo, 2, "in-process") as one, ps.EnvRunnerGroup(ppo, 2, "in-process") as other:
        whole, single = one.sample_async(whole=True), other.sample_async()
        for _ in range(3):
            fragments = [next(single), next(single)]
            assert bits(next(whole)) == bits(ps.concat_samples(fragments))


def test_epsilon_is_spread_over_all_slots_of_a_group() -> None:
    algo = ps.DQN(learning_starts=16, batch_size=4, net=NET, epsilon=0.4, ladder="ape-x")
    exp = replace(EXP, algo=algo)
    alone = ps.EnvRunner(replace(exp, sampler=ps.SerialSampler(T=8, B=8)))
    with ps.EnvRunnerGroup(exp, 2, "in-process") as group:
        for runner in (group.local_worker, *(handle.local for handle in group.remote_workers)):
            assert runner.agent.epsilon.tolist() == alone.agent.epsilon.tolist() and len(runner.agent.epsilon) == 8
        stream, policy = group.sample_async(), group.local_worker.policy
        for _ in range(3):
            here, there = alone.sample(), next(stream)
            there.version[...] = here.version
            assert bits(here) == bits(there)
            ps.train_one_step(policy, there)
            alone.learn_on_batch(here)
    alone.close()


def test_no_remote_worker_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.run.env_runners.group.make_backend", None)
    with ps.EnvRunnerGroup(EXP, 0) as group:  # of Ray
        assert (group.remote_workers, group.alive, group.get([])) == ([], [], [])
        for _ in range(10):
            ps.train_one_step(group.local_worker.policy, group.sample())
            group.sync_weights()
        assert group.foreach(lambda runner: 1, local=True) == [1]
        with pytest.raises(ps.ConfigError, match="num_env_runners=0"):
            _ = group.backend


@pytest.mark.parametrize("place", ["in-process", *slow("processes")])
def test_a_replacement_has_had_all_calls_of_its_environments(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_FIRST_DELAY_S", 0.0)
    exp = ps.Experiment(EnvConfig(Levels), EXP.algo, ps.SerialSampler(8, 2), EXP.run)
    with ps.EnvRunnerGroup(exp, 2, place) as group:
        for begun in (False, True):
            if begun:
                group.sample()
            group.envs.call("set_level", 2 + begun)
            group.envs.call("spawn", "a", slots=[3])
            group.runners.lost(1, killed())
            group.envs.set("gravity", 1.62)  # while it is not up
            while not group.sample().valid[-1].all():
                pass
            assert group.envs.get("level") == [2 + begun] * 4
            assert group.envs.get("gravity", slots=[3, 0]) == {3: 1.62, 0: 1.62}
        assert group.envs.get("spawned") == [[], [], [], ["a", "a"]]
        with pytest.raises(ConfigError, match="a group has no evaluation environments"):
            group.envs.get("level", evaluation=True)
    with ps.EnvRunnerGroup(exp, 0) as group:
        group.sample()
        assert group.envs.call("set_level", 4) == [0, 1]
        assert {*group.sample().obs[1:, :, 0][group.sample().valid].tolist()} == {4.0}
