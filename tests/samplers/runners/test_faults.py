"""Runners that are lost: the batch still comes, what they owed is cut and counted, a successor goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import penstock as ps
from penstock.actors.backend import RunnerError
from penstock.actors.in_process import FinishedCall, InProcess
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.samplers.runners.settings import RunnerSampler
from penstock.workers import faults as faults_of_workers
from tests.samplers.placed import CASES, live

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:runner .* it is replaced"),
              pytest.mark.filterwarnings("ignore:runner .*the runner is replaced")]  # fmt: skip


class Seeded(gym.Env[Any, Any]):
    """Observation: the seed of the episode's reset, and steps so far; 7 steps an episode."""

    observation_space = gym.spaces.Box(-1.0, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)
    warns = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.t = float(-1 if seed is None else seed), 0
        return np.array([self.at, 0.0]), {}

    def step(self, action: Any) -> Any:
        if self.warns:
            warnings.warn("the motor is warm", stacklevel=1)
        self.t += 1
        return np.array([self.at, float(self.t)]), 1.0, self.t == 7, False, {}


class Warm(Seeded):
    warns = True


class Flaky(InProcess):
    """In-process runners, of which some calls fail: (runner, method, number of such calls before)."""

    def __init__(self, faults: dict[tuple[int, str, int], RunnerError]) -> None:
        super().__init__()
        self.faults, self.count = faults, dict[tuple[str, str], int]()
        self.killed: list[str] = []

    def call(self, runner: Any, method: str, *args: Any) -> FinishedCall:
        name = repr(runner)
        n = self.count.get((name, method), 0)
        self.count[name, method] = n + 1
        error = self.faults.pop((int(name.strip("<>").split()[-1]), method, n), None)
        return super().call(runner, method, *args) if error is None else FinishedCall(error=error)

    def kill(self, runner: Any) -> None:
        self.killed.append(repr(runner))
        super().kill(runner)


def died(kind: Any = "signal") -> RunnerError:
    return RunnerError(kind, "killed by signal 9 (SIGKILL)", "Traceback of the runner")


def flaky(
    faults: dict[tuple[int, str, int], RunnerError], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[RunnerSampler, Flaky]:
    backend = Flaky(faults)
    monkeypatch.setattr(RunnerSampler, "made_backend", lambda *_: backend)
    monkeypatch.setattr(faults_of_workers, "_FIRST_DELAY_S", 0.0)
    inner = settings.pop("inner", ps.SerialSampler(5, 2))
    return RunnerSampler(**{"runners": 3, "inner": inner, "backend": "in-process", **settings}), backend


def echoes(settings: Any, updates: int, before: Callable[[int, Any], None] = lambda itr, sampler: None) -> Any:
    """Copies of batches of an environment whose observations name the episode, and the sampler's metrics."""
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        batches = []
        for itr in range(updates):
            before(itr, sampler)
            batches.append(sampler.obtain_samples(itr)[0].copy())
        return batches, sampler.metrics()
    finally:
        sampler.shutdown()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lost_runner_costs_its_own_rows_and_nobody_elses(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, backend = flaky({(1, "fill", 2): died()}, monkeypatch, depth=depth)
    batches, metrics = echoes(settings, 8)
    clean, _ = echoes(replace(settings, backend="in-process"), 8)
    lost = range(2, 3 + depth)  # the fragment itself, and those that had been asked for after it
    for itr, (batch, whole) in enumerate(zip(batches, clean)):
        for mine, same in ((slice(0, 2), True), (slice(4, 6), True), (slice(2, 4), itr < 2)):
            assert same == np.array_equal(batch.obs[:, mine], whole.obs[:, mine]) or not same
        assert batch.valid[:, 2:4].any() == (itr not in lost)
        for name in ("obs", "first", "prev_action", "prev_reward"):
            if itr:
                np.testing.assert_array_equal(getattr(batch, name)[0], getattr(batches[itr - 1], name)[-1])
    assert not batches[max(lost) + 1].valid[0, 2:4].any()  # a reset row
    assert batches[max(lost) + 1].first[1, 2:4].all()
    assert metrics["faults/signal"] == metrics["faults/restarts"] == 1
    assert metrics["faults/lost_steps"] == 5 * 2 * len(lost)
    assert metrics["group/runners"] == 3
    assert backend.killed[0] == "<runner 1>"


@pytest.mark.parametrize("depth", [0, 2])
def test_a_runner_lost_in_an_evaluation_goes_on_from_the_row_before(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replacement comes while rounds are on their way that it has no part in, whose last rows are null."""
    settings, _ = flaky({(1, "open_evaluation", 0): died()}, monkeypatch, depth=depth)

    def evaluate(itr: int, sampler: Any) -> None:
        if itr == 4:
            sampler.evaluate_agent(itr, 3)

    batches, metrics = echoes(settings, 10, evaluate)
    assert metrics["faults/restarts"] == 1
    for before, batch in zip(batches, batches[1:]):
        for name in ("obs", "first", "prev_action", "prev_reward"):
            np.testing.assert_array_equal(getattr(batch, name)[0], getattr(before, name)[-1], err_msg=name)


def test_no_episode_is_played_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {(0, "fill", 1): died(), (0, "fill", 4): died("timeout"), (2, "fill", 3): died("exit")}
    settings, _ = flaky(faults, monkeypatch, depth=1, restarts=9)
    opened: dict[int, list[float]] = {b: [] for b in range(6)}
    batches, _ = echoes(settings, 10)
    for itr, batch in enumerate(batches):
        first = batch.first if itr == 0 else batch.first[1:]
        obs = batch.obs if itr == 0 else batch.obs[1:]
        for t, b in np.argwhere(first):
            opened[b].append(float(np.ravel(obs[t, b])[0]))
    for b, seeds in opened.items():
        assert len(seeds) > 2 and len(set(seeds)) == len(seeds), f"slot {b} began {seeds}"


def test_an_environments_exception_raises_with_its_place_and_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RunnerError("exception", "EnvWorkerError: slot 3 of Broken: step raised", "Traceback of the runner", "X")
    settings, _ = flaky({(1, "fill", 1): error}, monkeypatch)
    with pytest.raises(EnvWorkerError, match=r"(?s)runner 1.*slots 2 to 3.*slot 3 of Broken.*Traceback of the runner"):
        echoes(settings, 3)
    settings, _ = flaky({(1, "fill", 1): error}, monkeypatch, fault_policy="restart")
    assert echoes(settings, 3)[1]["faults/exception"] == 1


def test_a_setting_that_is_wrong_there_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({}, monkeypatch)
    with pytest.raises(ConfigError, match=r"runner 0.*NoSuchEnv"):
        settings.build("NoSuchEnv-v0")


def test_the_budget_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({(1, "fill", n): died() for n in range(9)}, monkeypatch, restarts=2)
    with pytest.raises(EnvWorkerError, match="runner 1 was replaced 2 times"):
        echoes(settings, 40)


def test_dropped_runners_leave_their_slots_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({(1, "fill", 1): died()}, monkeypatch, fault_policy="drop")
    with pytest.warns(UserWarning, match="its slots are dropped"):
        batches, metrics = echoes(settings, 4)
    assert [bool(batch.valid[:, 2:4].any()) for batch in batches] == [True, False, False, False]
    assert metrics["group/runners"] == 2
    assert metrics["faults/lost_steps"] == 3 * 10


def test_all_of_min_runners_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({(1, "fill", 1): died()}, monkeypatch, fault_policy="drop", min_runners=3)
    with (
        pytest.warns(UserWarning, match="dropped"),
        pytest.raises(EnvWorkerError, match="2 of 3 runners are left and min_runners=3"),
    ):
        echoes(settings, 4)


def test_a_replacement_that_fails_to_start_is_replaced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, backend = flaky({(1, "fill", 1): died(), (1, "describe", 1): died("exit")}, monkeypatch)
    batches, metrics = echoes(settings, 9)
    assert metrics["faults/exit"] == metrics["faults/signal"] == 1
    assert batches[-1].valid[:, 2:4].any() or metrics["group/runners"] == 2
    assert backend.killed.count("<runner 1>") >= 2


@pytest.mark.parametrize("method", ["resume", "install"])
def test_a_replacement_that_cannot_go_on_never_delivers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {(1, "fill", 1): died(), (1, method, 1 if method == "install" else 0): died("exception")}
    settings, _ = flaky(faults, monkeypatch, fault_policy="restart")
    batches, metrics = echoes(settings, 8)
    assert metrics["faults/exception"] == metrics["faults/signal"] == 1
    for one, two in zip(batches, batches[1:]):
        assert np.array_equal(one.obs[-1], two.obs[0])
    assert batches[-1].valid[:, 2:4].any()


def test_a_runner_that_never_comes_up_is_told_with_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, backend = flaky({(1, "fill", 1): died()}, monkeypatch, start_timeout_s=0.5, min_runners=3)
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        for itr in range(2):
            sampler.obtain_samples(itr)
        monkeypatch.setattr(backend, "wait", lambda calls, timeout_s: [])
        monkeypatch.setattr(backend, "crowded", lambda: "; it needs 3 CPUs, and 2 are free")
        with pytest.raises(EnvWorkerError, match=r"(?s)2 of 3 runners are up.*it needs 3 CPUs, and 2 are free"):
            sampler.obtain_samples(2)
        sampler.runners._where[0] = ""
        calls = {i: sampler.runners.call(i, "describe") for i in (0, 2)}
        with pytest.warns(UserWarning, match="has not come up within 0.5 s; it needs 3 CPUs") as told:
            sampler.runners.collect(calls, 0.5)
        assert "runner 2" in str(told[1].message) and "no answer within 0.5 s; if its work" in str(told[1].message)
    finally:
        sampler.shutdown()


def test_the_last_runner_that_is_late_is_told_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({(1, "describe", 1): died("timeout")}, monkeypatch)
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        with pytest.warns(UserWarning, match="runner 1.*no answer within 0.5 s; if its work"):
            sampler.runners.collect({1: sampler.runners.call(1, "describe")}, 0.5)
    finally:
        sampler.shutdown()


def test_an_evaluation_that_loses_a_runner_is_played_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    env, algo = CASES["lstm"]
    found = []
    for faults in ({}, {(1, "fill_evaluation", 0): died()}, {(0, "open_evaluation", 0): died()}):
        settings, _ = flaky(faults, monkeypatch)
        sampler, _ = live(settings, env, algo)
        try:
            sampler.obtain_samples(0)
            episodes = sampler.evaluate_agent(0, 11, deterministic=False)
            found.append((episodes.return_.tobytes(), episodes.length.tobytes(), episodes.slot.tobytes()))
            assert not faults
        finally:
            sampler.shutdown()
    assert found[0] == found[1] == found[2]


def test_native_environments_evaluate_with_the_slots_that_they_have_when_a_runner_comes_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def vector() -> Any:
        return gym.make_vec("CartPole-v1", 2, "sync", vector_kwargs={"autoreset_mode": "NextStep"})

    settings, _ = flaky({}, monkeypatch, runners=2, inner=ps.SerialSampler(8, 2))
    sampler, _ = live(settings, vector, ps.PPO())
    try:
        sampler.obtain_samples(0)
        sampler.runners.lost(1, died())
        assert np.bincount(sampler.evaluate_agent(0, 8).slot).tolist() == [4, 4]
        assert sampler.runners.alive == [0, 1]
        assert np.bincount(sampler.evaluate_agent(0, 8).slot).tolist() == [2, 2, 2, 2]
    finally:
        sampler.shutdown()


def test_training_over_lost_runners_stays_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {(0, "fill", 2): died(), (1, "fill", 3): died(), (2, "fill", 3): died()}
    faults |= {(i, "fill", 5): died() for i in range(3)}  # a batch without a valid row
    settings, _ = flaky(faults, monkeypatch, inner=ps.SerialSampler(8, 2))
    env, algo = CASES["lstm"]
    sampler, policy = live(settings, env, algo)
    try:
        for itr in range(8):
            batch, _ = sampler.obtain_samples(itr)
            metrics = ps.train_one_step(policy, batch)
            assert np.isfinite(list(metrics.values())).all()
            assert all(bool(x.isfinite().all()) for x in policy.agent.parameters())
    finally:
        sampler.shutdown()


def test_the_runners_warnings_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = flaky({}, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler, _ = live(settings, Warm, ps.PPO())
        for itr in range(3):
            sampler.obtain_samples(itr)
        sampler.shutdown()
    texts = [str(w.message) for w in caught if "runner 2" in str(w.message)]
    assert len(texts) == 1 and "the motor is warm" in texts[0]


class Fatal(Seeded):
    """Kills its process in a step where the file that PENSTOCK_TEST_MARK names exists; whoever removes it first dies."""

    def step(self, action: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.environ["PENSTOCK_TEST_MARK"])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_process_that_is_killed_in_an_evaluation_changes_none_of_its_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(tmp_path / "mark"))
    sampler, _ = live(RunnerSampler(2, ps.SerialSampler(5, 2), "processes"), Fatal, ps.PPO(epochs=1))
    try:
        found = []
        for killed in (False, True, False):
            sampler.obtain_samples(len(found))
            if killed:
                (tmp_path / "mark").touch()
            episodes = sampler.evaluate_agent(3, 9, deterministic=False)
            assert not (tmp_path / "mark").exists()
            found.append([x.tobytes() for x in (episodes.return_, episodes.length, episodes.slot)])
            assert sampler.metrics().get("faults/signal", 0) == (len(found) > 1)
        assert found[0] == found[1] == found[2]
        assert sampler.obtain_samples(3)[0].valid.any()
    finally:
        sampler.shutdown()
