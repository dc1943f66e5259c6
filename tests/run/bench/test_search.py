from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from penstock.core.machine import Machine
from penstock.run.bench import search
from penstock.run.bench.search import (
    Timing,
    bench,
    candidates,
    choose,
    describe,
    settings_of,
    with_settings,
)
from penstock.run.plan import Plan
from tests.run.bench.short import BASE, experiment

pytestmark = pytest.mark.usefixtures("nothing_left_set")


FOUR = Machine(cores=((0,), (1,), (2,), (3,)), nodes=(0, 0, 0, 0))


def made(name: str, workers: int = 1, groups: int = 1, B: int = 16) -> Any:
    return with_settings(ps.SerialSampler(T=8, B=B), {"name": name, "workers": workers, "groups": groups})


# Which are tried, and which is taken


def test_candidates_keep_what_is_in_a_batch_and_leave_no_worker_without_a_slot() -> None:
    base = ps.SerialSampler(T=8, B=6, reset="batch_end", discount=0.9)
    found = candidates(base, FOUR, False, True, "cpu")
    assert [describe(s) for s in found] == [
        "serial", "cpu, 1 worker", "cpu, 3 workers", "gpu, 1 worker", "gpu, 3 workers",
        "alternating, 1 worker x 2 groups", "alternating, 3 workers x 2 groups",
    ]  # fmt: skip
    assert all((s.T, s.B, s.reset, s.discount) == (8, 6, "batch_end", 0.9) for s in found)


def test_one_slot_cannot_alternate_and_a_native_environment_is_stepped_here() -> None:
    found = candidates(ps.SerialSampler(B=1), FOUR, False, True, "cpu")
    assert [describe(s) for s in found] == ["serial", "cpu, 1 worker", "gpu, 1 worker"]
    assert candidates(BASE, FOUR, True, True, "cpu") == [BASE]


def test_elsewhere_than_on_the_cpu_workers_do_not_act() -> None:
    names = {settings_of(s)["name"] for s in candidates(BASE, FOUR, False, True, "cuda")}
    assert names == {"serial", "gpu", "alternating"}


@pytest.mark.parametrize("name", ["serial", "cpu", "gpu", "alternating"])
def test_settings_make_the_sampler_again(name: str) -> None:
    sampler = made(name, 2, 2 if name == "alternating" else 1)
    assert with_settings(ps.SerialSampler(T=8, B=16), settings_of(sampler)) == sampler
    assert describe(sampler).startswith(name)


def test_the_simpler_of_two_equals_is_taken() -> None:
    rows = [
        Timing(made("cpu", 4), 1000.0),
        Timing(made("cpu", 2), 960.0),
        Timing(made("serial"), 940.0),
    ]
    assert choose(rows).sampler == made("cpu", 2)
    assert choose([rows[0], replace(rows[2], steps_per_s=951.0)]).sampler == made("serial")


# All of it


@pytest.mark.usefixtures("forked")
def test_every_candidate_is_measured_and_nothing_is_left() -> None:
    said: list[str] = []
    verdict = bench(Plan.with_usual_sampler(experiment()), 0.02, say=said.append)
    assert verdict.best.steps_per_s > 0
    assert [row.steps_per_s for row in verdict.rows] == sorted((r.steps_per_s for r in verdict.rows), reverse=True)
    assert all(row.steps_per_s > 0 and not row.note for row in verdict.rows)
    assert {describe(row.sampler) for row in verdict.rows} < set(said)
    assert 1 <= verdict.T <= BASE.T


@pytest.mark.usefixtures("forked")
def test_the_batches_of_a_slow_environment_are_shortened() -> None:
    exp = replace(experiment(), env=_slow, sampler=ps.SerialSampler(T=64, B=2))
    assert bench(Plan.with_usual_sampler(exp), 0.1).T < 8


@pytest.mark.usefixtures("forked")
def test_a_batch_that_takes_longer_than_all_seconds_is_the_only_one_and_the_row_says_so() -> None:
    exp = replace(experiment(), env=_slow, env_kwargs={"step_s": 0.05}, sampler=ps.SerialSampler(T=64, B=3))
    verdict = bench(Plan.with_usual_sampler(exp), 0.02)
    assert verdict.T == 1
    assert [(row.cut, round(row.steps_per_s * row.took_s)) for row in verdict.rows] == [(True, 3)] * len(verdict.rows)


@pytest.mark.usefixtures("forked")
def test_a_sampler_that_fails_is_left_out_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def no_room(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(self)
        raise ps.ConfigError("no room\nfor it")

    monkeypatch.setattr(ps.CpuSampler, "build", no_room)
    monkeypatch.setattr(ps.GpuSampler, "build", no_room)
    verdict = bench(Plan.with_usual_sampler(experiment()), 0.02)
    assert verdict.best.sampler == BASE
    assert {row.note for row in verdict.rows[1:]} == {"no room"}
    assert len(asked) == len(verdict.rows) - 1  # once, not in each pass


def test_speed_is_the_faster_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter([[(1.0, 1)], [(1.0, 99), (1.0, 10), (1.0, 30), (1.0, 50)], [(1.0, 99), (1.0, 20)]])
    monkeypatch.setattr(search, "_batches", lambda *_, **__: next(passes))
    monkeypatch.setattr(search, "candidates", lambda *_: [BASE])
    assert bench(Plan.with_usual_sampler(experiment()), 9.0).best.steps_per_s == 30


TWO = ps.Policies({"a": ps.A2C(), "b": ps.DQN()}, policy_mapping_fn={"agent_0": "a", "agent_1": "b"})


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("env", "algo"),
    [("TeamBits", TWO), pytest.param("Nim", ps.A2C(), marks=pytest.mark.slow)],
    ids=["at once", "in turn"],
)
def test_many_agents_are_measured_in_environment_steps(env: str, algo: Any) -> None:
    verdict = bench(Plan.with_usual_sampler(replace(experiment(), env=f"penstock.envs.toy:{env}", algo=algo)), 1e-3)
    assert {settings_of(row.sampler)["name"] for row in verdict.rows} == {"serial", "cpu", "gpu", "alternating"}
    assert all(row.steps_per_s > 0 for row in verdict.rows)


def test_an_environment_that_fails_is_the_error() -> None:
    exp = replace(experiment(), env="penstock.envs.toy:FaultEnv", env_kwargs={"fault": "raise_in_init"})
    with pytest.raises(ps.PenstockError):
        bench(Plan.with_usual_sampler(exp), 1.0)


def _slow(step_s: float = 0.002) -> Any:
    from penstock.envs.toy import Counter

    class Slow(Counter):
        def act(self, action: Any) -> tuple[float, bool, bool]:
            time.sleep(step_s)
            return super().act(action)

    return Slow()
