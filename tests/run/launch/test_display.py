from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from penstock.run.launch.display import LaunchDisplay, clock, last_row, log_end, report
from penstock.run.launch.launcher import Launcher, Listed
from penstock.run.launch.sweep import (
    Queue,
)  # fmt: skip
from tests.run.launch.fakes import Seen, machines, queue_of

# What is shown


def shown_at_the_end(queue: Queue) -> str:
    console = Console(width=200, highlight=False, record=True, file=io.StringIO())
    report(queue, console)
    return console.export_text()


def test_the_report_says_what_failed_and_how_to_go_on(fake: Path) -> None:
    queue = queue_of(fake, "ok", "bad", "slow")
    Launcher(Listed(queue, queue.runs[:2]), machines(2), Seen()).work()
    text = shown_at_the_end(queue)
    for words in (
        "what=bad_s0 failed: exit code 3 (environment)", "the end of sweep/logs/what=bad_s0.log:", "  | the licence has expired",
        "penstock launch sweep --retry what=bad_s0\n", "python -m penstock train ppo --env X --algo.what bad --run.seed 0",
        "sweep: 1 of 3 runs finished, 1 failed, 1 left", "penstock launch sweep\n", "penstock plot sweep",
    ):  # fmt: skip
        assert words in text
    queue.runs = queue.runs[:1]
    assert "failed" not in shown_at_the_end(queue)


def test_lines_without_a_terminal(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue = queue_of(fake, "ok", "bad")
    with LaunchDisplay(queue, {}) as display:
        Launcher(Listed(queue, queue.runs), machines(1), display).work()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "what=ok_s0: started in slot 1   (1 running, 1 waiting)"
    assert "what=ok_s0: finished after 0:0" in lines[1]
    assert "at 5 steps, return 2.5, evaluation 4.5" in lines[1]
    assert "what=bad_s0: failed, exit code 3 (environment) after 0:0" in lines[3]


def test_a_table_on_a_terminal_fits_it(fake: Path) -> None:
    queue = queue_of(fake, "ok", "bad", seeds=tuple(range(20)))
    console = Console(width=100, height=16, force_terminal=True, highlight=False, record=True, file=io.StringIO())
    with LaunchDisplay(queue, {run.name: 9_000 for run in queue.runs}, console) as display:
        Launcher(Listed(queue, [queue.runs[0], queue.runs[20]]), machines(1), display).work()
    last = console.export_text().rpartition("sweep: ")[2]
    assert "1 finished, 38 waiting, 1 failed" in last
    assert last.index("exit code 3") < last.index("│ finished") < last.index("│ waiting")
    assert re.search(r"5 / 9,000 │ +2\.5 │ +4\.5 │", last)
    assert "... and 32 more" in last


def test_log_ends_and_metrics_of_files_that_are_not_there_or_half_written(tmp_path: Path) -> None:
    assert "cannot be read" in log_end(tmp_path / "x")[0]
    assert last_row(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/mean_reward": 3}\n{"step": 2}\n[]\n{"st')
    assert last_row(tmp_path) == {"step": 2, "eval/mean_reward": 3}
    (tmp_path / "log").write_text("old\n$ python -m penstock train\n\nnew \n" + "x\n" * 2)
    assert log_end(tmp_path / "log") == ["new", "x", "x"]
    assert (clock(59.9), clock(3600)) == ("0:59", "1:00:00")
