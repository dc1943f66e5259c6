"""Single metrics of a run, taken from metrics.jsonl without parsing every row, and kept up to date as it grows."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from array import array
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.files import open_stored
from penstock.run.log import JSONL, MOST_LINE, TAKEN_AT, number, parse_row
from penstock.run.plots.bands import Floats

_HEAD = b'{"step": '
_STEP = re.compile(rb'{"step": (\d{1,18}),')
_NUMBER = re.compile(rb"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?=[,}])")
_BLOCK, _FIRST_BLOCK = 1 << 24, 1 << 15
"""Bytes read at a time: from the beginning, and first from the end."""
_MOST_KEPT = 32
"""Metrics of a run in memory; the oldest gives way."""
_LATEST = 2
"""Rows at the end that `last` parses whole."""


class MetricColumns:
    """The metrics of one run, each read when it is asked for; numbers are those of `read_metrics`.

    A file that has grown is read from where it ended; one that was replaced, as by a resume, from its beginning.

    Raises, in every method:
        OSError: the file cannot be read, or a link leads it out of the run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / JSONL
        self._inode, self._size, self._changed = (-1, -1), 0, 0
        self._columns: dict[str, tuple[int, Floats]] = {}
        self._every: tuple[int, dict[str, array[float]]] = (0, {})
        self._last: tuple[int, dict[str, float]] = (0, {})
        self.names: set[str] = set()
        """Metrics of the rows that `last` came upon."""

    def refresh(self) -> tuple[int, int, int]:
        """Looks at the file; returns what is equal as long as its content is: inode, size and time of change."""
        found = os.stat(self._path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(self._path))
        inode, size = (found.st_dev, found.st_ino), found.st_size
        rewritten = size == self._size and found.st_mtime_ns != self._changed
        if inode != self._inode or size < self._size or rewritten:
            self._columns.clear()
            self._every, self._last = (0, {}), (0, {})
        self._inode, self._size, self._changed = inode, size, found.st_mtime_ns
        return found.st_ino, size, found.st_mtime_ns

    def points(self, key: str) -> Floats:
        """Step and value of each row in which a metric is finite, [N, 2] float64, in the order of writing."""
        at, points = self._columns.get(key, (0, np.empty((0, 2))))
        if at < self._size:
            pairs: list[tuple[float, float]] = []
            with open_stored(self._path, self._path.parent) as file:
                file.seek(at)
                for block in _whole_lines(file, self._size - at):
                    pairs += _pairs(block, key)
                    at += len(block)
            if pairs:
                points = np.concatenate([points, np.array(pairs, np.float64)])
            self._columns.pop(key, None)
            self._columns[key] = at, points
            if len(self._columns) > _MOST_KEPT:
                del self._columns[next(iter(self._columns))]
        return points

    def every(self) -> dict[str, Floats]:
        """`points` of every metric that has any. Rows are parsed, each once; all metrics stay in memory."""
        at, flat = self._every
        if at < self._size:
            with open_stored(self._path, self._path.parent) as file:
                file.seek(at)
                for block in _whole_lines(file, self._size - at):
                    for row in filter(None, map(parse_row, block.splitlines(keepends=True))):
                        for key, value in row.items():
                            if key != "step" and math.isfinite(x := number(value)):
                                flat.setdefault(key, array("d")).extend((row["step"], x))
                    at += len(block)
                    self._every = at, flat
        return {key: np.array(pairs).reshape(-1, 2) for key, pairs in flat.items()}

    def last(self, wanted: Iterable[str]) -> dict[str, float]:
        """The last finite value of metrics: of those of the latest rows, and of `wanted` from wherever they stand.

        `step` is the largest; an evaluation beside training, which has a smaller one, is followed back to the row
        before it.
        """
        upto, known = self._last
        if upto < self._size:
            with open_stored(self._path, self._path.parent) as file:
                found, end = _last_values(file, upto, self._size, wanted, self.names)
            step = max((row["step"] for row in (found, known) if "step" in row), default=0)
            known = {**known, **found, "step": step}
            self._last = end, known
        return known or {"step": 0}


def _whole_lines(file: BufferedReader, size: int) -> Iterator[bytes]:
    """The next `size` bytes in blocks that end where a line does, up to a line that is longer than any row."""
    rest = b""
    while size > 0 and len(rest) < MOST_LINE and (new := file.read(min(size, _BLOCK))):
        size -= len(new)
        data = rest + new
        cut = data.rfind(b"\n") + 1
        rest = data[cut:]
        if cut:
            yield data[:cut]


def _pairs(data: bytes, key: str) -> Iterator[tuple[float, float]]:
    """Step and value of each line in which a metric is finite; lines that `MetricsLog` did not write are parsed."""
    if not _as_written(data):
        rows = [row for line in data.splitlines(keepends=True) if (row := parse_row(line)) is not None]
        yield from ((row["step"], x) for row in rows if math.isfinite(x := number(row.get(key))))
        return
    needle = _needle(key)
    at = data.find(needle)
    while at >= 0:
        start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        step, value = _STEP.match(data, start), _NUMBER.match(data, at + len(needle))
        if step and value and data[end - 1] == 125 and data.find(b"{", start + 1, end) < 0:
            if math.isfinite(x := float(value[0])):
                yield float(step[1]), x
        elif not data.startswith(b"null", at + len(needle)):
            row = parse_row(data[start : end + 1])
            if row is not None and math.isfinite(x := number(row.get(key))):
                yield float(row["step"]), x
        at = data.find(needle, end)


def _as_written(data: bytes) -> bool:
    """True if the first line is spelled as `MetricsLog` does."""
    line = data[: data.find(b"\n") + 1]
    row = parse_row(line)
    return row is not None and json.dumps(row).encode() + b"\n" == line and line.startswith(_HEAD)


def _needle(key: str) -> bytes:
    return b", " + json.dumps(key).encode() + b": "


def _last_values(
    file: BufferedReader, start: int, end: int, wanted: Iterable[str], names: set[str]
) -> tuple[dict[str, float], int]:
    """The last finite values between two places of a file, and the end of its last whole line there."""
    found: dict[str, float] = {}
    missing, latest, block, whole = {*wanted}, 0, _FIRST_BLOCK, start
    while end > start and (missing or latest < _LATEST):
        begin = max(start, end - block)
        file.seek(begin)
        data = file.read(end - begin)
        cut = 0 if begin == start else data.find(b"\n") + 1
        data = data[cut : data.rfind(b"\n") + 1]
        block = min(4 * block, _BLOCK)
        if data:
            whole = max(whole, begin + cut + len(data))
        elif begin > start:
            if end - begin == _BLOCK:
                break  # a line that is longer than any row
            continue
        end = begin + cut
        at = len(data)
        while at and latest < _LATEST:
            line_start = data.rfind(b"\n", 0, at - 1) + 1
            row = parse_row(data[line_start:at])
            at = line_start
            if row is not None:
                names.update(row)
                _keep(found, row)
                latest += TAKEN_AT not in row
        missing -= found.keys()
        canonical = _as_written(data) if data else True
        for key in sorted(missing):
            row = _find_back(data, key, canonical)
            if row is not None:
                missing.discard(key)
                names.update(row)
                found[key] = number(row[key])
    return found, whole


def _find_back(data: bytes, key: str, canonical: bool) -> dict[str, Any] | None:
    """The last of these lines in which a metric is finite."""
    needle = _needle(key) if canonical else b"\n"
    at = data.rfind(needle)
    while at >= 0:
        start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at) + 1
        row = parse_row(data[start:end])
        if row is not None and math.isfinite(number(row.get(key))):
            return row
        at = data.rfind(needle, 0, start)
    return None


def _keep(found: dict[str, float], row: dict[str, Any]) -> None:
    """Adds the finite values of a row that is earlier than those found; of `step` the largest counts."""
    for key, value in row.items():
        x = number(value)
        if key == "step":
            found[key] = max(x, found.get(key, x))
        elif math.isfinite(x):
            found.setdefault(key, x)
