"""Picture of learning curves, over steps and over wall time; seeds are summed up as one curve."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from penstock.core.errors import ConfigError, nearest
from penstock.core.machine import counted
from penstock.run.files.stored_experiment import as_checkpoint_error, require_plain_run
from penstock.run.log import JSONL, read_metrics
from penstock.run.plots.bands import Floats, bootstrap_band, common_grid, interquartile_mean
from penstock.run.plots.curve_groups import by_number, curve_names
from penstock.run.plots.curves import Curve, Series, read_curves, without_copies
from penstock.run.plots.looks import (
    DATA,
    EVALUATION,
    FAINT,
    FEW,
    INK,
    NEUTRAL,
    STYLE,
    curve_look,
    escaped,
    legend,
    marks_every,
    require_matplotlib,
)
from penstock.run.plots.run_table import run_dirs as find_run_dirs

_RETURN, _ELO = "rollout/ep_rew_mean", "self_play/elo"
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
_DPI, _DPI_SHOWN = 160, 80
"""Dots per inch of a picture that is written to disk, and of one that a notebook shows."""
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def usual_metric(run_dirs: Sequence[Path]) -> str:
    """The mean return; where all runs are of self-play main's Elo, as the return of both sides of a game is 0."""
    rated = [any(_ELO in row for row in read_metrics(Path(d))) for d in run_dirs if (Path(d) / JSONL).is_file()]
    return _ELO if rated and all(rated) else _RETURN


@overload
def plot_runs(run_dirs: str | Path | Sequence[str | Path], out: None = None, metric: str | None = None) -> Any: ...
@overload
def plot_runs(run_dirs: str | Path | Sequence[str | Path], out: str | Path, metric: str | None = None) -> Path: ...
def plot_runs(
    run_dirs: str | Path | Sequence[str | Path], out: str | Path | None = None, metric: str | None = None
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

    Raises:
        MissingExtraError: matplotlib is not installed. ConfigError: a directory holds no run, none has a row with
            `metric`, or another suffix.
    """
    require_matplotlib()
    given, out = [run_dirs] if isinstance(run_dirs, (str, Path)) else run_dirs, None if out is None else Path(out)
    if out is not None and out.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"plot path {out}; expected a name that ends in {', '.join(_SUFFIXES)}")
    run_dirs = [run for path in given for run in find_run_dirs(Path(path))]
    metric = usual_metric(run_dirs) if metric is None else metric
    groups: dict[tuple[str, str, str], dict[str | None, list[Curve]]] = {}
    without: list[str] = []
    for run_dir in dict.fromkeys(Path(d).resolve() for d in run_dirs):
        require_plain_run(run_dir)
        with as_checkpoint_error(run_dir / JSONL):
            found = read_curves(run_dir, metric)
        for curve in found:
            groups.setdefault(curve.of.group, {}).setdefault(curve.policy, []).append(curve)
        if not found:
            without.append(str(run_dir))
    copies: dict[str, None] = {}
    for parts in groups.values():
        for policy, runs in parts.items():
            parts[policy], again = without_copies(runs)
            copies |= dict.fromkeys(str(run.of.run_dir) for run in again)
    if copies:
        warnings.warn(
            f"left out, the same run as another one, with its seed and values: {', '.join(copies)}", stacklevel=2
        )
    if not groups:
        looked = ", ".join(str(Path(d) / JSONL) for d in run_dirs) or "no directory at all"
        raise ConfigError(f"nothing to plot: no row with {metric!r} in {looked}; {_other(metric, run_dirs)}")
    if without:
        warnings.warn(f"left out, without a row with {metric!r}: {', '.join(without)}", stacklevel=2)
    names = curve_names([next(iter(parts.values()))[0].of for parts in groups.values()])
    curves = [
        (name if policy is None else f"{name}, {policy or 'all agents'}", runs)
        for name, parts in sorted(zip(names, groups.values()), key=lambda group: by_number(group[0]))
        for policy, runs in parts.items()
    ]
    figure = _draw(curves, metric)
    if out is None:
        return figure
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=_DPI)
    return out


def _other(metric: str, run_dirs: Sequence[Path]) -> str:
    """A hint at the metric that was meant, of those that the runs have."""
    known = {name for run_dir in run_dirs for row in read_metrics(run_dir) for name in row if "/" in name}
    return nearest(metric, known) if known else "give run directories, or folders that hold some"


def _draw(curves: list[tuple[str, list[Curve]]], metric: str) -> Any:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    class Picture(Figure):
        """A figure that a notebook shows without pyplot, and that is saved in this style anywhere."""

        def savefig(self, *args: Any, **kwargs: Any) -> None:
            with rc_context(style):
                super().savefig(*args, **kwargs)

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=_DPI_SHOWN)
            return file.getvalue()

    every = [run for _, runs in curves for run in runs]
    envs, panels = {run.of.env for run in every}, list(dict.fromkeys(run.of.panel for run in every))
    longest = max(_last(points.seconds) for run in every for points in (run.own, run.data))
    unit, unit_name = next(((u, name) for u, name in _UNITS if longest >= 2 * u), _UNITS[-1])
    style: Any = {**STYLE, "axes.edgecolor": INK, "svg.fonttype": "none", "pdf.fonttype": 42}
    with rc_context(style):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.07, wspace=0.04)  # else texts touch, or touch the border
        figure = Picture(figsize=(10.5, 4.2 if len(panels) == 1 else 3.4 * len(panels)), layout=layout)
        FigureCanvasAgg(figure)
        rows = dict(zip(panels, figure.subplots(len(panels), 2, sharey="row", squeeze=False)))
        points_too = len(curves) <= FEW and metric == "rollout/ep_rew_mean"
        entries: list[tuple[str, dict[str, Any]]] = []
        for index, (name, runs) in enumerate(curves):
            look = curve_look(index, len(curves))
            by_step, by_time = rows[runs[0].of.panel]
            _panel(by_time, runs, lambda points: points.seconds / unit, look, index, points_too)
            entries.append((name + _panel(by_step, runs, lambda points: points.steps, look, index, points_too), look))
        summed_up = any(by_step.collections for by_step, _ in rows.values())
        if points_too and any(len(run.evals) for _, runs in curves if len(runs) == 1 for run in runs):
            entries.append(("evaluation", {**EVALUATION, "markeredgecolor": NEUTRAL}))
        if any(len(run.data) for run in every):
            entries.append(("data", {**DATA, "color": NEUTRAL}))
        offline = {run.of.offline for run in every}
        steps = {1: "Steps played back" if True in offline else "Environment steps"}.get(len(offline), "Steps")
        for env, (by_step, by_time) in rows.items():
            _finish(by_step, steps)
            _finish(by_time, f"Wall time ({unit_name})")
            by_step.xaxis.set_major_formatter(_step_text)
            by_step.set_ylabel(_value_label(metric, offline))
            if len(panels) > 1:
                by_step.set_title(escaped(env), loc="left", fontweight="bold")
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
    axes.grid(True, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


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
