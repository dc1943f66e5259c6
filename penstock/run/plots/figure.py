"""Picture of learning curves, over steps, wall time or updates; seeds are summed up as one curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.machine import counted
from penstock.run.plots.bands import Floats, bootstrap_band, common_grid, interquartile_mean
from penstock.run.plots.curve_sets import RETURN, named_curves
from penstock.run.plots.curves import Curve, Series
from penstock.run.plots.looks import (
    DATA,
    EVALUATION,
    FEW,
    INK,
    NEUTRAL,
    curve_look,
    escaped,
    legend,
    marks_every,
    picture,
    plain_axes,
    require_matplotlib,
)
from penstock.run.plots.scores import draw_improvements, draw_profiles

Kind = Literal["curves", "profiles", "improvement"]
X = Literal["steps", "wall", "updates"]
_SUFFIXES = (".png", ".pdf", ".svg")
_LABELS = {
    "rollout/ep_rew_mean": "Return (mean of recent episodes)",
    "rollout/ep_len_mean": "Episode length (steps, mean of recent episodes)",
    "rollout/success_rate": "Success rate (recent episodes)",
    "eval/mean_reward": "Return in evaluation (mean)",
    "self_play/elo": "Elo (against past selves)",
    "time/fps": "Speed (environment steps per second)",
}
_OFFLINE_LABELS = {
    "rollout/ep_rew_mean": ("Return in evaluation (mean)", "Return (learned from data: in evaluation)"),
    "rollout/ep_len_mean": ("Episode length in evaluation (mean)", "Episode length (learned from data: in evaluation)"),
}
"""Labels where all runs learn from a dataset, and where only some do."""
_DPI = 160
"""Dots per inch of a picture that is written to disk."""
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@overload
def plot_runs(
    run_dirs: str | Path | Sequence[str | Path],
    out: None = None,
    metric: str | None = None,
    *,
    x: X | None = None,
    smooth: int = 1,
    kind: Kind = "curves",
) -> Any: ...
@overload
def plot_runs(
    run_dirs: str | Path | Sequence[str | Path],
    out: str | Path,
    metric: str | None = None,
    *,
    x: X | None = None,
    smooth: int = 1,
    kind: Kind = "curves",
) -> Path: ...
def plot_runs(
    run_dirs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    metric: str | None = None,
    *,
    x: X | None = None,
    smooth: int = 1,
    kind: Kind = "curves",
) -> Any:
    """Draws `metric` over environment steps and over wall time, side by side; returns the picture's path.

    Without `out` it returns the matplotlib Figure, which a notebook shows.

    Runs of equal environment, algorithm and settings are seeds of one curve: their interquartile mean, with a 95%
    bootstrap band, over the stretch that all of them reached. A single run is a line, with its evaluations as points
    in a picture of up to 7 curves. A run that learns from a dataset is drawn by its evaluations, and the data by a
    thin line. A run of several policies has a curve of all agents and one of each policy. Several environments have a
    row of the picture each. A directory given twice counts once; a copy of a run, and a run without a row to draw, are
    left out with a warning.

    Args:
        run_dirs: runs, or folders that hold some, as `runs` finds them.
        out: ends in .png, .pdf or .svg; its directory is made if absent. None: nothing is written.
        metric: of metrics.jsonl; None: rollout/ep_rew_mean, of runs of self-play self_play/elo.
        x: steps, wall or updates: one picture over that, instead of two.
        smooth: each value becomes the mean of so many rows, of those up to it.
        kind: curves; or, of the last value of each run, profiles: the share of runs that exceed a level; improvement:
            how often one curve's runs are better than another's.

    Raises:
        MissingExtraError: matplotlib is not installed. ConfigError: a directory holds no run, none has a row with
            `metric`, another suffix, or arguments that do not fit.
    """
    require_matplotlib()
    out = None if out is None else Path(out)
    if out is not None and out.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"plot path {out}; expected a name that ends in {', '.join(_SUFFIXES)}")
    for name, value, known in (("kind", kind, get_args(Kind)), ("x", x, (None, *get_args(X)))):
        if value not in known:
            raise ConfigError(f"{name}={value!r}; expected {', '.join(map(repr, known))}")
    if x is not None and kind != "curves":
        raise ConfigError(f"x={x!r} is of curves; kind={kind!r} shows last values alone")
    metric, curves = named_curves(run_dirs, metric, smooth)
    label = _value_label(metric, {run.of.offline for _, runs in curves for run in runs})
    if kind == "curves":
        figure = _draw(curves, metric, label, get_args(X)[:2] if x is None else (x,))
    else:
        figure = (draw_profiles if kind == "profiles" else draw_improvements)(curves, label)
    if out is None:
        return figure
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=_DPI)
    return out


def _draw(curves: list[tuple[str, list[Curve]]], metric: str, label: str, over: Sequence[X]) -> Any:
    every = [run for _, runs in curves for run in runs]
    envs, panels = {run.of.env for run in every}, list(dict.fromkeys(run.of.panel for run in every))
    longest = max(_last(points.seconds) for run in every for points in (run.own, run.data))
    unit, unit_name = next(((u, name) for u, name in _UNITS if longest >= 2 * u), _UNITS[-1])
    offline = {run.of.offline for run in every}
    steps = {1: "Steps played back" if True in offline else "Environment steps"}.get(len(offline), "Steps")
    along: dict[X, tuple[str, Callable[[Series], Floats]]] = {
        "steps": (steps, lambda points: points.steps),
        "wall": (f"Wall time ({unit_name})", lambda points: points.seconds / unit),
        "updates": ("Updates", lambda points: points.updates),
    }
    with picture(10.5 if len(over) > 1 else 6.8, 4.2 if len(panels) == 1 else 3.4 * len(panels)) as figure:
        rows = dict(zip(panels, figure.subplots(len(panels), len(over), sharey="row", squeeze=False)))
        points_too = len(curves) <= FEW and metric == RETURN
        entries: list[tuple[str, dict[str, Any]]] = []
        for index, (name, runs) in enumerate(curves):
            look = curve_look(index, len(curves))
            axes = rows[runs[0].of.panel]
            ends = [_panel(at, runs, along[x][1], look, index, points_too) for x, at in zip(over, axes)]
            entries.append((name + ends[0], look))
        summed_up = any(at.collections for axes in rows.values() for at in axes)
        if points_too and any(len(run.evals) for _, runs in curves if len(runs) == 1 for run in runs):
            entries.append(("evaluation", {**EVALUATION, "markeredgecolor": NEUTRAL}))
        if any(len(run.data) for run in every):
            entries.append(("data", {**DATA, "color": NEUTRAL}))
        for env, axes in rows.items():
            for x, at in zip(over, axes):
                _finish(at, along[x][0])
                if x != "wall":
                    at.xaxis.set_major_formatter(_step_text)
            axes[0].set_ylabel(label)
            if len(panels) > 1:
                axes[0].set_title(escaped(env), loc="left", fontweight="bold")
        if len(envs) == 1:
            figure.suptitle(escaped(*envs), fontweight="bold", fontsize=13)
        legend(figure, entries, "Seeds: interquartile mean, with its 95% bootstrap interval" if summed_up else None)
    return figure


def _panel(
    axes: Any, runs: list[Curve], x: Callable[[Series], Floats], look: dict[str, Any], index: int, points_too: bool
) -> str:
    """Draws one curve; returns the end of its name, such as ` (5 seeds)`."""
    for run in runs:
        known = np.isfinite(x(run.data))
        axes.plot(x(run.data)[known], run.data.values[known], color=look["color"], **DATA)
        if points_too and len(runs) == 1:
            axes.plot(x(run.evals), run.evals.values, markeredgecolor=look["color"], zorder=4, **EVALUATION)
    pairs = [(x(run.own), run.own.values) for run in runs]
    known = [(at[ok], y[ok]) for at, y in pairs if (ok := np.isfinite(at)).any()]
    summary = common_grid(known) if len(known) > 1 else None
    if summary is None:
        for at, y in known:
            marker = look["marker"] or ("o" if len(at) == 1 else "")
            axes.plot(at, y, markevery=marks_every(index, len(at)), **{**look, "marker": marker})
    else:
        grid, values = summary
        axes.fill_between(grid, *bootstrap_band(values), color=look["color"], alpha=0.18, linewidth=0)
        axes.plot(grid, interquartile_mean(values), markevery=marks_every(index, len(grid)), **look)
    by_itself = "" if summary is not None else ", each by itself"
    seeds = {run.of.run_dir if run.of.seed is None else run.of.seed for run in runs}
    count = f"{len(known)} seeds" if len(seeds) >= len(known) else f"{len(known)} runs of {counted(len(seeds), 'seed')}"
    return f" ({count}{by_itself})" if len(known) > 1 else ""


def _finish(axes: Any, label: str) -> None:
    axes.set_xlabel(label)
    if not any(len(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=INK)
    axes.set_xlim(left=0)
    axes.margins(x=0.02, y=0.06)
    plain_axes(axes)


def _value_label(metric: str, offline: set[bool]) -> str:
    """The label of the values; `offline` holds, for each run, whether it learns from a dataset."""
    if True in offline and metric in _OFFLINE_LABELS:
        return _OFFLINE_LABELS[metric][False in offline]
    return _LABELS.get(metric, metric)


def _step_text(value: float, _: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _last(x: Floats) -> float:
    return float(np.nanmax(x)) if np.isfinite(x).any() else 0.0
