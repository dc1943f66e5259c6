"""Progress of a study, as a table that is redrawn in a terminal or as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from penstock.core.machine import counted
from penstock.run.progress import clock
from penstock.studies.logs import last_row, reason_of
from penstock.studies.report import number, setting
from penstock.studies.study import Study
from penstock.studies.trial import Run, State, Trial

_REDRAW_S = 0.5
_ORDER: tuple[State, ...] = ("running", "finished", "paused", "waiting", "pruned", "failed")
_STYLES: dict[State, str] = {
    "running": "cyan",
    "finished": "green",
    "paused": "yellow",
    "waiting": "dim",
    "pruned": "dim",
    "failed": "bold red",
}


class StudyDisplay:
    """Shows the progress of a study; a context manager that leaves the last table in a terminal."""

    def __init__(self, study: Study, console: Console | None = None) -> None:
        self._study, self._console = study, console or Console(highlight=False)
        self._trials: dict[str, Trial | None] = {}
        self._slots: dict[str, int] = {}  # of each run that was started
        self._next = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._table({}), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._table({}), refresh=True)
            self._live.stop()

    def note(self, text: str) -> None:
        """Prints a line above the table."""
        self._console.print(Text(text), soft_wrap=True)

    def refresh(self, running: Mapping[str, float]) -> None:
        """Redraws the table, at most twice a second.

        Args:
            running: seconds that each running run has taken so far, by name.
        """
        now = time.monotonic()
        if self._live is not None and now >= self._next:
            self._live.update(self._table(running), refresh=True)
            self._next = now + _REDRAW_S

    def started(self, run: Run, slot: int) -> None:
        """Shows that a run began, or goes on, in a slot."""
        self._slots[run.name] = slot
        trial = self._trials[run.name] = self._study.trial_of(run)
        if self._live is not None:
            return
        if trial is None:
            self.note(f"{run.name}: started in slot {slot + 1}, to confirm the best")
        else:
            values = ", ".join(f"{path}={setting(value)}" for path, value in self._told(trial).items())
            goal = self._study.steps_of(trial)
            self.note(f"{run.name}: to {goal:,} steps in slot {slot + 1}" + (f": {values}" if values else ""))

    def ended(self, run: Run) -> None:
        """Shows that a run's process has ended, and the decision on it."""
        if self._live is not None:
            return
        trial = self._trials.get(run.name)
        if trial is None:
            score = next((c.score for c in self._study.confirmations if c.run is run), None)
            said = "failed, once more" if run.status == "waiting" else f"{run.status}, score {number(score)}"
            self.note(f"{run.name}: {said}")
        elif run.status == "finished":
            left = next((copy for copy in trial.copies if copy["run"] == run.name), None)
            score, then = trial.score, trial.state
            if left is not None:
                score, then = left["score"], f"goes on as a copy of trial {left['of']}"
            self.note(f"{run.name}: score {number(score)}, {then} after {clock(run.seconds)}   ({self._counts()})")
        elif run.status == "failed":
            again = ", once more" if trial.state == "waiting" else ""
            self.note(f"{run.name}: failed{again}, {reason_of(run)}   ({self._counts()})")
        else:
            self.note(f"{run.name}: stopped after {clock(run.seconds)}   ({self._counts()})")

    def _told(self, trial: Trial) -> dict[str, object]:
        """The settings of a trial that the name of its run does not say."""
        return {} if self._study.sweep else trial.values

    def _counts(self) -> str:
        search = self._study.search
        counts = [(sum(t.state == state for t in search.trials), state) for state in _ORDER]
        left = search.settings.trials - len(search.trials)
        said = ", ".join([*(f"{n} {state}" for n, state in counts if n), *([f"{left} to come"] if left else [])])
        return said if search.best is None else f"{said}; best {number(search.best.score)} of {search.best.run.name}"

    def _table(self, running: Mapping[str, float]) -> Table:
        search, title = self._study.search, Text(f"{self._study.folder}: {self._counts()}")
        table = Table(Column("trial", no_wrap=True), "state", title=title, title_justify="left")
        for path in () if self._study.sweep else search.space:
            table.add_column(path.rpartition(".")[2], justify="right")
        for name in ("steps", "score", "time"):
            table.add_column(name, justify="right")
        trials = sorted(search.trials, key=lambda t: (_ORDER.index(t.state), -search.objective(t.score), t.number))
        room = max(self._console.height - 8, 3)
        for trial in trials[:room]:
            table.add_row(*self._row(trial, running))
        if len(trials) > room:
            table.add_row(Text(f"... and {counted(len(trials) - room, 'trial')} more", "dim"))
        for c in self._study.confirming:
            blank = [""] * (len(table.columns) - 4)
            table.add_row(Text(c.run.name), Text(c.run.status), *blank, number(c.score), clock(c.run.seconds))
        return table

    def _row(self, trial: Trial, running: Mapping[str, float]) -> list[Text | str]:
        run, steps, score = trial.run, trial.steps, trial.score
        state = Text(reason_of(run) if trial.state == "failed" and run.code else trial.state, _STYLES[trial.state])
        if trial.state == "running" and run.name in self._slots:
            state = Text(f"slot {self._slots[run.name] + 1}", _STYLES["running"])
            row, metric = last_row(self._study.run_dir(run)), self._study.search.settings.metric
            steps = row.get("step", steps)
            score = row[metric] if isinstance(row.get(metric), (int, float)) else score
        bold = "bold" if trial is self._study.search.best else ""
        return [
            Text(run.name, bold),
            state,
            *(setting(value) for value in self._told(trial).values()),
            f"{steps:,} / {self._study.steps_of(trial):,}",
            Text(number(score), bold),
            clock(run.seconds + running.get(run.name, 0.0)),
        ]
