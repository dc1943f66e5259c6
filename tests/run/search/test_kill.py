"""Searches that are killed with kill -9 and go on, by real runs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.run.search.queue import STATE
from tests.cli.short import SHORT

SEARCH = (
    "tune", "a2c", "--env", "CartPole-v1", *SHORT, "--run.steps", "640", "--trials", "4",
    "--search", "algo.lr=loguniform(1e-4,1e-2)", "algo.entropy_coef=choice(0,0.01)", "--run.checkpoint-interval", "64",
)  # fmt: skip


def record(folder: Path) -> list[dict[str, Any]]:
    """The trials without what time it took, and without how often they were begun."""
    trials = json.loads((folder / STATE).read_text())["trials"]
    return [{**t, "run": t["run"]["name"]} for t in trials]


def killed_after(seconds: float, child: Any) -> bool:
    """True if the search was still going on then, and was killed with all its runs."""
    deadline = time.monotonic() + seconds
    while child.running and time.monotonic() < deadline:
        time.sleep(0.05)
    if not child.running:
        return False
    child.send(signal.SIGKILL)
    return child.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("scheduler", "interval"), [("asha", 128), ("median", 320), ("pbt", 320)])
def test_a_search_killed_three_times_equals_one_that_was_not(
    scheduler: str, interval: int, tmp_path: Path, zygote: Any, same_run: Callable[[Path, Path], None]
) -> None:
    line = (*SEARCH, "--scheduler", scheduler, "--interval", str(interval))
    whole = zygote.cli(*line, "--dir", str(tmp_path / "whole"))
    began = time.monotonic()
    assert whole.wait(timeout=500) == 0, whole.output
    took = time.monotonic() - began
    for part in (0.2, 0.3, 0.25):
        assert killed_after(part * took, zygote.cli(*line, "--dir", str(tmp_path / "cut")))
    last = zygote.cli(*line, "--dir", str(tmp_path / "cut"))
    assert last.wait(timeout=500) == 0, last.output
    assert record(tmp_path / "cut") == record(tmp_path / "whole")
    for trial in record(tmp_path / "whole"):
        same_run(tmp_path / "whole" / trial["run"], tmp_path / "cut" / trial["run"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_at_a_time_lose_no_finished_trial_and_repeat_none(tmp_path: Path, zygote: Any) -> None:
    line = (*SEARCH, "--scheduler", "asha", "--interval", "128", "--parallel", "2", "--dir", str(tmp_path / "x"))
    ended: dict[tuple[int, str], float] = {}
    for seconds in (12.0, 12.0, 12.0, 500.0):
        child = zygote.cli(*line)
        killed_after(seconds, child)
        found = {(t["number"], goal): s for t in record(tmp_path / "x") for goal, s in t["scores"].items()}
        assert ended.items() <= found.items()
        ended = found
    assert child.wait() == 0, child.output
    for trial in record(tmp_path / "x"):
        rows = [json.loads(line) for line in (tmp_path / "x" / trial["run"] / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps))  # nothing was trained on twice
