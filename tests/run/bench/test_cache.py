from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.run.bench import cache as bench_cache
from penstock.run.bench.cache import auto_sampler
from penstock.run.bench.search import (
    BenchmarkResult,
    Timing,
    base_sampler,
    with_settings,
)
from penstock.run.plan import Plan
from tests.run.bench.short import BASE, ENV, QUIET, experiment

# auto


pytestmark = pytest.mark.usefixtures("nothing_left_set")


def chosen(exp: ps.Experiment) -> object:
    return auto_sampler(Plan.with_usual_sampler(exp))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "samplers"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Benchmarks that were made; each finds gpu with 2 workers at once."""
    found: list[Any] = []

    def stand_in(plan: Plan, same_device: bool = False) -> BenchmarkResult:
        found.append(plan)
        assert same_device
        best = Timing(with_settings(base_sampler(plan.exp), {"name": "gpu", "workers": 2}), 5.0)
        return BenchmarkResult((best, Timing(base_sampler(plan.exp), 4.0)), best, 8, "", 0.0)

    monkeypatch.setattr(bench_cache, "bench", stand_in)
    return found


def test_auto_is_measured_once_for_each_question(
    cache: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exp = experiment(progress="plain")
    first = chosen(exp)
    assert first == ps.GpuSampler(T=8, B=4, workers=2)
    said = capsys.readouterr().out
    assert "kept in" in said
    assert "steps/s of gpu, 2 workers: 5; serial: 4" in said
    assert chosen(exp) == first
    said = capsys.readouterr().out
    assert "as measured" in said
    assert str(cache) in said
    assert len(asked) == 1
    for other in (
        replace(exp, sampler=replace(BASE, T=16)), replace(exp, sampler=replace(BASE, B=5)),
        replace(exp, env_kwargs={"terminate_at": 9}), replace(exp, algo=ps.A2C(net=ps.Net(hidden=(8,)))),
    ):  # fmt: skip
        before = len(asked)
        chosen(other)
        assert len(asked) == before + 1
    assert len(list(cache.iterdir())) == 5
    chosen(replace(exp, algo=ps.A2C(lr=1e-5), run=replace(exp.run, seed=7)))
    assert len(asked) == 5


def test_auto_of_many_agents_is_one_question_for_each_way_to_seat_them(cache: Path, asked: list[Any]) -> None:
    shared = replace(experiment(), env="penstock.envs.toy:TeamBits")
    mapping = {"agent_0": "a", "agent_1": "b"}
    two = replace(shared, algo=ps.Policies({"a": ps.A2C(), "b": ps.A2C()}, policy_mapping_fn=mapping))
    for exp in (shared, two, shared, two):
        assert chosen(exp) == ps.GpuSampler(T=8, B=4, workers=2)
    assert len(asked) == len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 1, "sampler": {"name": "os:system"}}', "\xff"])
def test_a_damaged_answer_is_measured_again(cache: Path, asked: list[Any], text: str) -> None:
    chosen(experiment())
    path = next(cache.iterdir())
    path.write_text(text)
    assert chosen(experiment()) == ps.GpuSampler(T=8, B=4, workers=2)
    assert len(asked) == 2
    answer = json.loads(path.read_text())
    answer["sampler"]["name"] = "os:system"
    path.write_text(json.dumps(answer))
    chosen(experiment())
    assert len(asked) == 3


def test_a_cache_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    chosen(experiment(progress="plain"))
    assert "not kept" in capsys.readouterr().out


def test_a_lambda_has_no_name_to_keep_it_by(cache: Path, asked: list[Any]) -> None:
    from penstock.envs.toy import Counter

    exp = replace(experiment(), env=lambda: Counter())
    chosen(exp)
    chosen(exp)
    assert len(asked) == 2
    assert not cache.exists()


@pytest.mark.usefixtures("forked")
def test_a_run_stores_what_was_chosen_and_resume_does_not_ask(cache: Path, asked: list[Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    exp = ps.Experiment(env=ENV, algo=ps.A2C(), sampler="auto", run=replace(QUIET, dir=str(run)))
    ps.train(exp)
    stored = json.loads((run / "config.json").read_text())["experiment"]["sampler"]
    assert stored["class"].endswith(":GpuSampler")
    assert stored["workers"] == 2
    assert (stored["T"], stored["B"]) == tuple(ps.A2C().batch)
    ps.resume(run, {"run.steps": 256})
    assert len(asked) == 1
