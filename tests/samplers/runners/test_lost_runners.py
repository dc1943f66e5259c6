"""The driver's account of runners that are lost: episode numbers, ticks, faults, rows, and who is late."""

from __future__ import annotations

import contextlib
import copy
import os
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import penstock as ps
from penstock.actors.backend import RunnerError
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.tree import tree_leaves
from penstock.envs.pools.serial import SerialPool
from penstock.testing.samplers import bits
from penstock.workers import faults as faults_of_workers
from tests.run.env_runners.test_group import EXP
from tests.samplers.placed import CASES, live
from tests.samplers.runners.test_faults import Seeded, died, echoes, flaky

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:runner .*the runner is replaced")]


class Brief(Seeded):
    """Episodes of one step; every seed of a reset is kept."""

    seeds: list[Any] = []  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, True, truncated, info


@pytest.mark.parametrize("random_steps", [0, 500])
def test_an_episode_that_a_lost_runner_may_have_begun_is_not_begun_again(
    random_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Brief, "seeds", [])
    inner = ps.SerialSampler(5, 2, max_decorrelation_steps=random_steps)
    faults = {(1, "fill", 2): died()}  # which plays on: three fragments, never seen
    settings, _ = flaky(faults, monkeypatch, depth=3, inner=inner)
    sampler, _ = live(settings, Brief, ps.PPO(epochs=1))
    try:
        for itr in range(9):
            batch, _ = sampler.obtain_samples(itr)
        assert batch.valid[:, 2:4].any()
    finally:
        sampler.shutdown()
    assert len(Brief.seeds) > 100 and len(set(Brief.seeds)) == len(Brief.seeds)


@pytest.mark.parametrize("random_steps", [0, 500])
def test_nor_one_that_a_lost_runner_of_a_group_may_have_begun(
    random_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, backend = flaky({(1, "sample_counted", n): died() for n in (2, 7)}, monkeypatch)
    exp = replace(EXP, env=Brief, sampler=ps.SerialSampler(8, 2, max_decorrelation_steps=random_steps))
    with ps.EnvRunnerGroup(exp, 2, backend) as workers:
        monkeypatch.setattr(Brief, "seeds", [])  # only now: the check of the environment has seeds of the run too
        for _ in range(5):
            workers.sample()
        stream = workers.sample_async(max_in_flight=3)
        assert all(next(stream).valid.any() for _ in range(20))
        assert dict(workers.faults.counts) == {"signal": 2, "restarts": 2}
    assert len(Brief.seeds) > 100 and len(set(Brief.seeds)) == len(Brief.seeds)


def test_the_columns_of_an_absent_runner_hold_nothing_of_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({(1, "fill", 2): died()}, monkeypatch)
    sampler, _ = live(settings, *CASES["lstm"])
    try:
        for itr in range(3):
            batch, _ = sampler.obtain_samples(itr)
            held = [x[:, 2:4] for key, column in batch.info.items() if key != "env" for x in tree_leaves(column)]
            held += [x[2:4] for x in tree_leaves(batch.state)]
            if itr:
                assert [bool(x.any()) for x in held] == [itr < 2] * 3  # logp and two states
    finally:
        sampler.shutdown()


def test_a_runner_lost_at_once_after_resuming_stands_still_where_the_last_batch_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, _ = flaky({}, monkeypatch, depth=2)
    one, _ = live(settings, Seeded, ps.PPO(epochs=1))
    for itr in range(4):  # so that the batches ahead, 4 and 5, fill the first of the four buffers and another
        one.obtain_samples(itr)
    state = copy.deepcopy(one.state_dict())
    one.shutdown()
    settings, _ = flaky({(1, "fill", 0): died()}, monkeypatch, depth=2)
    two, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        two.load_state_dict(state)
        batches = [two.obtain_samples(itr)[0].copy() for itr in range(4, 8)]
        assert [bool(batch.valid[:, 2:4].any()) for batch in batches] == [True, True, False, False]
        for before, after in zip(batches, batches[1:]):
            np.testing.assert_array_equal(before.obs[-1], after.obs[0])
    finally:
        two.shutdown()


def test_a_checkpoint_says_when_each_episode_began_by_the_drivers_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({(1, "fill", 2): died()}, monkeypatch, depth=1)  # the successor has played fewer fragments
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        for itr in range(6):
            sampler.obtain_samples(itr)
        state = sampler.state_dict()["inner"]
        pool, steps = state["pool"], state["row"]["shared"]["obs"][:, 1]
        going = [b for b in range(6) if not pool["ended"][b]]
        assert {2, 3} & set(going)
        assert pool["tick"] == 7 * 5  # with the batch ahead
        assert [pool["tick"] - pool["began"][b] for b in going] == [int(steps[b]) for b in going]
    finally:
        sampler.shutdown()


def test_faults_inside_a_runner_still_count_when_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SerialPool, "metrics", lambda self: {"faults/oom": 2.0})  # as of workers of its own
    settings, _ = flaky({(1, "fill", 2): died()}, monkeypatch)
    counted: list[float] = []
    echoes(settings, 6, lambda itr, sampler: counted.append(sampler.metrics().get("faults/oom", 0.0)))
    assert counted == [0, 6, 6, 6, 8, 8]


@pytest.mark.parametrize("mode", ["rounds", "ready"])
def test_a_checkpoint_brings_its_own_counts_of_faults(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({(1, "fill", 2): died()}, monkeypatch, mode=mode)
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        monkeypatch.setattr(SerialPool, "metrics", lambda self: {"faults/oom": 2.0})
        for itr in range(12):
            sampler.obtain_samples(itr)
        found = {name: n for name, n in sampler.metrics().items() if name.startswith("faults/")}
        assert found["faults/signal"] == 1 and found["faults/oom"] == 8
        state = copy.deepcopy(sampler.state_dict())
        sampler.runners.lost(2, died("timeout"))
        monkeypatch.setattr(SerialPool, "metrics", lambda self: {})  # runners that go on count from 0
        sampler.load_state_dict(state)
        assert {name: n for name, n in sampler.metrics().items() if name.startswith("faults/")} == found
    finally:
        sampler.shutdown()


@pytest.mark.parametrize("mode", ["rounds", "ready"])
def test_slots_of_a_runner_that_cannot_go_on_from_a_checkpoint_are_cut(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = flaky({(1, "resume", 0): died()}, monkeypatch, mode=mode)
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        sampler.obtain_samples(0)
        sampler.load_state_dict(copy.deepcopy(sampler.state_dict()))
        assert sampler.cut_slots == [2, 3]
        assert all(sampler.obtain_samples(itr)[0].valid.any() for itr in range(1, 9))
        assert sampler.runners.alive == [0, 1, 2]
    finally:
        sampler.shutdown()


def test_a_push_that_a_lost_runner_owed_is_not_held_against_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend = flaky({(1, "take_weights", 0): died()}, monkeypatch)
    with ps.EnvRunnerGroup(EXP, 2, backend) as workers:
        workers.sync_weights()
        workers.runners.lost(1, died("timeout"))
        workers.sample()
        assert workers.sample().valid.shape[1] == 4
        assert dict(workers.faults.counts) == {"timeout": 1, "restarts": 1}


def test_a_replacement_that_starts_while_agents_are_installed_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runners died while they started, one replacement came up, and the other was given no agent."""
    settings, backend = flaky({(i, "describe", 0): died() for i in range(2)}, monkeypatch, runners=2)
    ready = iter([2, 1])  # calls of both that fail, one of a replacement, and none until the agent is there
    with monkeypatch.context() as busy:
        busy.setattr(backend, "wait", lambda calls, timeout_s: list(calls)[: next(ready, 0)])
        sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        assert sampler.runners.alive == [0]
        assert [sampler.obtain_samples(itr)[0].valid[:, 2:].any() for itr in range(2)] == [True, True]
        assert sampler.runners.faults.counts["signal"] == 2
    finally:
        sampler.shutdown()


def test_a_replacement_that_starts_while_weights_are_sent_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend = flaky({}, monkeypatch)
    with ps.EnvRunnerGroup(EXP, 2, backend) as workers:
        workers.sync_weights()
        workers.runners.lost(1, died())
        with monkeypatch.context() as busy:
            busy.setattr(backend, "wait", lambda calls, timeout_s: [])
            workers.runners.restore()
        assert workers.alive == [0]
        workers.sync_weights()
        batch: Any = workers.sample()
        version = batch.version
        assert np.unique(version[:, :2]).tolist() == np.unique(version[:, 2:]).tolist() == [2]


def test_in_ready_mode_the_deadline_runs_from_the_fragment_before(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, backend = flaky({}, monkeypatch, runners=2, mode="ready", depth=3, deadline_s=60.0)
    now, turn = [1000.0], [0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    monkeypatch.setattr(backend, "wait", lambda calls, timeout_s: [list(calls)[turn[0] % len(calls)]])
    try:
        for itr in range(8):  # each runner delivers every 80 s, of which it is waited for 40
            turn[0] = itr
            sampler.obtain_samples(itr)
            now[0] += 40.0
        assert sampler.runners.alive == [0, 1]
        assert not sampler.runners.faults.counts
    finally:
        monkeypatch.undo()
        sampler.shutdown()


def test_a_replacement_that_does_not_come_up_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend = flaky({}, monkeypatch)
    now = [1000.0]
    monkeypatch.setattr(faults_of_workers, "_FIRST_DELAY_S", 5.0)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with ps.EnvRunnerGroup(EXP, 2, backend, start_timeout_s=10.0) as workers:
        monkeypatch.setattr(backend, "wait", lambda calls, timeout_s: [])
        workers.runners.lost(1, died())
        for seconds in (0, 11, 1, 1):  # it is started, given up, and its successor waits out a delay of 10 s
            now[0] += seconds
            workers.runners.restore()
        assert dict(workers.faults.counts) == {"signal": 1, "timeout": 1, "restarts": 2}
        assert workers.alive == [0]
    monkeypatch.undo()


def test_what_a_lost_runner_was_asked_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend = flaky({(1, "sample_counted", n): died() for n in (1, 2)}, monkeypatch)
    with ps.EnvRunnerGroup(EXP, 2, backend) as workers:
        stream = workers.sample_async(max_in_flight=2)
        assert all(next(stream).valid.any() for _ in range(12))
        assert dict(workers.faults.counts) == {"signal": 1, "restarts": 1}


def test_a_loss_is_told_with_the_process_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend = flaky({}, monkeypatch)
    with ps.EnvRunnerGroup(EXP, 2, backend, restarts=1) as workers:
        with pytest.warns(UserWarning, match=rf"runner 1 \(.*, pid {os.getpid()}\), slots 2 to 3: killed"):
            workers.runners.lost(1, died())
        with pytest.raises(EnvWorkerError, match=r"^runner 1, slots 2 to 3: killed"):
            workers.runners.lost(1, died())  # before its successor has come up


@pytest.mark.parametrize(
    ("error", "kind", "raises"),
    [
        (died("node"), "exit", None),
        (RunnerError("exception", "x", "", "EnvContractError"), "contract", EnvContractError),
        (RunnerError("exception", "x", "", "ZeroDivisionError"), "exception", EnvWorkerError),
        (RunnerError("exception", "x", "", "MissingExtraError"), None, ConfigError),
    ],
)
def test_losses_by_their_kind(error: Any, kind: Any, raises: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend = flaky({}, monkeypatch)
    with ps.EnvRunnerGroup(EXP, 2, backend) as workers:
        with contextlib.nullcontext() if raises is None else pytest.raises(raises) as raised:
            workers.runners.lost(1, error)
        assert raises is None or type(raised.value) is raises
        assert workers.faults.counts["restarts"] == (raises is None)
        assert set(workers.faults.counts) - {"restarts"} == ({kind} if kind else set())


def test_native_environments_never_begin_twice_with_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def vector() -> Any:
        return gym.make_vec("CartPole-v1", 2, "sync", vector_kwargs={"autoreset_mode": "NextStep"})

    settings, _ = flaky({}, monkeypatch, runners=2, inner=ps.SerialSampler(8, 2))
    sampler, _ = live(settings, vector, ps.PPO())
    try:
        sampler.obtain_samples(0)
        for times in (1, 2):
            sampler.load_state_dict(copy.deepcopy(sampler.state_dict()))
            assert sampler.state_dict()["pool"]["restarts"] == times
        sampler.runners.lost(1, died())
        sampler.obtain_samples(1)
        assert sampler.state_dict()["pool"]["restarts"] == 8 + 1  # by the steps so far
    finally:
        sampler.shutdown()


def test_versions_of_the_first_batches_are_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({}, monkeypatch, depth=1)
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        assert [int(sampler.obtain_samples(itr)[0].version.max()) for itr in range(5, 9)] == [5, 5, 6, 7]
    finally:
        sampler.shutdown()


def test_what_was_evaluated_is_not_what_acts_next(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for evaluated in (False, True):
        settings, _ = flaky({}, monkeypatch)
        sampler, policy = live(settings, *CASES["cartpole"])
        try:
            sampler.obtain_samples(0)
            if evaluated:
                kept = copy.deepcopy(policy.agent.state_dict())
                for x in policy.agent.parameters():
                    x.data.mul_(-3.0)
                sampler.evaluate_agent(0, 6)
                policy.agent.load_state_dict(kept)
            found.append(bits(sampler.obtain_samples(0)[0]))  # of the version of the batch before
        finally:
            sampler.shutdown()
    assert found[0] == found[1]
