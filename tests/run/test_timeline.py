from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core import trace
from penstock.run.timeline import Tracing, chrome_trace
from tests.run.bench.short import BASE, experiment

# Traces


pytestmark = pytest.mark.usefixtures("nothing_left_set")


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


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kind", ["serial", pytest.param("cpu", marks=pytest.mark.slow), "gpu", "async"])
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


@pytest.mark.usefixtures("forked")
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
