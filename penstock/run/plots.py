"""Learning curves of runs as a picture: over environment steps and over wall time, seeds summed up as one curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.run.bands import Floats, bootstrap_band, common_grid, interquartile_mean
from penstock.run.grouping import Identity, curve_names, identify
from penstock.run.log import JSONL, read_metrics

_SUFFIXES = (".png", ".pdf", ".svg")
_TIME, _EVAL = "time/time_elapsed", "eval/mean_reward"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's set, told apart by all common kinds of colour vision (Wong 2011, Nature Methods 8, 441)."""
_LINES = ("-", "--", "-.", ":")
_INK, _FAINT = "#333333", "#D9D9D9"
_LABELS = {
    "rollout/ep_rew_mean": "Return (mean of recent episodes)",
    "rollout/ep_len_mean": "Episode length (steps, mean of recent episodes)",
    "rollout/success_rate": "Success rate (recent episodes)",
    "eval/mean_reward": "Return in evaluation (mean)",
    "time/fps": "Speed (environment steps per second)",
}
_EVAL_LABEL = "evaluation"
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True)
class _Run:
    of: Identity
    steps: Floats
    seconds: Floats
    """Wall time since the start; NaN where the row does not say."""
    values: Floats
    eval_steps: Floats
    eval_seconds: Floats
    eval_values: Floats


def plot_runs(run_dirs: Sequence[Path], out: Path, metric: str = "rollout/ep_rew_mean") -> Path:
    """The path of a picture with two panels: `metric` over environment steps, and over wall time.

    Runs of equal environment, algorithm and settings are seeds of one curve: their interquartile mean, with a 95%
    bootstrap band, over the stretch that all of them reached. A single run is a line, with its evaluations as points.
    A directory that is given twice counts once.

    Args:
        out: ends in .png, .pdf or .svg; its directory is made if absent.

    Raises:
        ConfigError: none of the directories has a row with `metric`, or another suffix.
    """
    out = Path(out)
    if out.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"plot path {out}; expected a name that ends in {', '.join(_SUFFIXES)}")
    groups: dict[tuple[str, str, str], list[_Run]] = {}
    for run_dir in dict.fromkeys(Path(d).resolve() for d in run_dirs):
        if (run := _read_run(run_dir, metric)) is not None:
            groups.setdefault(run.of.group, []).append(run)
    if not groups:
        looked = ", ".join(str(Path(d) / JSONL) for d in run_dirs) or "no directory at all"
        raise ConfigError(f"nothing to plot: no row with {metric!r} in {looked}; "
                          "give run directories, or another metric")  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    curves = list(groups.values())
    names = curve_names([runs[0].of for runs in curves])
    _draw(sorted(zip(names, curves), key=lambda curve: curve[0]), metric, out)
    return out


def _draw(curves: list[tuple[str, list[_Run]]], metric: str, out: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    envs = {run.of.env for _, runs in curves for run in runs}
    longest = max((_last(run.seconds) for _, runs in curves for run in runs), default=0.0)
    unit, unit_name = next(((u, name) for u, name in _UNITS if longest >= 2 * u), _UNITS[-1])
    style: Any = {"font.size": 10.5, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "text.color": _INK,
             "xtick.color": _INK, "ytick.color": _INK, "svg.fonttype": "none", "pdf.fonttype": 42}  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(10.5, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        by_step, by_time = figure.subplots(1, 2, sharey=True)
        summed_up = False
        for index, (name, runs) in enumerate(curves):
            look = {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _LINES[index // len(_COLOURS) % len(_LINES)]}
            summed_up |= _curve(by_step, [(run.steps, run.values) for run in runs], look, name)
            summed_up |= _curve(by_time, [(run.seconds / unit, run.values) for run in runs], look, name)
            if len(runs) == 1 and metric == "rollout/ep_rew_mean":
                _points(by_step, runs[0].eval_steps, runs[0].eval_values, look)
                _points(by_time, runs[0].eval_seconds / unit, runs[0].eval_values, look)
        _finish(by_step, "Environment steps")
        _finish(by_time, f"Wall time ({unit_name})")
        by_step.xaxis.set_major_formatter(_step_text)
        by_step.set_ylabel(_LABELS.get(metric, metric))
        if len(envs) == 1:
            figure.suptitle(*envs, fontweight="bold", fontsize=13)
        _legend(figure, by_step, summed_up)
        figure.savefig(out, dpi=160)


def _curve(axes: Any, curves: list[tuple[Floats, Floats]], look: dict[str, str], name: str) -> bool:
    """Draws the seeds' summary (True), or each seed by itself where they have no stretch in common."""
    known = [(x[ok], y[ok]) for x, y in curves if (ok := np.isfinite(x) & np.isfinite(y)).any()]
    summary = common_grid(known) if len(known) > 1 else None
    if summary is None:
        label = f"{name} ({len(known)} seeds, each by itself)" if len(known) > 1 else name
        for x, y in known:
            axes.plot(x, y, linewidth=1.8, label=label, marker="o" if len(x) == 1 else None, **look)
        return False
    grid, values = summary
    low, high = bootstrap_band(values)
    axes.fill_between(grid, low, high, color=look["color"], alpha=0.18, linewidth=0)
    axes.plot(grid, interquartile_mean(values), linewidth=2.0, label=f"{name} ({len(known)} seeds)", **look)
    return True


def _points(axes: Any, x: Floats, y: Floats, look: dict[str, str]) -> None:
    if len(x):
        axes.plot(x, y, linestyle="none", marker="D", markersize=5.5, markerfacecolor="white",
                  markeredgecolor=look["color"], markeredgewidth=1.5, label=_EVAL_LABEL, zorder=4)  # fmt: skip


def _finish(axes: Any, label: str) -> None:
    axes.set_xlabel(label)
    if not axes.lines:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=_INK)
    axes.set_xlim(left=0)
    axes.margins(x=0.02, y=0.06)
    axes.grid(True, color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Any, summed_up: bool) -> None:
    """One entry for each name, evaluations last."""
    shown = {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    if _EVAL_LABEL in shown:
        shown[_EVAL_LABEL] = shown.pop(_EVAL_LABEL)
    title = "Seeds: interquartile mean, with its 95% bootstrap interval" if summed_up else None
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(len(shown), 4), frameon=False,
                  title=title, title_fontsize=9)  # fmt: skip


def _step_text(value: float, _: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _last(x: Floats) -> float:
    return float(np.nanmax(x)) if np.isfinite(x).any() else 0.0


def _read_run(run_dir: Path, metric: str) -> _Run | None:
    rows = read_metrics(run_dir)
    curve = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
    if not curve:
        return None
    evals = [row for row in rows if math.isfinite(row.get(_EVAL, math.nan))]
    timed = [row for row in rows if math.isfinite(row.get(_TIME, math.nan))]

    def column(of: list[dict[str, float]], key: str) -> Floats:
        return np.array([row.get(key, math.nan) for row in of], np.float64)

    def seconds(of: list[dict[str, float]]) -> Floats:
        """Rows of evaluations may come without the time: it follows from their steps."""
        if not timed:
            return np.full(len(of), math.nan)
        return np.interp(column(of, "step"), column(timed, "step"), column(timed, _TIME))

    return _Run(identify(run_dir), column(curve, "step"), seconds(curve), column(curve, metric),
                column(evals, "step"), seconds(evals), column(evals, _EVAL))  # fmt: skip
