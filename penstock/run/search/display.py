"""Progress of a search, as a table that is redrawn or as plain lines."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock.core.machine import counted
from penstock.run.launch.display import last_row, reason_of
from penstock.run.launch.live_table import LiveTable
from penstock.run.launch.sweep import Run
from penstock.run.progress import clock
from penstock.run.search.queue import SearchQueue
from penstock.run.search.report import number, setting
from penstock.run.search.trial import State, Trial

_ORDER: tuple[State, ...] = ("running", "finished", "paused", "waiting", "pruned", "failed")
_STYLES: dict[State, str] = {
    "running": "cyan",
    "finished": "green",
    "paused": "yellow",
    "waiting": "dim",
    "pruned": "dim",
    "failed": "bold red",
}


class SearchDisplay(LiveTable):
    """Shows the progress of a search; a context manager."""

    def __init__(self, queue: SearchQueue, console: Console | None = None) -> None:
        super().__init__(console)
        self._queue = queue
        self._trials: dict[str, Trial | None] = {}

    def started(self, run: Run, slot: int) -> None:
        """Shows that a run began, or goes on, in a slot."""
        self._slots[run.name] = slot
        trial = self._trials[run.name] = self._queue.trial_of(run)
        if self._live is not None:
            return
        if trial is None:
            self.note(f"{run.name}: started in slot {slot + 1}, to confirm the best")
        else:
            values = ", ".join(f"{path}={setting(value)}" for path, value in trial.values.items())
            self.note(f"{run.name}: to {trial.goal:,} steps in slot {slot + 1}: {values}")

    def ended(self, run: Run) -> None:
        """Shows that a run's process has ended, and what was decided."""
        if self._live is not None:
            return
        trial = self._trials.get(run.name)
        if trial is None:
            score = next((c.score for c in self._queue.confirmations if c.run is run), None)
            said = "failed, once more" if run.status == "waiting" else f"{run.status}, score {number(score)}"
            self.note(f"{run.name}: {said}")
        elif run.status == "finished":
            left = next((copy for copy in trial.copies if copy["run"] == run.name), None)
            score, then = trial.score, trial.state
            if left is not None:
                score, then = left["score"], f"goes on as a copy of trial {left['of']}"
            self.note(f"{run.name}: score {number(score)}, {then}   ({self._counts()})")
        elif run.status == "failed":
            again = ", once more" if trial.state == "waiting" else ""
            self.note(f"{run.name}: failed{again}, {reason_of(run)}   ({self._counts()})")
        else:
            self.note(f"{run.name}: stopped after {clock(run.seconds)}   ({self._counts()})")

    def _counts(self) -> str:
        search = self._queue.search
        counts = [(sum(t.state == state for t in search.trials), state) for state in _ORDER]
        left = search.settings.trials - len(search.trials)
        said = ", ".join([*(f"{n} {state}" for n, state in counts if n), *([f"{left} to come"] if left else [])])
        return said if search.best is None else f"{said}; best {number(search.best.score)} of {search.best.run.name}"

    def _table(self, running: Mapping[str, float]) -> Table:
        search, title = self._queue.search, Text(f"{self._queue.folder}: {self._counts()}")
        table = Table(Column("trial", no_wrap=True), "state", title=title, title_justify="left")
        for path in search.space:
            table.add_column(path.rpartition(".")[2], justify="right")
        for name in ("steps", "score", "time"):
            table.add_column(name, justify="right")
        trials = sorted(search.trials, key=lambda t: (_ORDER.index(t.state), -search.worth(t.score), t.number))
        room = max(self._console.height - 8, 3)
        for trial in trials[:room]:
            table.add_row(*self._row(trial, running))
        if len(trials) > room:
            table.add_row(Text(f"... and {counted(len(trials) - room, 'trial')} more", "dim"))
        for c in self._queue.study:
            blank = [""] * (len(search.space) + 1)
            table.add_row(Text(c.run.name), Text(c.run.status), *blank, number(c.score), clock(c.run.seconds))
        return table

    def _row(self, trial: Trial, running: Mapping[str, float]) -> list[Text | str]:
        run, steps = trial.run, trial.steps
        state = Text(trial.state, _STYLES[trial.state])
        if trial.state == "running" and run.name in self._slots:
            state = Text(f"slot {self._slots[run.name] + 1}", _STYLES["running"])
            steps = last_row(self._queue.run_dir(run)).get("step", steps)
        bold = "bold" if trial is self._queue.search.best else ""
        return [
            Text(run.name, bold),
            state,
            *(setting(value) for value in trial.values.values()),
            f"{steps:,} / {trial.goal:,}",
            Text(number(trial.score), bold),
            clock(run.seconds + running.get(run.name, 0.0)),
        ]
