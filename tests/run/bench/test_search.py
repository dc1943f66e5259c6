from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from penstock.core.machine import Machine
from penstock.run.bench import search
from penstock.run.bench.costs import Costs
from penstock.run.bench.search import (
    Row,
    bench,
    candidates,
    choose,
    describe,
    explain,
    in_turn,
    predict,
    settings_of,
    with_settings,
)
from penstock.run.plan import Plan
from tests.run.bench.short import BASE, costs, experiment

pytestmark = pytest.mark.usefixtures("nothing_left_set")


@pytest.fixture(autouse=True)
def _measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_SHORTEST_S", 0.05)


FOUR = Machine(cores=((0,), (1,), (2,), (3,)), nodes=(0, 0, 0, 0))


def made(name: str, workers: int = 1, groups: int = 1, B: int = 16) -> Any:
    return with_settings(ps.SerialSampler(T=8, B=B), {"name": name, "workers": workers, "groups": groups})


# Which are tried, and which is taken


def test_candidates_keep_what_is_in_a_batch_and_leave_no_worker_without_a_slot() -> None:
    base = ps.SerialSampler(T=8, B=6, reset="batch_end", discount=0.9)
    found = candidates(base, FOUR, False, True, "cpu")
    assert {settings_of(s)["name"] for s in found} == {"serial", "cpu", "gpu", "alternating"}
    assert all((s.T, s.B, s.reset, s.discount) == (8, 6, "batch_end", 0.9) for s in found)
    assert max(s.workers for s in found if isinstance(s, ps.CpuSampler)) <= 4
    assert all(s.workers * 2 <= 6 for s in found if isinstance(s, ps.AlternatingSampler))
    assert len({repr(s) for s in found}) == len(found)


def test_one_slot_cannot_alternate_and_a_native_environment_is_stepped_here() -> None:
    assert not any(
        isinstance(s, ps.AlternatingSampler) for s in candidates(ps.SerialSampler(B=1), FOUR, False, True, "cpu")
    )
    assert candidates(BASE, FOUR, True, True, "cpu") == [BASE]


def test_elsewhere_than_on_the_cpu_workers_do_not_act() -> None:
    names = {settings_of(s)["name"] for s in candidates(BASE, FOUR, False, True, "cuda")}
    assert names == {"serial", "gpu", "alternating"}


@pytest.mark.parametrize("name", ["serial", "cpu", "gpu", "alternating"])
def test_settings_make_the_sampler_again(name: str) -> None:
    sampler = made(name, 2, 2 if name == "alternating" else 1)
    assert with_settings(ps.SerialSampler(T=8, B=16), settings_of(sampler)) == sampler
    assert describe(sampler).startswith(name)


def test_predictions_by_hand() -> None:
    parts = costs(step=10, forward=100, shake=20)
    assert predict(made("serial"), parts) == 16 * 10 + 100
    assert predict(made("cpu", 4), parts) == 4 * 10 + 100
    assert predict(made("gpu", 4), parts) == 4 * 10 + 20 + 100
    assert predict(made("alternating", 4, 2), parts) == 2 * 100


def test_serial_comes_first_and_then_the_best_of_each() -> None:
    rows = [
        Row(made("gpu", 4), 5),
        Row(made("cpu", 1), 3),
        Row(made("cpu", 2), 2),
        Row(made("serial"), 9),
        Row(made("cpu", 4), 4),
    ]
    assert [describe(row.sampler) for row in in_turn(rows)] == [
        "serial", "cpu, 2 workers", "gpu, 4 workers", "cpu, 1 worker", "cpu, 4 workers",
    ]  # fmt: skip


def test_the_simpler_of_two_equals_is_taken() -> None:
    rows = [Row(made("cpu", 4), 1, 1000.0), Row(made("cpu", 2), 1, 960.0), Row(made("serial"), 1, 940.0)]
    assert choose(rows).sampler == made("cpu", 2)
    assert choose([rows[0], replace(rows[2], steps_per_s=951.0)]).sampler == made("serial")


@pytest.mark.parametrize(
    ("sampler", "parts", "words"),
    [
        (made("serial"), costs(4, 30, 50), "env.step is 4 us and a hand-shake 50 us"),
        (made("cpu", 4), costs(400, 30, 50), "4 workers act by themselves"),
        (made("alternating", 4, 2), costs(10, 1440, 50), "inference is 90% of a step: alternating"),
        (made("gpu", 4), costs(2000, 60, 50), "one forward of 16 rows (60 us)"),
    ],
)
def test_says_why(sampler: Any, parts: Costs, words: str) -> None:
    assert words in explain(Row(sampler, 1, 1.0), parts, 3, 3)
    assert "2 of 3" in explain(Row(sampler, 1, 1.0), parts, 2, 3)


# All of it


@pytest.mark.usefixtures("forked")
def test_a_benchmark_measures_what_it_has_time_for_and_leaves_nothing_set() -> None:
    verdict = bench(Plan.with_usual_sampler(experiment()), 1.0)
    assert verdict.best.steps_per_s > 0
    assert verdict.rows[0].steps_per_s >= verdict.best.steps_per_s
    for row in verdict.rows:
        assert (row.steps_per_s > 0) != bool(row.note), row


def test_one_sampler_is_measured_however_late_it_is() -> None:
    verdict = bench(Plan.with_usual_sampler(experiment()), 1e-3)
    assert verdict.best.sampler == BASE
    assert {row.note for row in verdict.rows[1:]} == {"no time left"}


TWO = ps.Policies({"a": ps.A2C(), "b": ps.DQN()}, policy_mapping_fn={"agent_0": "a", "agent_1": "b"})


@pytest.mark.parametrize(
    ("env", "algo"),
    [("TeamBits", TWO), pytest.param("Nim", ps.A2C(), marks=pytest.mark.slow)],
    ids=["at once", "in turn"],
)
def test_many_agents_are_measured_in_environment_steps(env: str, algo: Any) -> None:
    verdict = bench(Plan.with_usual_sampler(replace(experiment(), env=f"penstock.envs.toy:{env}", algo=algo)), 1e-3)
    assert verdict.best.sampler == BASE
    assert verdict.best.steps_per_s > 0
    assert verdict.costs.step_us > 0
    assert verdict.costs.unit == "environment"
    assert verdict.costs.forward(4) > 0


def test_an_environment_that_fails_is_the_error() -> None:
    exp = replace(experiment(), env="penstock.envs.toy:FaultEnv", env_kwargs={"fault": "raise_in_init"})
    with pytest.raises(ps.PenstockError):
        bench(Plan.with_usual_sampler(exp), 1.0)
