"""Studies that are killed with kill -9 and go on, by real runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.studies.study_file import STATE
from tests.cli.short import SHORT

SEARCH = (
    "tune", "a2c", "--env", "CartPole-v1", *SHORT, "--run.steps", "640", "--trials", "4",
    "--search", "algo.lr=loguniform(1e-4,1e-2)", "algo.entropy_coef=choice(0,0.01)", "--run.checkpoint-interval", "64",
)  # fmt: skip
SWEEP = (
    "launch", "a2c", "--env", "CartPole-v1", *SHORT, "--run.steps", "640", "--slots", "1",
    "--seeds", "1,2", "--grid", "algo.lr=1e-3,1e-4", "--run.checkpoint-interval", "64",
)  # fmt: skip


def record(folder: Path) -> list[dict[str, Any]]:
    """The trials without what time it took, and without how often they were begun."""
    trials = json.loads((folder / STATE).read_text())["trials"]
    return [{**t, "run": t["run"]["name"]} for t in trials]


def scores(folder: Path) -> int:
    """How many scores the trials have by now."""
    try:
        return sum(len(t["scores"]) for t in record(folder))
    except FileNotFoundError:
        return 0


def killed_at(count: int, folder: Path, child: Any, pause_s: float) -> None:
    """Kills a search so long after its trials have so many scores."""
    deadline = time.monotonic() + 500
    while scores(folder) < count:
        assert child.running, child.output
        assert time.monotonic() < deadline, child.output
        time.sleep(0.02)
    time.sleep(pause_s)
    child.kill()


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param((*SEARCH, "--scheduler", "asha", "--interval", "128"), id="asha"),
        pytest.param((*SEARCH, "--scheduler", "median", "--interval", "320"), id="median"),
        pytest.param((*SEARCH, "--scheduler", "pbt", "--interval", "320"), id="pbt"),
        pytest.param((*SEARCH, "--scheduler", "none"), id="none"),
        pytest.param(SWEEP, id="sweep"),
    ],
)
def test_a_study_killed_three_times_equals_one_that_was_not(
    line: tuple[str, ...], tmp_path: Path, zygote: Any, same_run: Callable[[Path, Path], None]
) -> None:
    whole = zygote.cli(*line, "--dir", str(tmp_path / "whole"))
    assert whole.wait(timeout=900) == 0, whole.output
    total = scores(tmp_path / "whole")
    for part, pause_s in ((0.25, 1.0), (0.5, 0.0), (0.7, 2.0)):
        killed_at(int(part * total), tmp_path / "cut", zygote.cli(*line, "--dir", str(tmp_path / "cut")), pause_s)
    last = zygote.cli(*line, "--dir", str(tmp_path / "cut"))
    assert last.wait(timeout=900) == 0, last.output
    assert record(tmp_path / "cut") == record(tmp_path / "whole")
    for trial in record(tmp_path / "whole"):
        same_run(tmp_path / "whole" / trial["run"], tmp_path / "cut" / trial["run"])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_at_a_time_lose_no_finished_trial_and_repeat_none(tmp_path: Path, zygote: Any) -> None:
    line = (*SEARCH, "--scheduler", "asha", "--interval", "128", "--parallel", "2", "--dir", str(tmp_path / "x"))
    ended: dict[tuple[int, str], float] = {}
    for count in (1, 3, 4, None):
        child = zygote.cli(*line)
        if count is None:
            assert child.wait(timeout=900) == 0, child.output
        else:
            killed_at(count, tmp_path / "x", child, 0.5)
        found = {(t["number"], goal): s for t in record(tmp_path / "x") for goal, s in t["scores"].items()}
        assert ended.items() <= found.items()
        ended = found
    for trial in record(tmp_path / "x"):
        rows = [json.loads(line) for line in (tmp_path / "x" / trial["run"] / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps))  # nothing was trained on twice
