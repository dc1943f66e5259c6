"""Progress of a queue of runs, as a table that is redrawn or as plain lines, and a report of failures at the end."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock.run.launch.live_table import LiveTable
from penstock.run.launch.sweep import PROMPT, Queue, Run, Status, shown
from penstock.run.progress import clock

_TAIL_BYTES = 16384
_TAIL_LINES = 8
_MOST_LOGS = 10
_ORDER: tuple[Status, ...] = ("failed", "running", "stopped", "finished", "waiting")
_STYLES: dict[Status, str] = {
    "failed": "bold red",
    "running": "cyan",
    "stopped": "yellow",
    "finished": "green",
    "waiting": "dim",
}
_FIGURES = (("return", "rollout/ep_rew_mean"), ("evaluation", "eval/mean_reward"))
_CODES = {2: "settings", 3: "environment", 4: "learner", 5: "checkpoint", 6: "lost learner"}


class LaunchDisplay(LiveTable):
    """Shows the progress of a queue; a context manager.

    Args:
        steps: environment steps that each run is to take, by name.
    """

    def __init__(self, queue: Queue, steps: Mapping[str, int], console: Console | None = None) -> None:
        super().__init__(console)
        self._queue, self._steps = queue, steps

    def started(self, run: Run, slot: int) -> None:
        """Shows that a run began, or was resumed, in a slot."""
        self._slots[run.name] = slot
        if self._live is None:
            again = f", attempt {run.attempts}" if run.attempts > 1 else ""
            self.note(f"{run.name}: started in slot {slot + 1}{again}   ({self._counts()})")

    def ended(self, run: Run) -> None:
        """Shows that a run's process has ended."""
        if self._live is None:
            row = last_row(self._queue.run_dir(run))
            figures = f" at {row['step']:,} steps" if "step" in row else ""
            figures += "".join(f", {name} {_figure(row, key)}" for name, key in _FIGURES if _figure(row, key))
            reason = f", {reason_of(run)}" if run.status == "failed" else ""
            self.note(f"{run.name}: {run.status}{reason} after {clock(run.seconds)}{figures}   ({self._counts()})")

    def _counts(self) -> str:
        counts = [
            (self._queue.count(status), status) for status in ("finished", "running", "waiting", "stopped", "failed")
        ]
        return ", ".join(f"{n} {status}" for n, status in counts if n)

    def _table(self, running: Mapping[str, float]) -> Table:
        title = Text(f"{self._queue.folder}: {self._counts()}")
        table = Table(Column("run", no_wrap=True), "state", "slot", title=title, title_justify="left")
        for name in ("steps", *(name for name, _ in _FIGURES), "time"):
            table.add_column(name, justify="right")
        runs = sorted(self._queue.runs, key=lambda run: _ORDER.index(run.status))
        room = max(self._console.height - 8, 3)
        for run in runs[:room]:
            row = {} if run.status == "waiting" else last_row(self._queue.run_dir(run))
            total = self._steps.get(run.name, 0)
            state = reason_of(run) if run.status == "failed" else run.status
            table.add_row(
                Text(run.name),
                Text(state, _STYLES[run.status]),
                str(self._slots[run.name] + 1) if run.status == "running" and run.name in self._slots else "",
                f"{row['step']:,} / {total:,}" if "step" in row else "",
                *(_figure(row, key) for _, key in _FIGURES),
                clock(run.seconds + running.get(run.name, 0.0)) if run.attempts else "",
            )
        if len(runs) > room:
            table.add_row(Text(f"... and {len(runs) - room} more", "dim"))
        return table


def report(queue: Queue, console: Console | None = None) -> None:
    """Prints the end of each failed run's log, the commands that retry or go on, and the counts."""
    console = console or Console(highlight=False)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    failed = [run for run in queue.runs if run.status == "failed"]
    for k, run in enumerate(failed):
        say(
            f"\n{run.name} failed: {reason_of(run)}, after {clock(run.seconds)}; the end of {queue.log(run)}:",
            "bold red",
        )
        for line in log_end(queue.log(run)) if k < _MOST_LOGS else []:
            say(f"  | {line}")
        say(f"  once more:   penstock launch {queue.folder} --retry {run.name}")
        say(f"  what it ran: {shown(queue.command(run))}")
    left = len(queue.runs) - queue.count("finished") - len(failed)
    say(
        f"\n{queue.folder}: {queue.count('finished')} of {len(queue.runs)} runs finished"
        + (f", {len(failed)} failed" if failed else "")
        + (f", {left} left" if left else ""),
        "bold",
    )
    if left:
        say(f"go on:            penstock launch {queue.folder}")
    if failed:
        say(f"retry the failed: penstock launch {queue.folder} --retry")
    if queue.count("finished"):
        say(f"learning curves:  penstock plot {queue.folder}")


def reason_of(run: Run) -> str:
    """The exit code in words."""
    code = run.code or 0
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"exit code {code}" + (f" ({_CODES[code]})" if code in _CODES else "")


def log_end(path: Path) -> list[str]:
    """The last lines of the last attempt in a log, without blank ones."""
    try:
        with open(path, "rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return [f"it cannot be read: {error.strerror}"]
    begin = max((i + 1 for i, line in enumerate(lines) if line.startswith(PROMPT)), default=0)
    return [line.rstrip() for line in lines[begin:] if line.strip()][-_TAIL_LINES:]


def last_row(run_dir: Path) -> dict[str, Any]:
    """The newest metrics of a run, {} before the first row."""
    found: dict[str, Any] = {}
    for line in log_end(run_dir / "metrics.jsonl"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found |= row
    return found


def _figure(row: Mapping[str, Any], key: str) -> str:
    return f"{row[key]:,.1f}" if isinstance(row.get(key), (int, float)) else ""
