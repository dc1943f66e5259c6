from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from penstock.run.progress import clock
from penstock.studies.display import StudyDisplay
from penstock.studies.logs import last_row, log_end
from penstock.studies.slots.launcher import Launcher
from penstock.studies.study import Study
from tests.studies.slots import fakes
from tests.studies.test_study import queue_of


def ended(queue: Study, display: StudyDisplay, score: float) -> None:
    """The next trial, from its start to its score, as the launcher tells of it."""
    run = queue.ask()
    assert run is not None
    run.status, run.attempts = "running", run.attempts + 1
    display.started(run, 0)
    display.refresh({run.name: 3.0})
    trial = queue.trial_of(run)
    assert trial is not None
    queue.search.tell(trial, score)
    run.status = "finished"
    display.ended(run)


def shown(queue: Study, scores: list[float], terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, height=40, highlight=False, color_system=None)
    with StudyDisplay(queue, console) as display:
        for score in scores:
            ended(queue, display, score)
    return out.getvalue()


def test_a_line_for_each_beginning_and_end(tmp_path: Path) -> None:
    lines = shown(queue_of(tmp_path), [1.0, 4.0, 2.0, 3.0, 5.0], terminal=False).splitlines()
    assert lines[0].startswith("trial-000: to 100 steps in slot 1: algo.lr=")
    assert lines[1] == "trial-000: score 1, paused after 0:00   (1 paused, 3 to come; best 1 of trial-000)"
    assert lines[7] == "trial-003: score 3, pruned after 0:00   (1 waiting, 3 pruned; best 4 of trial-001)"
    assert lines[8].startswith("trial-001: to 300 steps")


def test_a_copied_member_is_told_with_the_score_of_its_own(tmp_path: Path) -> None:
    lines = shown(queue_of(tmp_path, scheduler="pbt", interval=200), [4.0, 3.0, 2.0, 1.0], terminal=False).splitlines()
    assert lines[7] == "trial-003: score 1, goes on as a copy of trial 0 after 0:00   (4 waiting; best 4 of trial-000)"


def test_a_table_with_the_best_first_among_its_like(tmp_path: Path) -> None:
    said = shown(queue_of(tmp_path), [1.0, 4.0, 2.0, 3.0], terminal=True).split("trial  ")[-1]
    names = [name for line in said.splitlines() for name in line.split() if name.startswith("trial-")]
    assert names == ["trial-001", "trial-003", "trial-002", "trial-000"]
    assert "100 / 300" in said


def test_a_sweep_in_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.stand_in(fakes.FAKE, tmp_path, monkeypatch)
    queue = fakes.queue_of(Path("sweep"), "ok", "bad")
    queue.begin()
    with StudyDisplay(queue) as display:
        Launcher(queue, fakes.machines(1), display).work()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "what=ok_s0: to 900 steps in slot 1"
    assert lines[1].startswith("what=ok_s0: score 4.5, finished after 0:0")
    assert lines[1].endswith("(1 finished, 1 waiting; best 4.5 of what=ok_s0)")
    assert lines[3].startswith("what=bad_s0: failed, exit code 3 (environment)")


def test_the_table_of_a_sweep_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.stand_in(fakes.FAKE, tmp_path, monkeypatch)
    queue = fakes.queue_of(Path("sweep"), "ok", "bad", seeds=tuple(range(20)))
    queue.begin()
    for trial in queue.search.trials:  # two are to do
        trial.state = "waiting" if trial.number in (0, 20) else "paused"
    console = Console(width=100, height=16, force_terminal=True, highlight=False, record=True, file=io.StringIO())
    with StudyDisplay(queue, console) as display:
        row = {"step": 5, "eval/mean_reward": 3.5}
        trial = queue.search.trials[1]
        trial.state = "running"
        display.started(trial.run, 1)
        queue.run_dir(trial.run).mkdir()
        (queue.run_dir(trial.run) / "metrics.jsonl").write_text(json.dumps(row))
        display.refresh({trial.run.name: 3.0})
        now = console.export_text(clear=False).rpartition("sweep: ")[2]
        trial.state = "paused"
        Launcher(queue, fakes.machines(1), display).work()
    assert re.search(r"what=ok_s1 +│ slot 2 +│ +5 / 900 │ +3\.5 │", now)  # the score so far
    last = console.export_text().rpartition("sweep: ")[2]
    assert "1 failed" in last
    assert re.search(r"what=ok_s0 +│ finished │ +5 / 900 │ +4\.5 │", last)
    assert "... and 32 trials more" in last


def test_log_ends_and_metrics_of_files_that_are_not_there_or_half_written(tmp_path: Path) -> None:
    assert "cannot be read" in log_end(tmp_path / "x")[0]
    assert last_row(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/mean_reward": 3}\n{"step": 2}\n[]\n{"st')
    assert last_row(tmp_path) == {"step": 2, "eval/mean_reward": 3}
    (tmp_path / "log").write_text("old\n$ python -m penstock train\n\nnew \n" + "x\n" * 2)
    assert log_end(tmp_path / "log") == ["new", "x", "x"]
    assert (clock(59.9), clock(3600)) == ("0:59", "1:00:00")
