"""Curves of one metric as the page draws them: seeds summed up with a band, a single run as a thinned line."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from penstock.run.plots.bands import Floats, bootstrap_band, common_grid, interquartile_mean
from penstock.run.plots.curves import Curve, Series, curves_of, without_copies
from penstock.run.plots.run_table import RETURN
from penstock.view.catalog import Catalog, Entry

_POINTS, _RESAMPLES = 150, 500
"""Points of a band, and of half a line; resamples of the bootstrap, which a person does not wait for."""
_MOST_KEPT = 4_000
"""Curves in memory."""


class Charts:
    """Curves of a catalog's groups; those whose files have not changed are kept."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._kept: dict[tuple[str, str, bool], tuple[Hashable, list[dict[str, Any]]]] = {}

    def chart(self, metric: str, wall: bool = False, groups: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The curves of some groups, None: of all; each is a dict of `group`, `policy`, `panel` and numbers.

        `x`, `y` and, of several seeds, `low` and `high` have one length; x are steps, or seconds if `wall`. `points`
        and `data` are pairs of lists: evaluations of a single run, and the metric of a dataset that is played back.
        """
        with self._catalog.lock:
            known = self._catalog.groups()
            found: list[dict[str, Any]] = []
            for at in [at for at in self._catalog.names()[0] if groups is None or at in groups]:
                stamps = tuple((e.id, e.stamps["identity"], e.stamps["rows"]) for e in known[at])
                key = (at, metric, wall)
                if self._kept.get(key, (None,))[0] != stamps:
                    if len(self._kept) >= _MOST_KEPT:
                        self._kept.clear()
                    self._kept[key] = stamps, _group(at, known[at], metric, wall)
                found += self._kept[key][1]
            return found


def _group(group: str, entries: Sequence[Entry], metric: str, wall: bool) -> list[dict[str, Any]]:
    by_policy: dict[str | None, list[Curve]] = {}
    evaluated = metric == RETURN and len(entries) == 1
    for entry in entries:
        try:
            found = curves_of(entry.identity, entry.columns.points, metric, entry.columns.names, wall, evaluated)
        except OSError:  # it goes away at this moment
            continue
        for one in found:
            by_policy.setdefault(one.policy, []).append(one)
    curves: list[dict[str, Any]] = []
    for policy, runs in by_policy.items():
        runs, _ = without_copies(runs)
        shown = [_xy(run.own, wall) for run in runs]
        shown = [(x, y) for x, y in shown if len(x)]
        curve: dict[str, Any] = {"group": group, "policy": policy, "panel": runs[0].of.panel, "seeds": len(shown)}
        curve |= _summed(shown) if len(shown) > 1 else {}
        if "x" not in curve:  # a single run, or seeds that share no stretch: the longest
            curve |= _line(max(shown, key=lambda xy: len(xy[0]), default=(np.empty(0), np.empty(0))))
        if evaluated:
            curve["points"] = [part.tolist() for part in _xy(runs[0].evals, wall)]
        if len(runs) == 1 and len(runs[0].data):
            data = _line(_xy(runs[0].data, wall))
            curve["data"] = [data["x"], data["y"]]
        curves.append(curve)
    return curves


def _xy(series: Series, wall: bool) -> tuple[Floats, Floats]:
    x = series.seconds if wall else series.steps
    known = np.isfinite(x)
    return x[known], series.values[known]


def _summed(curves: Sequence[tuple[Floats, Floats]]) -> dict[str, Any]:
    """Interquartile mean and band where all curves are known, as in `plot_runs`; {} if that is nowhere."""
    found = common_grid(curves, _POINTS)
    if found is None:
        return {}
    grid, values = found
    low, high = bootstrap_band(values, resamples=_RESAMPLES)
    ends = {"x": grid, "y": interquartile_mean(values), "low": low, "high": high}
    return {name: [float(f"{x:.7g}") for x in part] for name, part in ends.items()}


def _line(xy: tuple[Floats, Floats]) -> dict[str, Any]:
    x, y = thinned(*xy)
    return {"x": x.tolist(), "y": y.tolist()}


def thinned(x: Floats, y: Floats, points: int = _POINTS) -> tuple[Floats, Floats]:
    """At most 2 x `points` + 2 of the points of a line: the least and the greatest of each stretch, and both ends."""
    if len(x) <= 2 * points + 2:
        return x, y
    ends = np.linspace(0, len(x), points + 1).astype(int)
    kept = {0, len(x) - 1}
    for start, stop in zip(ends, ends[1:]):
        part = y[start:stop]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    order = np.array(sorted(kept))
    return x[order], y[order]
