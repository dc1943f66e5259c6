from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.run.bench.report import print_verdict, trace_sampler
from penstock.run.bench.search import Row, Verdict
from penstock.run.plan import Plan
from tests.run.bench.short import BASE, ENV, costs, experiment

pytestmark = pytest.mark.usefixtures("nothing_left_set")

ROWS = (Row(BASE, 10.0, 2000.0), Row(ps.CpuSampler(T=8, B=4, workers=2), 20.0, 1000.0),
        Row(ps.GpuSampler(T=8, B=4, workers=1), 30.0, note="no time left"))  # fmt: skip
VERDICT = Verdict(costs(5.0, 20.0, 7.0), ROWS, ROWS[0], "stepping is cheap", "4 cores", 3.0)


def test_the_tables_name_every_part_and_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    print_verdict(experiment(), VERDICT, "penstock train a2c --env X")
    text = capsys.readouterr().out
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert lines[0].startswith("a2c on penstock.envs.toy:Counter, T=8, B=4, 4 cores; 3 s")
    for line in ("env.step 5.0 10.0", "forward of 4 rows 20.0", "hand-shake: learner to worker and back 7.0",
                 "serial 2,000 100%", "cpu 2 1 1,000 50%", "gpu 1 1 no time left"):  # fmt: skip
        assert line in lines
    assert "stepping is cheap" in text
    assert lines[-1] == "penstock train a2c --env X"


@pytest.mark.parametrize("env", [ENV, pytest.param("penstock.envs.toy:TeamBits", marks=pytest.mark.slow)])
def test_the_recommended_sampler_leaves_a_timeline(env: str, tmp_path: Path) -> None:
    trace_sampler(Plan.with_usual_sampler(replace(experiment(), env=env)), VERDICT, tmp_path / "t.json")
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"step", "act", "learn"} <= names
    assert (tmp_path / "t.png").stat().st_size > 0
