"""The runs below a folder as the page lists them, read anew only where files have changed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, printable
from penstock.run.files.lock import is_training
from penstock.run.plots.columns import MetricColumns
from penstock.run.plots.curve_groups import Identity, by_number, columns_of_algorithms, curve_names, identify
from penstock.run.plots.run_table import RunRow, read_run, run_dirs

_LOOK_EVERY_S = 0.3
"""Seconds in which files are looked at once, however many requests come."""
_OF_IDENTITY = ("meta.json", "config.json")


@dataclass
class Entry:
    """A run of the list."""

    id: str
    """Names it in addresses: no path ever does."""
    path: Path
    name: str
    """Its path as the page shows it."""
    columns: MetricColumns
    identity: Identity
    group: str = ""
    """Id of the curve of which it is a seed."""
    row: RunRow | None = None
    """None if it cannot be read."""
    error: str = ""
    state: str = ""
    """`running`, `killed`, `done` or `ended`."""
    stamps: dict[str, Hashable] = field(default_factory=dict[str, Hashable])

    @property
    def last(self) -> dict[str, float]:
        """The last finite value of its metrics."""
        return self.columns.last(())

    def refresh(self) -> None:
        """Reads what has changed since the last time; an unreadable run has an `error`."""
        of_identity = tuple(stamp(self.path / name) for name in _OF_IDENTITY)
        try:
            rows = self.columns.refresh()
            if self.stamps.get("identity") != of_identity:
                self.identity, self.row = identify(self.path), None
                self.group = short_id(*self.identity.group)
            if self.row is None or self.stamps.get("rows") != rows:
                self.row = read_run(self.path, self.identity, self.columns)
            self.error = ""
        except OSError as error:
            self.row, self.error, rows = None, f"cannot be read: {error.strerror or error}", None
        self.state = self._state()
        self.stamps = {"identity": of_identity, "rows": rows, "state": self.state}

    def _state(self) -> str:
        training = is_training(self.path)
        if training is not None:
            return "running" if training else "killed"
        planned = self.identity.planned
        return "done" if self.row is not None and planned and self.row.steps >= planned else "ended"


class Catalog:
    """The runs of a folder. Its methods may be called by several threads; each call sees the files of its moment.

    Raises:
        ConfigError: there is no such folder, and no run of `--seeds` beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        """Held while the runs are read or changed."""
        self._entries: dict[str, Entry] = {}
        self._looked = -_LOOK_EVERY_S
        self._names: tuple[Hashable, Any] = (None, None)
        if not folder.is_dir():
            run_dirs(folder)

    def refresh(self) -> list[Entry]:
        """The runs in the order of their paths; [] if the folder holds none, yet."""
        with self.lock:
            if time.monotonic() - self._looked >= _LOOK_EVERY_S:
                known = self._entries
                found = {short_id(os.fsencode(path).hex()): path for path in self._dirs()}
                self._entries = {at: known.get(at) or self._entry(at, path) for at, path in found.items()}
                for entry in self._entries.values():
                    entry.refresh()
                self._looked = time.monotonic()
            return list(self._entries.values())

    def entry(self, run_id: str) -> Entry | None:
        """The run of an id; None if there is none."""
        self.refresh()
        return self._entries.get(run_id)

    def signature(self) -> str:
        """Changes whenever the list does."""
        return short_id(*(str((e.id, *e.stamps.values())) for e in self.refresh()))

    def groups(self) -> dict[str, list[Entry]]:
        """The readable runs by the id of their curve."""
        found: dict[str, list[Entry]] = {}
        for entry in self.refresh():
            if entry.row is not None:
                found.setdefault(entry.group, []).append(entry)
        return found

    def names(self) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        """The name of each curve by its id, in the order of names; and the settings in which curves differ."""
        with self.lock:
            groups = self.groups()
            key = tuple((e.id, e.stamps["identity"]) for entries in groups.values() for e in entries)
            if self._names[0] != key:
                first = [entries[0].identity for entries in groups.values()]
                pairs = zip(groups, map(_shown, curve_names(first)))
                names = dict(sorted(pairs, key=lambda pair: by_number(pair[1])))
                columns = columns_of_algorithms(first)
                settings = {
                    at: {_shown(name): _shown(texts[i]) for name, texts in columns.items()}
                    for i, at in enumerate(groups)
                }
                self._names = key, (names, settings)
            return self._names[1]

    def listing(self) -> dict[str, Any]:
        """Everything that the page's list shows, as JSON data without NaN."""
        with self.lock:
            entries, groups, (names, settings) = self.refresh(), self.groups(), self.names()
            metrics = {key for entry in entries if entry.row is not None for key in entry.columns.names} - {"step"}
            return {
                "signature": self.signature(),
                "folder": _shown(str(self.folder)),
                "metrics": sorted(metrics),
                "groups": [
                    {
                        "id": at,
                        "name": name,
                        "env": _shown(groups[at][0].identity.env),
                        "algo": _shown(groups[at][0].identity.algo),
                        "settings": settings[at],
                        "runs": [entry.id for entry in groups[at]],
                    }
                    for at, name in names.items()
                ],
                "runs": [_listed(entry) for entry in entries],
            }

    def _dirs(self) -> list[Path]:
        try:
            return run_dirs(self.folder)
        except (ConfigError, OSError):  # none, or a folder is removed at this moment
            return []

    def _entry(self, run_id: str, path: Path) -> Entry:
        inside = path.is_relative_to(self.folder) and path != self.folder
        name = _shown(str(path.relative_to(self.folder) if inside else path.name or path.resolve().name))
        return Entry(run_id, path, name, MetricColumns(path), Identity(path, name, "", None))


def stamp(path: Path) -> Hashable:
    """Equal as long as a file is; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def short_id(*parts: str) -> str:
    """A name of 16 hexadecimal digits for these texts."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def finite(value: float) -> float | None:
    """The number as JSON has it: None for NaN and infinite."""
    return value if abs(value) < float("inf") else None


def _listed(entry: Entry) -> dict[str, Any]:
    row, last = entry.row, entry.last if entry.row is not None else {}
    seed = entry.identity.seed
    numbers = {} if row is None else {"steps": row.steps, "return": row.return_, "evaluation": row.evaluation}
    hours = {} if row is None else {"hours": row.hours}
    return {
        "id": entry.id,
        "name": entry.name,
        "group": entry.group if row is not None else None,
        "seed": None if seed is None else finite(seed),
        "planned": entry.identity.planned,
        "state": entry.state,
        "error": printable(entry.error, kept=""),
        "faults": sum(x for key, x in last.items() if key.startswith("faults/") and key.count("/") == 1),
        **{name: finite(x) for name, x in {**numbers, **hours}.items()},
    }


def _shown(text: str) -> str:
    return printable(text, kept="")
