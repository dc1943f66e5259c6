"""Metrics of a run on disk: metrics.jsonl is the record; progress.csv and TensorBoard events are made from it."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import CheckpointError
from penstock.run.events import EventLog
from penstock.run.files import Appender, write_atomic

JSONL, CSV = "metrics.jsonl", "progress.csv"


class MetricsLog:
    """Appends rows of metrics to a run directory; each is with the kernel when `write` returns, so kill -9 loses none.

    Not a number and infinite are null in metrics.jsonl, which JSON demands, and `nan` in progress.csv, where an empty
    cell means "not reported in this row". A disk that is full or gone never stops training: the rows are lost, counted
    in `lost_rows` and warned of once.

    Args:
        run_dir: made if absent. Rows that are there are kept.
        resume_step: rows of later steps are cut from the files, and TensorBoard is told to forget them.

    Raises:
        CheckpointError: the files that are there cannot be read or written.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None, tensorboard: bool = True) -> None:
        self._dir = Path(run_dir)
        self.lost_rows = 0
        self._warned = False
        self._events = EventLog(self._dir, resume_step) if tensorboard else None
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            rows = _cut_jsonl(self._dir / JSONL, resume_step)
            self._columns = dict.fromkeys(["step", *(key for row in rows for key in row)])
            write_atomic(self._dir / CSV, _csv_bytes(self._columns, rows))
            self._csv_behind = False
            self._jsonl = Appender(self._dir / JSONL)
            self._csv = Appender(self._dir / CSV)
        except OSError as error:
            raise CheckpointError(f"cannot keep the metrics of {self._dir}: {error}") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; `step` counts environment steps. Values may be Python numbers, numpy scalars or 0-d tensors."""
        row: dict[str, Any] = {"step": int(step)}
        for key, value in metrics.items():
            number = value if type(value) is float or type(value) is int else float(value)
            row[key] = number if math.isfinite(number) else None
        try:
            self._jsonl.write(json.dumps(row).encode() + b"\n")
        except OSError as error:
            self.lost_rows += 1
            self._warn(f"{self._dir}: metrics of step {step} are lost ({error}); training goes on, free some space")
            return
        try:
            self._write_csv(row)
        except OSError as error:
            self._csv_behind = True
            self._warn(f"{self._dir / CSV} falls behind {JSONL} ({error}); training goes on, free some space")
        try:
            if self._events is not None:
                self._events.write(step, metrics)
        except (OSError, ImportError) as error:
            self._events = None
            self._warn(f"{self._dir}: no more TensorBoard events in this run ({error}); training goes on")

    def close(self) -> None:
        """Closes the files; a second call does nothing."""
        self._jsonl.close()
        self._csv.close()
        if self._events is not None:
            self._events.close()

    def _write_csv(self, row: Mapping[str, Any]) -> None:
        if self._csv_behind or not row.keys() <= self._columns.keys():
            self._columns |= dict.fromkeys(row)
            write_atomic(self._dir / CSV, _csv_bytes(self._columns, _read_rows(self._dir / JSONL)))
            self._csv.close()
            self._csv = Appender(self._dir / CSV)
            self._csv_behind = False
        else:
            self._csv.write(_csv_bytes(self._columns, [row], header=False))

    def _warn(self, message: str) -> None:
        if not self._warned:
            warnings.warn(message, stacklevel=3)
        self._warned = True


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run in the order they were written, each with its `step`; null is NaN, a torn line is left out."""
    rows = _read_rows(Path(run_dir) / JSONL)
    return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]


def _cut_jsonl(path: Path, resume_step: int | None) -> list[dict[str, Any]]:
    """The rows up to `resume_step`, after the file has been rewritten to hold only them, if it held more."""
    if not path.exists():
        return []
    limit = math.inf if resume_step is None else resume_step
    rows, lines, text = [], [], path.read_bytes()
    for line in text.splitlines(keepends=True):
        row = _parse(line)
        if row is not None and row["step"] <= limit:
            rows.append(row)
            lines.append(line)
    if b"".join(lines) != text:
        write_atomic(path, b"".join(lines))
    return rows


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [row for line in path.read_bytes().splitlines(keepends=True) if (row := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """A row, or None for a line that a crash cut short: it lacks its end, even if what is left is JSON."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _csv_bytes(columns: Iterable[str], rows: Sequence[Mapping[str, Any]], header: bool = True) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows(["nan" if (value := row.get(key, "")) is None else value for key in columns] for row in rows)
    return out.getvalue().encode()
