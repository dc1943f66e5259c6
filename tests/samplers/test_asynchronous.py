"""Settings of asynchronous samplers, and the parameters that each of their batches is collected with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.samplers import asynchronous
from tests.samplers.placed import CASES, differences, live, run

pytestmark = pytest.mark.timeout(300)


@pytest.mark.usefixtures("forked")
def test_depth_one_is_the_same_from_run_to_run_and_from_sampler_to_sampler() -> None:
    inner = ps.CpuSampler(16, 8, workers=2), ps.SerialSampler(16, 8)
    settings = [ps.AsyncSampler(each, depth=1) for each in (*inner, inner[1])]
    (one, parameters), *others = (run(each, *CASES["cartpole"], 5) for each in settings)
    for other, other_parameters in others:
        assert differences(one, other) == []
        assert parameters == other_parameters


@pytest.mark.usefixtures("forked")
def test_the_newest_weights_are_no_older_than_the_depth() -> None:
    settings = ps.AsyncCpuSampler(ps.CpuSampler(16, 8, workers=1), depth=1, weights="newest")
    sampler, policy = live(settings, *CASES["cartpole"])
    try:
        for itr in range(10):
            batch, _ = sampler.obtain_samples(itr)
            assert ((itr - 1 <= batch.version) & (batch.version <= itr))[batch.valid].all()
            ps.train_one_step(policy, batch)
    finally:
        sampler.shutdown()


@pytest.mark.usefixtures("forked")
def test_versions_and_lag_are_those_of_the_depth() -> None:
    sampler, _ = live(ps.AsyncSerialSampler(ps.SerialSampler(8, 4), depth=2), "CartPole-v1", ps.PPO())
    try:
        for itr in range(6):
            batch, _ = sampler.obtain_samples(itr)
            assert (batch.version[batch.valid] == max(itr - 2, 0)).all()
            assert sampler.metrics()["sampler/lag"] == min(itr, 2)
        with pytest.raises(ConfigError, match=r"obtain_samples\(9\), but batch 6 is next"):
            sampler.obtain_samples(9)
    finally:
        sampler.shutdown()


@pytest.mark.usefixtures("forked")
def test_stale_data_is_refused_where_an_algorithm_cannot_take_it() -> None:
    from penstock.run.trainer import Trainer

    exp = ps.Experiment("CartPole-v1", ps.A2C(), ps.AsyncSerialSampler(ps.SerialSampler(5, 4), depth=1))
    with pytest.raises(ConfigError, match=r"depth=1 .*and A2C learns only from.*use depth=0"):
        Trainer(exp)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.AsyncSampler(ps.SerialSampler(), depth=-1), "depth=-1"),
        (lambda: ps.AsyncSampler(ps.AsyncSerialSampler()), "synchronous sampler's settings"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": -2}, r"^sampler\.depth=-2; expected 0 or more$"),
        ({"depth": 1.5}, r"depth"),
        ({"weights": "latest"}, r"weights"),
        (
            {"inner": ps.AsyncSampler()},
            r"^sampler\.inner=AsyncSampler\(.*expected a synchronous sampler's settings, e\.g\.",
        ),
        (
            {"inner": "serial"},
            r"^sampler\.inner='serial'; expected a synchronous sampler's settings, e\.g\. ps\.CpuSampler",
        ),
        (
            {"fault_policy": "drop"},
            r"^sampler\.fault_policy='drop' would leave no slot .*; set it at the inner sampler$",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_setting_that_cannot_be_is_named_with_what_to_change(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.AsyncSampler(**settings)


@pytest.mark.parametrize("inner", [ps.SerialSampler(9, 4), ps.CpuSampler(9, 4), ps.GpuSampler(9, 4)])
def test_a_process_is_told_its_limits_whatever_its_sampler(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def workers(*args: Any, **named: Any) -> Any:
        made.append((args, named))
        return SimpleNamespace(close=lambda: made.append("closed"))

    def fails(*args: Any) -> Any:
        raise RuntimeError("no such simulator")

    monkeypatch.setattr(asynchronous, "Workers", workers)
    monkeypatch.setattr(asynchronous, "AsyncLive", fails)
    settings = ps.AsyncSampler(inner, step_timeout_s=7.0, start_timeout_s=11.0, fault_policy="raise")
    with pytest.raises(RuntimeError, match="no such simulator"):
        settings.build("CartPole-v1", 5)
    (count, seed, faults, step_s, start_s), named = made[0]
    assert (count, seed, faults.policy, step_s, start_s) == (1, 5, "raise", 7.0, 11.0)
    assert named["module"] == "penstock.samplers.async_process"
    assert made[1:] == ["closed"]
    assert settings.spec == (9, 4)
