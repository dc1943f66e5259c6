from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.run.bench.report import print_verdict, trace_sampler
from penstock.run.bench.search import BenchmarkResult, Timing
from penstock.run.plan import Plan
from tests.run.bench.short import BASE, ENV, experiment

pytestmark = pytest.mark.usefixtures("nothing_left_set")

ROWS = (Timing(BASE, 2000.0), Timing(ps.CpuSampler(T=8, B=4, workers=2), 1000.0),
        Timing(ps.GpuSampler(T=8, B=4, workers=1), note="no room"))  # fmt: skip
VERDICT = BenchmarkResult(ROWS, ROWS[0], 2, "4 cores", 3.0)


def test_the_table_says_what_was_measured_and_names_every_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    print_verdict(experiment(), VERDICT, "penstock train a2c --env X")
    text = capsys.readouterr().out
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert lines[0].startswith("a2c on penstock.envs.toy:Counter, T=8, B=4, 4 cores; 3 s")
    assert lines[1] == "measured: collecting batches of T=2 (T=8 takes too long) with this environment and policy"
    for line in ("serial 2,000 100%", "cpu 2 1 1,000 50%", "gpu 1 1 no room"):
        assert line in lines
    assert lines[-1] == "penstock train a2c --env X"
    print_verdict(experiment(), replace(VERDICT, T=8), "")
    assert "measured: collecting batches of T=8 with this environment" in capsys.readouterr().out
    print_verdict(experiment(), replace(VERDICT, rows=(replace(ROWS[0], cut=True), *ROWS[1:])), "")
    text = capsys.readouterr().out
    assert "and policy; cut short: a batch took longer than the seconds for a sampler" in text
    assert "100%, cut short" in text and "50%, cut" not in text


@pytest.mark.parametrize("env", [ENV, pytest.param("penstock.envs.toy:TeamBits", marks=pytest.mark.slow)])
def test_the_recommended_sampler_leaves_a_timeline(env: str, tmp_path: Path) -> None:
    trace_sampler(Plan.with_usual_sampler(replace(experiment(), env=env)), VERDICT, tmp_path / "t.json")
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"step", "act", "learn"} <= names
    assert (tmp_path / "t.png").stat().st_size > 0
