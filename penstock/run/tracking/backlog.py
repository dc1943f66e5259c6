"""What a tracker lacks of a run: rows of metrics.jsonl and files, by a note in the run directory of what it has had."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import CheckpointError
from penstock.core.files import read_stored
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.files.stored_experiment import CONFIG, META
from penstock.run.log import JSONL, TAKEN_AT, RowReader
from penstock.run.tracking.tracker import TrackedRun

FOLDER = "trackers"
"""Holds the notes, NAME.json each: {"id", "at", "count", "step", "files": {path: [size, ns of the last change]}}."""
_VIDEOS = (".mp4", ".mkv", ".mov")


class Backlog:
    """The rows and files that a tracker was not sent yet; the note is written after each, so that a kill loses none.

    A resumed run repeats rows that a tracker has had already. So rows are told apart by where they stand in the run:
    `at`, the environment steps at which a row was written, never falls; of equal ones the first `count` were sent.

    Args:
        name: the tracker's, of which the note has its name.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir, self.name = run_dir, name
        self._path = run_dir / FOLDER / f"{name.replace(':', '.')}.json"
        try:
            note = json.loads(read_stored(self._path, run_dir))
            self.id, self._at, self._count, self.step = str(note["id"]), note["at"], note["count"], int(note["step"])
            self._files: dict[str, list[int]] = dict(note["files"])
        except (OSError, ValueError, LookupError, TypeError):
            self.id, self._at, self._count, self.step, self._files = secrets.token_hex(6), -1, 0, -1, {}
        self.rewind()

    def rewind(self) -> None:
        """Has the rows read from the first on again, as metrics.jsonl was cut; those that were sent are left out."""
        self._reader = RowReader(self.run_dir / JSONL)
        self._seen = -1, 0

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields step and metrics of each row that is not sent yet; a row counts as sent when the next is asked for."""
        for at, count, row in self._unsent():
            step = int(row.pop("step"))
            yield step, {name: value for name, value in row.items() if math.isfinite(value)}
            self._at, self._count, self.step = at, count, step
            self._save()

    def unsent(self) -> int:
        """The number of rows that are not sent, by what the note says."""
        return sum(1 for _ in Backlog(self.run_dir, self.name)._unsent())

    def _unsent(self) -> Iterator[tuple[int, int, dict[str, float]]]:
        """Where each further row stands, which of those that stand there it is, and the row."""
        for row in self._reader.rows():
            at = int(row.get(TAKEN_AT, row["step"]))
            self._seen = at, self._seen[1] + 1 if at == self._seen[0] else 1
            if self._seen > (self._at, self._count):
                yield *self._seen, row

    def files(self, final: bool) -> Iterator[tuple[Path, str]]:
        """Yields path and kind of each file that is not sent as it is now, with `final` also the newest policy."""
        found = [(self.run_dir / CONFIG, "settings"), (self.run_dir / META, "versions")]
        with contextlib.suppress(OSError):
            videos = sorted((self.run_dir / "videos").iterdir())
            found += [(x, "video") for x in videos if x.suffix in _VIDEOS and not x.name.startswith(".")]
        if final:
            with contextlib.suppress(CheckpointError):
                found.append((find_checkpoint(self.run_dir) / "policy.safetensors", "policy"))
        for path, kind in found:
            stamp = _stamp(path)
            if stamp and self._files.get(self._key(path)) != stamp:
                yield path, kind

    def sent(self, path: Path) -> None:
        """Notes that a file was sent."""
        self._files[self._key(path)] = _stamp(path)
        self._save()

    def run(self) -> TrackedRun:
        """What a tracker is told of the run; the note is written, so that the id stays. Raises OSError."""
        experiment = json.loads(read_stored(self.run_dir / CONFIG, self.run_dir))["experiment"]
        meta = json.loads(read_stored(self.run_dir / META, self.run_dir))
        self._save()
        name = " ".join(str(x) for x in (meta.get("algo"), meta.get("env"), self.run_dir.absolute().name) if x)
        return TrackedRun(self.run_dir, self.id, name, _flat(experiment), meta, self.step)

    def _key(self, path: Path) -> str:
        return path.relative_to(self.run_dir).as_posix()

    def _save(self) -> None:
        note = {"id": self.id, "at": self._at, "count": self._count, "step": self.step, "files": self._files}
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(json.dumps(note))
        os.replace(temporary, self._path)


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def _flat(plain: Any, where: str = "") -> dict[str, str | float | bool | None]:
    """Settings as `to_plain` returns them, by dotted path."""
    if isinstance(plain, Mapping) and plain:
        parts = [_flat(value, f"{where}.{key}" if where else str(key)) for key, value in plain.items()]
        return {path: value for part in parts for path, value in part.items()}
    return {where: plain if plain is None or isinstance(plain, (str, int, float)) else json.dumps(plain)}
