from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core import trace
from penstock.core.machine import Machine
from penstock.envs.check import check_env
from penstock.run.bench import cache as bench_cache
from penstock.run.bench.cache import auto_sampler
from penstock.run.bench.costs import Costs, measure_env, measure_forward, measure_handshake
from penstock.run.bench.search import (
    Row,
    Verdict,
    base_sampler,
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
from penstock.run.timeline import Tracing, chrome_trace

ENV = "penstock.envs.toy:Counter"
FOUR = Machine(cores=((0,), (1,), (2,), (3,)), nodes=(0, 0, 0, 0))
BASE = ps.SerialSampler(T=8, B=4)
QUIET = ps.RunConfig(steps=64, progress="off", tensorboard=False, eval_episodes=0)


def experiment(sampler: Any = BASE, **run: Any) -> ps.Experiment:
    return ps.Experiment(env=ENV, algo=ps.A2C(), sampler=sampler, run=replace(QUIET, **run))


def costs(step: float, forward: float, shake: float) -> Costs:
    return Costs(step, 2 * step, {4: forward, 16: forward}, shake)


def made(name: str, workers: int = 1, groups: int = 1, B: int = 16) -> Any:
    return with_settings(ps.SerialSampler(T=8, B=B), {"name": name, "workers": workers, "groups": groups})


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert trace.VARIABLE not in os.environ


# The parts


def test_an_environment_that_takes_2_ms_is_measured_so() -> None:
    config = ps.EnvConfig(_slow)
    spec = check_env(config).spec
    median, high = measure_env(config, spec, 0, 0.05)
    assert 2_000 <= median <= high


def _slow() -> Any:
    from penstock.envs.toy import Counter

    class Slow(Counter):
        def act(self, action: Any) -> tuple[float, bool, bool]:
            time.sleep(0.002)
            return super().act(action)

    return Slow()


def test_forward_and_handshake_take_some_time() -> None:
    spec = check_env(ENV).spec
    agent = ps.A2C().build(spec).agent
    assert measure_forward(agent, spec, 4, 0.02) > 1
    assert measure_handshake(0.02) > 0.5


def test_forward_between_two_measured_counts_lies_on_a_line() -> None:
    parts = Costs(1, 1, {4: 10.0, 12: 30.0}, 1)
    assert parts.forward(8) == 20.0
    assert parts.forward(5) == 20.0  # padded to 8 rows
    assert parts.forward(1) == 10.0


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
    verdict = bench(experiment(), 2.5)
    assert verdict.best.steps_per_s > 0
    assert verdict.rows[0].steps_per_s >= verdict.best.steps_per_s
    for row in verdict.rows:
        assert (row.steps_per_s > 0) != bool(row.note), row


def test_one_sampler_is_measured_however_late_it_is() -> None:
    verdict = bench(experiment(), 1e-3)
    assert verdict.best.sampler == BASE
    assert {row.note for row in verdict.rows[1:]} == {"no time left"}


def test_an_environment_that_fails_is_the_error() -> None:
    exp = replace(experiment(), env="penstock.envs.toy:FaultEnv", env_kwargs={"fault": "raise_in_init"})
    with pytest.raises(ps.PenstockError):
        bench(exp, 1.0)


# auto


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "samplers"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Benchmarks that were made; each finds gpu with 2 workers at once."""
    found: list[Any] = []

    def stand_in(exp: ps.Experiment, budget_s: float, same_device: bool = False) -> Verdict:
        found.append(exp)
        assert same_device
        best = Row(with_settings(base_sampler(exp), {"name": "gpu", "workers": 2}), 1.0, 5.0)
        return Verdict(costs(1, 1, 1), (best,), best, "because", "", 0.0)

    monkeypatch.setattr(bench_cache, "bench", stand_in)
    return found


def test_auto_is_measured_once_for_each_question(
    cache: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exp = experiment(progress="plain")
    first = auto_sampler(exp)
    assert first == ps.GpuSampler(T=8, B=4, workers=2)
    assert "kept in" in capsys.readouterr().out
    assert auto_sampler(exp) == first
    said = capsys.readouterr().out
    assert "as measured" in said
    assert str(cache) in said
    assert "because" in said
    assert len(asked) == 1
    for other in (
        replace(exp, sampler=replace(BASE, T=16)), replace(exp, sampler=replace(BASE, B=5)),
        replace(exp, env_kwargs={"terminate_at": 9}), replace(exp, algo=ps.A2C(net=ps.Net(hidden=(8,)))),
    ):  # fmt: skip
        before = len(asked)
        auto_sampler(other)
        assert len(asked) == before + 1
    assert len(list(cache.iterdir())) == 5
    auto_sampler(replace(exp, algo=ps.A2C(lr=1e-5), run=replace(exp.run, seed=7)))
    assert len(asked) == 5


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 1, "sampler": {"name": "os:system"}}', "\xff"])
def test_a_damaged_answer_is_measured_again(cache: Path, asked: list[Any], text: str) -> None:
    auto_sampler(experiment())
    path = next(cache.iterdir())
    path.write_text(text)
    assert auto_sampler(experiment()) == ps.GpuSampler(T=8, B=4, workers=2)
    assert len(asked) == 2
    answer = json.loads(path.read_text())
    answer["sampler"]["name"] = "os:system"
    path.write_text(json.dumps(answer))
    auto_sampler(experiment())
    assert len(asked) == 3


def test_a_cache_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    auto_sampler(experiment(progress="plain"))
    assert "not kept" in capsys.readouterr().out


def test_a_lambda_has_no_name_to_keep_it_by(cache: Path, asked: list[Any]) -> None:
    from penstock.envs.toy import Counter

    exp = replace(experiment(), env=lambda: Counter())
    auto_sampler(exp)
    auto_sampler(exp)
    assert len(asked) == 2
    assert not cache.exists()


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


# Traces


def traced(sampler: Any, path: Path, batches: int = 30) -> dict[str, Any]:
    with ps.Trainer(experiment(sampler, steps=10**6, trace=str(path))) as trainer:
        for _ in range(batches):
            trainer.train()
    return json.loads(path.read_text())


EXPECTED = {
    "serial": (BASE, {"learner": {"step", "act", "learn"}}),
    "cpu": (ps.CpuSampler(T=8, B=4, workers=2), {"learner": {"wait", "learn"}, "worker 0": {"step", "act", "wait"},
            "worker 1": {"step", "act", "wait"}}),
    "gpu": (ps.GpuSampler(T=8, B=4, workers=2), {"learner": {"serve", "send", "wait", "learn"}, "worker 0": {"step", "wait"},
            "worker 1": {"step", "wait"}}),
    "async": (ps.AsyncGpuSampler(inner=ps.GpuSampler(T=8, B=4, workers=1), depth=0),
              {"learner": {"learn"}, "sampler 0": {"serve", "send", "wait"}, "worker 0": {"step", "wait"}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_trace_says_who_did_what(kind: str, tmp_path: Path) -> None:
    sampler, expected = EXPECTED[kind]
    found = traced(sampler, tmp_path / "new" / "t.json")
    events = found["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == set(expected)
    assert len(names) == len(expected)
    spans = [e for e in events if e["ph"] != "M"]
    for pid, name in names.items():
        assert {e["name"] for e in spans if e["pid"] == pid} == expected[name]
    assert {e["ph"] for e in events} == {"X", "M"}
    assert all(e["ts"] >= 0 and e["dur"] >= 1 for e in spans)
    for row in {(e["pid"], e["tid"]) for e in spans}:
        mine = [e for e in spans if (e["pid"], e["tid"]) == row]
        for before, after in zip(mine, mine[1:]):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01, "spans of one process follow each other"
    assert sum(e["name"] == "learn" for e in spans) == 20
    if kind != "async":
        assert {e["tid"] for e in spans if e["name"] == "serve"} == ({1} if kind == "gpu" else set())
    assert (tmp_path / "new" / "t.png").stat().st_size > 10_000


def test_a_trace_that_a_short_run_cuts_holds_what_there_was(tmp_path: Path) -> None:
    found = traced(BASE, tmp_path / "t.json", batches=7)
    assert sum(e["name"] == "learn" for e in found["traceEvents"]) == 4


def test_a_trace_changes_no_bit(tmp_path: Path) -> None:
    def parameters(**run: Any) -> list[Any]:
        with ps.Trainer(experiment(ps.GpuSampler(T=8, B=4, workers=2), **run)) as trainer:
            for _ in range(6):
                trainer.train()
            return [x.clone() for x in trainer.policy.agent.state_dict().values()]

    plain, noted = parameters(), parameters(trace=str(tmp_path / "t.json"))
    assert all(torch.equal(x, y) for x, y in zip(plain, noted))


def test_a_full_ring_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "CAPACITY", 4)
    going_on = trace.Trace()
    ring = trace.ring
    assert ring is not None
    now = time.perf_counter_ns()
    for i in range(7):
        ring.add(trace.STEP, now + i - 10_000)
    going_on.since = now - 20_000
    (track,) = going_on.close()
    assert (track.spans[:, 0] - now + 10_000).tolist() == [3, 4, 5, 6]
    assert track.lost == 3
    assert chrome_trace([track])["otherData"] == {"lost_spans": {"learner": 3}}
    assert going_on.close() == []


def test_without_a_trace_functions_stay_what_they_are() -> None:
    assert trace.timed(trace.STEP, print) is print


def test_one_trace_at_a_time_and_a_name_in_json(tmp_path: Path) -> None:
    with pytest.raises(ps.ConfigError, match=r"\.json"):
        ps.RunConfig(trace="a.txt")
    first = Tracing(tmp_path / "a.json")
    with pytest.raises(ps.ConfigError, match="already"):
        Tracing(tmp_path / "b.json")
    first.close()
    assert not list(tmp_path.iterdir())  # nothing happened, nothing is written


def test_a_disk_that_refuses_a_trace_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with ps.Trainer(experiment(trace=str(tmp_path / "file" / "t.json"))) as trainer:
        for _ in range(5):
            trainer.train()
        with pytest.warns(UserWarning, match="trace not written"):
            trainer.stop()


def test_an_environment_that_fails_ends_the_trace(tmp_path: Path) -> None:
    exp = replace(experiment(trace=str(tmp_path / "t.json")), env_kwargs={"fault": "raise_in_init"})
    with pytest.raises(ps.PenstockError):
        ps.Trainer(exp)
