"""The one reader of runs: a table of a folder's runs with their last numbers, for people, notebooks and pictures."""

from __future__ import annotations

import glob
import html
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from penstock.core.errors import ConfigError, legible, nearest, printable
from penstock.run.files import RUN_EXPECTED
from penstock.run.log import JSONL, read_metrics
from penstock.run.plots.columns import MetricColumns
from penstock.run.plots.curve_groups import Identity, columns_of_algorithms, identify, telling
from penstock.run.plots.curves import EVAL, TIME

RETURN = "rollout/ep_rew_mean"
_COLUMNS = ("run", "env", "algo", "seed", "steps", "return", "evaluation", "hours")
_LONGEST, _MOST = 48, 6
"""Characters of a cell, and settings in a printed table."""


@dataclass(frozen=True)
class RunRow:
    """A run: what it is, and its last numbers; NaN where it has none."""

    path: Path
    """Its directory, as it was found."""
    identity: Identity = field(repr=False)
    """Environment, algorithm, settings and seed."""
    steps: int
    """Environment steps of its last row."""
    return_: float
    """Mean return of its last training episodes."""
    evaluation: float
    """Mean return of its last evaluation."""
    hours: float
    """Wall time."""

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def values(self) -> dict[str, Any]:
        """The columns of the table by name, without those of settings."""
        of = self.identity
        seed = None if of.seed is None else int(of.seed)
        what = (str(self.path), of.env, of.algo, seed, self.steps, self.return_, self.evaluation, self.hours)
        return dict(zip(_COLUMNS, what))

    def setting(self, path: str) -> Any:
        """A stored setting by dotted path, e.g. `algo.lr`. Raises KeyError if there is none."""
        value = self.identity.settings
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                raise KeyError(path)
            value = value[key]
        return value

    def metrics(self) -> list[dict[str, float]]:
        """Its rows of metrics in the order of writing, each with its `step`."""
        return read_metrics(self.path)


class Runs(Sequence[RunRow]):
    """Runs as a table: rows by index, `filter`, `frame` for pandas, `plot` for a picture; printed, it is the table."""

    def __init__(self, rows: Sequence[RunRow]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RunRow]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> RunRow: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> RunRow | Runs:
        return Runs(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def filter(self, where: Callable[[RunRow], bool] | None = None, **equal: Any) -> Runs:
        """The runs for which `where` is true and columns or settings are equal to these values.

            runs.filter(env="CartPole-v1", algo="ppo").filter(lambda run: run.evaluation > 400)
            runs.filter(lr=1e-3)  # of the algorithm; others by path, as in **{"sampler.T": 128}

        Raises:
            ConfigError: no run has a column or setting of that name.
        """
        wanted = {self._path(name): value for name, value in equal.items()}
        kept = [row for row in self if all(_value(row, name) == value for name, value in wanted.items())]
        return Runs([row for row in kept if where is None or where(row)])

    def sort(self, by: str, reverse: bool = False) -> Runs:
        """The runs in the order of a column or setting, as `filter` names them; those without a value are last.

            runs.sort("evaluation", reverse=True)[0]  # the best one

        Raises:
            ConfigError: no run has a column or setting of that name.
        """
        path = self._path(by)
        missing = [row for row in self if (value := _value(row, path)) is None or value != value]
        known = [row for row in self if row not in missing]
        return Runs([*sorted(known, key=lambda row: _rank(_value(row, path)), reverse=reverse), *missing])

    def _path(self, name: str) -> str:
        """The column, or dotted path of a setting, of a name as the table shows it. Raises ConfigError."""
        if "." not in name and name not in _COLUMNS and any(_has(row, f"algo.{name}") for row in self):
            return f"algo.{name}"
        if self._rows and name not in _COLUMNS and not any(_has(row, name) for row in self):
            known = [*_COLUMNS, *self._settings()]
            raise ConfigError(f"no run has {name!r}; {nearest(name, known)}; settings by path, as in algo.net.hidden")
        return name

    def frame(self) -> Any:
        """The table as a pandas DataFrame, with a column for each setting in which the runs differ, as text.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError("pandas is not installed, which .frame() needs: pip install pandas") from error
        return pandas.DataFrame({**{c: [row.values[c] for row in self] for c in _COLUMNS}, **self._settings()})

    def plot(self, metric: str | None = None) -> Any:
        """Their learning curves as a Figure, which a notebook shows; see `penstock.plot_runs`."""
        from penstock.run.plots.figure import plot_runs

        return plot_runs([row.path for row in self], metric=metric)

    def __repr__(self) -> str:
        head, *rows = self._cells()
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]
        if more := [key for key in self._settings() if key not in head]:
            lines.append(f"these differ too: {', '.join(more)}")
        return "\n".join(lines if rows else ["no runs"])

    def _repr_html_(self) -> str:
        head, *rows = self._cells()

        def line(cells: list[str], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"

    def _settings(self) -> dict[str, list[str]]:
        columns = columns_of_algorithms([row.identity for row in self])
        return {key: texts for key, texts in columns.items() if key not in _COLUMNS}

    def _cells(self) -> list[list[str]]:
        settings = self._settings()
        chosen = telling(settings, _MOST)
        rows = [[*map(_shown, [*row.values.values()][:-1]), _hours(row.hours)] for row in self]
        return [[*_COLUMNS, *chosen], *([*row, *(settings[key][i] for key in chosen)] for i, row in enumerate(rows))]


def runs(*folders: str | Path) -> Runs:
    """The runs in folders, by default `runs`: each itself if it is a run, else those below it, or beside by `--seeds`.

    Raises:
        ConfigError: a folder holds none.
    """
    rows: list[RunRow] = []
    for path in dict.fromkeys(run for folder in folders or ("runs",) for run in run_dirs(Path(folder))):
        try:
            rows.append(read_run(path))
        except OSError as error:
            warnings.warn(f"left out, {legible(path)} cannot be read: {error.strerror or error}", stacklevel=2)
    return Runs(rows)


def run_dirs(path: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs below it, else those that `--seeds` made beside it.

    Raises:
        ConfigError: there are none.
    """
    if os.path.isfile(path / JSONL):
        return [path]
    below = [found.parent for found in path.rglob(JSONL)]
    seeds = [found.parent for found in path.parent.glob(f"{glob.escape(path.name)}-s*/{JSONL}")]
    found = sorted(below) or sorted(run for run in seeds if run.name[len(path.name) + 2 :].isdecimal())
    if not found:
        seen = f"no {JSONL} there or below"
        if not path.is_dir():
            seen = "it is a file" if path.exists() else "there is no such folder"
        raise ConfigError(f"no run in {path}: {seen}; {RUN_EXPECTED}")
    return found


def read_run(path: Path, identity: Identity | None = None, columns: MetricColumns | None = None) -> RunRow:
    """The run in a directory; `identity` and `columns`, fresh ones, spare reading anew what has not changed.

    Raises OSError if its metrics cannot be read.
    """
    if columns is None:
        columns = MetricColumns(path)
        columns.refresh()
    last = columns.last((RETURN, EVAL, TIME))
    return RunRow(
        path,
        identity or identify(path),
        int(last["step"]),
        last.get(RETURN, math.nan),
        last.get(EVAL, math.nan),
        last.get(TIME, math.nan) / 3600,
    )


def _rank(value: Any) -> tuple[bool, Any]:
    """A key that sorts numbers before anything else, which is sorted as text."""
    number = isinstance(value, (int, float))
    return not number, value if number else str(value)


def _hours(value: float) -> str:
    """Two significant digits, whole from 10."""
    return "-" if value != value else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _has(row: RunRow, name: str) -> bool:
    try:
        row.setting(name)
    except KeyError:
        return False
    return True


def _value(row: RunRow, name: str) -> Any:
    return row.values[name] if name in _COLUMNS else row.setting(name) if _has(row, name) else None


def _shown(value: Any) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    text = (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:,.1f}"
        if isinstance(value, float)
        else str(value)
    )
    return printable(text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}", kept="")
