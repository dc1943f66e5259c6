from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from penstock.run.search.display import SearchDisplay
from penstock.run.search.queue import SearchQueue
from tests.run.search.test_queue import queue_of


def ended(queue: SearchQueue, display: SearchDisplay, score: float) -> None:
    """The next trial, from its start to its score, as the launcher tells of it."""
    run = queue.take()
    assert run is not None
    run.status, run.attempts = "running", run.attempts + 1
    display.started(run, 0)
    display.refresh({run.name: 3.0})
    trial = queue.trial_of(run)
    assert trial is not None
    queue.search.tell(trial, score)
    run.status = "finished"
    display.ended(run)


def shown(queue: SearchQueue, scores: list[float], terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, height=40, highlight=False, color_system=None)
    with SearchDisplay(queue, console) as display:
        for score in scores:
            ended(queue, display, score)
    return out.getvalue()


def test_a_line_for_each_beginning_and_end(tmp_path: Path) -> None:
    lines = shown(queue_of(tmp_path), [1.0, 4.0, 2.0, 3.0, 5.0], terminal=False).splitlines()
    assert lines[0].startswith("trial-000: to 100 steps in slot 1: algo.lr=")
    assert lines[1] == "trial-000: score 1, paused   (1 paused, 3 to come; best 1 of trial-000)"
    assert lines[7] == "trial-003: score 3, pruned   (1 waiting, 3 pruned; best 4 of trial-001)"
    assert lines[8].startswith("trial-001: to 300 steps")


def test_a_copied_member_is_told_with_the_score_of_its_own(tmp_path: Path) -> None:
    lines = shown(queue_of(tmp_path, scheduler="pbt", interval=200), [4.0, 3.0, 2.0, 1.0], terminal=False).splitlines()
    assert lines[7] == "trial-003: score 1, goes on as a copy of trial 0   (4 waiting; best 4 of trial-000)"


def test_a_table_with_the_best_first_among_its_like(tmp_path: Path) -> None:
    said = shown(queue_of(tmp_path), [1.0, 4.0, 2.0, 3.0], terminal=True).split("trial  ")[-1]
    names = [name for line in said.splitlines() for name in line.split() if name.startswith("trial-")]
    assert names == ["trial-001", "trial-003", "trial-002", "trial-000"]
    assert "100 / 300" in said
