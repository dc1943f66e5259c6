"""Metrics of a run on disk: metrics.jsonl is the record, from which progress.csv is made and trackers are fed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import CheckpointError
from penstock.core.files import open_stored, unshare, write_atomic
from penstock.samplers.episodes import Episodes

JSONL, CSV = "metrics.jsonl", "progress.csv"
EVALUATIONS, CHANGES = "eval/evaluations.jsonl", "changes.jsonl"
"""The second is the journal of changes: {"step": environment steps, "set": {path: value}}. Calls into environments are
there for people only, as `env_call` and `env_set`; the sampler's state repeats them."""
TAKEN_AT = "eval/taken_at"
"""Metric of an evaluation beside training: the environment steps at which it was taken into account."""


MOST_LINE, _MOST_BITS = 1 << 27, 1 << 9
"""More bytes than a row has, and most bits of a number in one: `float` takes no more than twice as many."""


class MetricsLog:
    """Appends rows of metrics to a run directory; the kernel has each when `write` returns, so kill -9 loses none.

    Not a number and infinite are null in metrics.jsonl, which JSON demands, and `nan` in progress.csv, where an empty
    cell means "not reported in this row". A disk that is full or gone never stops training: the rows are lost, counted
    in `lost_rows` and warned of once.

    progress.csv takes the known columns of each row at once. A new column waits until it is made anew, of twice the
    rows or by `close`, so that a name that is new in every row costs little.

    Args:
        run_dir: made if absent. Rows in it are kept.
        resume_step: rows of later steps are removed from the files.

    Raises:
        CheckpointError: the files cannot be read or written.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        self._dir = Path(run_dir)
        self.lost_rows = 0
        self._warned = False
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            rows = cut_rows(self._dir / JSONL, resume_step)
            self._jsonl, self._rows = Appender(self._dir / JSONL), len(rows)
            self._make_csv(rows)
        except OSError as error:
            raise CheckpointError(f"cannot keep the metrics of {self._dir}: {error}") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a row; `step` counts environment steps. Values: Python numbers, numpy scalars or 0-d tensors."""
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
        self._rows += 1
        self._csv_behind = self._csv_behind or not row.keys() <= self._columns.keys()
        self._write_csv(row)

    def close(self) -> None:
        """Brings progress.csv up to date and closes the files; a second call does nothing."""
        self._write_csv(None)
        self._csv_behind = False
        self._jsonl.close()
        self._csv.close()

    def _write_csv(self, row: Mapping[str, Any] | None) -> None:
        """Appends a row, None at the end; makes the table anew where it is behind and that is due."""
        try:
            if self._csv_behind and (row is None or self._rows >= 2 * self._csv_rows):
                old = self._csv
                self._make_csv(read_rows(self._dir / JSONL))
                old.close()
            elif row is not None:
                self._csv.write(_csv_bytes(self._columns, [row], header=False))
        except OSError as error:
            self._csv_behind = True
            self._warn(f"{self._dir / CSV} falls behind {JSONL} ({error}); training goes on, free some space")

    def _make_csv(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Makes progress.csv of all rows, and opens it for those that follow."""
        columns = dict.fromkeys(["step", *(key for row in rows for key in row)])
        self._csv_rows = len(rows)  # even if the disk refuses, so that it is not asked at every row
        write_atomic(self._dir / CSV, _csv_bytes(columns, rows))
        self._csv, self._columns, self._csv_behind = Appender(self._dir / CSV), columns, False

    def _warn(self, message: str) -> None:
        if not self._warned:
            warnings.warn(message, stacklevel=3)
        self._warned = True


def log_evaluation(run_dir: Path, step: int, metrics: Mapping[str, float], episodes: Episodes) -> None:
    """Appends an evaluation, with the return and length of each episode; a disk that refuses is a warning."""
    row = {"step": step, **metrics, "returns": episodes.return_.tolist(), "lengths": episodes.length.tolist()}
    path = run_dir / EVALUATIONS
    try:
        path.parent.mkdir(exist_ok=True)
        unshare(path)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        warnings.warn(f"evaluation not written to {path}: {error}", stacklevel=2)


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run in the order of writing, each with its `step`; no number is NaN, a torn line is left out."""
    return [_numbers(row) for row in read_rows(Path(run_dir) / JSONL)]


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: number(value) for key, value in row.items()}


def number(value: Any) -> float:
    """A value of a row as a number; NaN if it is none, or too large for a float."""
    fits = isinstance(value, (int, float)) and not (isinstance(value, int) and value.bit_length() > _MOST_BITS)
    return value if fits else math.nan


def cut_rows(path: Path, resume_step: int | None) -> list[dict[str, Any]]:
    """The rows of a .jsonl file up to `resume_step` (None: all); the file is rewritten if it held anything else.

    An evaluation beside training is of the step at which it was taken into account.
    """
    if not path.exists():
        return []
    limit = math.inf if resume_step is None else resume_step
    rows, lines, text = [], [], path.read_bytes()
    for line in text.splitlines(keepends=True):
        row = parse_row(line)
        if row is not None and row["step"] <= limit and not (row.get(TAKEN_AT) or 0) > limit:
            rows.append(row)
            lines.append(line)
    if b"".join(lines) != text:
        write_atomic(path, b"".join(lines))
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, up to a line that is longer than any row; a torn line is left out."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    with open_stored(path, path.parent) as file:
        while 0 < len(line := file.readline(MOST_LINE)) < MOST_LINE:
            if (row := parse_row(line)) is not None:
                rows.append(row)
    return rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """A row, or None for a line that a crash cut short: it lacks its end, even if the rest of it is JSON."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and step.bit_length() <= _MOST_BITS else None


def _csv_bytes(columns: Iterable[str], rows: Sequence[Mapping[str, Any]], header: bool = True) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows(["nan" if (value := row.get(key, "")) is None else value for key in columns] for row in rows)
    return out.getvalue().encode()


class RowReader:
    """Reads a .jsonl file of rows from its beginning on, while another thread of this process appends to it."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def rows(self) -> Iterator[dict[str, float]]:
        """Yields the rows that were not read yet, as `read_metrics` returns them; raises OSError."""
        with contextlib.suppress(FileNotFoundError), open_stored(self._path, self._path.parent) as file:
            file.seek(self._offset)
            while (line := file.readline(MOST_LINE)).endswith(b"\n"):
                self._offset += len(line)
                if (row := parse_row(line)) is not None:
                    yield _numbers(row)


class Appender:
    """A file that grows by whole pieces, unbuffered: of a piece that does not fit on the disk nothing stays."""

    def __init__(self, path: Path) -> None:
        unshare(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        self._end = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> int:
        """Appends all of `data` and returns its length, or appends nothing and raises OSError."""
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            if done:
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)
        return len(data)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
