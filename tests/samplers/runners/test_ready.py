"""Ready mode: a batch is one runner's fragment, in the order in which they come."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core import trace
from penstock.core.errors import CheckpointError
from penstock.samplers.runners.settings import RunnerSampler
from penstock.testing.samplers import bits
from tests.samplers.placed import live
from tests.samplers.runners.test_faults import Seeded, died, flaky

pytestmark = pytest.mark.timeout(120)


def ready(n: int = 3, depth: int = 0, **settings: Any) -> RunnerSampler:
    inner = ps.SerialSampler(5, 2)
    return RunnerSampler(runners=n, inner=inner, backend="in-process", mode="ready", depth=depth, **settings)


def fragments(settings: Any, count: int, env: Any = Seeded, first: int = 0) -> Any:
    sampler, policy = live(settings, env, ps.PPO(epochs=1))
    try:
        out = []
        for itr in range(first, first + count):
            batch, episodes = sampler.obtain_samples(itr)
            out.append((batch.copy(), episodes))
            ps.train_one_step(policy, batch)
        return out, sampler.metrics()
    finally:
        sampler.shutdown()


def test_each_runner_follows_its_own_fragment_before() -> None:
    found, metrics = fragments(ready(), 12)
    columns: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for k, (batch, episodes) in enumerate(found):
        i = k % 3  # each is served in turn where all are ready
        if columns[i]:
            np.testing.assert_array_equal(columns[i][-1].obs[-1], batch.obs[0])
            np.testing.assert_array_equal(columns[i][-1].first[-1], batch.first[0])
        columns[i].append(batch)
        assert set(episodes.slot) <= {2 * i, 2 * i + 1}
    assert [len(x) for x in columns.values()] == [4, 4, 4]
    assert metrics["group/runners"] == 3


def test_fragments_are_those_of_the_same_slots_of_a_serial_sampler_at_equal_weights() -> None:
    env = Seeded
    serial, _ = live(ps.SerialSampler(5, 6), env, ps.PPO())
    there, _ = live(ready(), env, ps.PPO())
    try:
        for k in range(3):
            whole, _ = serial.obtain_samples(k)
            for i in range(3):
                batch, _ = there.obtain_samples(3 * k + i)
                mine = whole[:, 2 * i : 2 * i + 2]
                np.testing.assert_array_equal(batch.obs, mine.obs)
                np.testing.assert_array_equal(batch.action, mine.action)
    finally:
        serial.shutdown()
        there.shutdown()


def test_runners_are_asked_who_is_ready_once_for_all_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, _ = live(ready(), Seeded, ps.PPO())
    backend, asked = sampler.runners.backend, []
    wait = backend.wait
    monkeypatch.setattr(backend, "wait", lambda calls, s: asked.append(len(calls)) or wait(calls, s))
    try:
        for itr in range(9):
            sampler.obtain_samples(itr)
    finally:
        sampler.shutdown()
    assert asked == [3] * 3


@pytest.mark.parametrize("depth", [1, 3])
def test_lag_is_that_of_the_weights_when_the_fragment_was_asked_for(depth: int) -> None:
    found, metrics = fragments(ready(depth=depth), 20)
    lags = [k - batch.version for k, (batch, _) in enumerate(found)]
    assert all(len(np.unique(lag)) == 1 for lag in lags)
    assert metrics["sampler/lag"] == float(lags[-1].mean()) == 3 * depth


def test_a_runner_that_is_lost_while_a_checkpoint_waits_for_it_delivers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, backend = flaky({}, monkeypatch, mode="ready", depth=2)
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    try:
        sampler.obtain_samples(0)
        call = sampler._pools[1].requests[1][1]
        result = backend.result
        monkeypatch.setattr(backend, "result", lambda x, s: _raise(died()) if x is call else result(x, s))
        with pytest.warns(UserWarning, match="the runner is replaced"):
            state = sampler.state_dict()
        assert all(sampler.obtain_samples(itr)[0].valid.any() for itr in range(1, 12))
        assert [kept["runner"] for kept in state["waiting"]].count(1) == 1
        assert sampler.metrics()["faults/lost_steps"] == 5 * 2
    finally:
        sampler.shutdown()


def _raise(error: Exception) -> Any:
    raise error


def test_a_lost_runner_is_replaced_and_nothing_of_it_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {(1, "fill", 2): died(), (0, "fill", 4): died("timeout")}
    settings, _ = flaky(faults, monkeypatch, mode="ready")
    with pytest.warns(UserWarning, match="runner 1 .* it is replaced|the runner is replaced"):
        found, metrics = fragments(settings, 24)
    assert all(batch.valid.any() for batch, _ in found)
    assert metrics["faults/restarts"] == 2
    assert metrics["faults/lost_steps"] == 2 * 10
    opened = [float(batch.obs[t + 1, b, 0]) for batch, _ in found for t, b in np.argwhere(batch.first[1:])]
    assert len(set(opened)) == len(opened)


def test_resumes_with_what_was_on_its_way() -> None:
    settings = ready(depth=2)
    one, _ = live(settings, Seeded, ps.PPO())
    two, _ = live(settings, Seeded, ps.PPO())
    try:
        for itr in range(7):
            one.obtain_samples(itr)
        state = one.state_dict()
        two.load_state_dict(state)
        assert two.cut_slots == []
        for itr in range(7, 17):
            assert bits(one.obtain_samples(itr)[0]) == bits(two.obtain_samples(itr)[0])
    finally:
        one.shutdown()
        two.shutdown()


def test_the_wait_for_a_fragment_is_measured_and_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, backend = flaky({}, monkeypatch, mode="ready")
    sampler, _ = live(settings, Seeded, ps.PPO(epochs=1))
    spans: list[tuple[int, float]] = []

    class Noted:
        def add(self, kind: int, started: int, stopped: int = 0) -> None:
            spans.append((kind, (time.perf_counter_ns() - started) / 1e6))

    def slow(calls: Any, timeout_s: float) -> list[Any]:
        time.sleep(0.06 if len(calls) == 3 else 0.0)  # the wait for whoever is first, and not for the one that was
        return list(calls)

    monkeypatch.setattr(backend, "wait", slow)
    monkeypatch.setattr(trace, "ring", Noted())
    try:
        sampler.obtain_samples(0)
        assert sampler.metrics()["group/round_ms"] >= 60
        assert [kind for kind, ms in spans if ms >= 60] == [trace.WAIT]
    finally:
        sampler.shutdown()


def test_another_number_of_runners_is_refused() -> None:
    one, _ = live(ready(3), Seeded, ps.PPO())
    two, _ = live(ready(2), Seeded, ps.PPO())
    try:
        one.obtain_samples(0)
        with pytest.raises(CheckpointError, match="of 3 runners in ready mode; this sampler has runners=2"):
            two.load_state_dict(one.state_dict())
    finally:
        one.shutdown()
        two.shutdown()
