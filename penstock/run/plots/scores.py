"""Last values of seeds compared: interquartile means, profiles and probabilities of improvement, as table or picture.

After Agarwal et al. 2021 ("Deep RL at the Edge of the Statistical Precipice"). Scores of different environments are
never mixed, so none is normalised: tables and profiles have a part for each, and a probability of improvement, which
needs no scale, is the mean over the environments that both curves have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.core.errors import ConfigError
from penstock.run.plots.bands import (
    Floats,
    bootstrap_band,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
)
from penstock.run.plots.curve_sets import named_curves
from penstock.run.plots.curves import Curve
from penstock.run.plots.looks import FEW, INK, curve_look, escaped, legend, marks_every, picture, plain_axes

_MOST = 12
"""Curves whose pairs are compared."""
_LEVELS = 201
_HEAD = ("environment", "curve", "runs", "steps", "IQM", "95% interval", "mean", "std")
_PAIR_HEAD = ("X", "Y", "environments", "P(X > Y)", "95% interval")
_LATEX = {
    **{c: rf"\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\~{}",
    "^": r"\^{}",
    ">": "$>$",
    "<": "$<$",
}


@dataclass(frozen=True)
class Scores:
    """The last values of the runs of one curve."""

    env: str
    name: str
    """Name of the curve, without its environment."""
    steps: int
    """Environment steps of the run that went least far."""
    values: Floats
    """[runs] float64."""


@dataclass(frozen=True)
class Improvement:
    """How often runs of one curve score more than those of another."""

    x: str
    y: str
    environments: int
    probability: float
    low: float
    high: float


def scores_of(curves: Sequence[tuple[str, list[Curve]]]) -> list[Scores]:
    """The scores of named curves, environments together; runs that have none of their own are left out.

    Raises:
        ConfigError: there are none.
    """
    found: list[Scores] = []
    for name, runs in curves:
        own = [run.own for run in runs if len(run.own)]
        if own:
            env, values = runs[0].of.panel, np.array([series.values[-1] for series in own])
            short = name.replace(f" on {env}", "", 1)
            found.append(Scores(env, short, int(min(series.steps[-1] for series in own)), values))
    if not found:
        raise ConfigError("no run has a score: runs that learn from a dataset need evaluations, --run.eval-interval")
    envs = list(dict.fromkeys(one.env for one in found))
    return sorted(found, key=lambda one: envs.index(one.env))


def improvements(scores: Sequence[Scores]) -> list[Improvement]:
    """P(X > Y) of each pair of curves that have an environment in common; X is the one of the higher probability.

    Raises:
        ConfigError: there are more than 12 curves, or no pair.
    """
    names = list(dict.fromkeys(one.name for one in scores))
    if len(names) > _MOST:
        raise ConfigError(f"{len(names)} curves have {len(names) * (len(names) - 1) // 2} pairs; give at most {_MOST}")
    by_curve = {name: {one.env: one.values for one in scores if one.name == name} for name in names}
    found: list[Improvement] = []
    for x, y in combinations(names, 2):
        common = [env for env in by_curve[x] if env in by_curve[y]]
        if common:
            p, low, high = probability_of_improvement([(by_curve[x][env], by_curve[y][env]) for env in common])
            swapped = p < 0.5
            ends = (1 - p, 1 - high, 1 - low) if swapped else (p, low, high)
            found.append(Improvement(*((y, x) if swapped else (x, y)), len(common), *ends))
    if not found:
        raise ConfigError("one curve for each environment; expected two that are to be compared")
    return found


def score_table(
    runs: str | Path | Sequence[str | Path],
    metric: str | None = None,
    smooth: int = 1,
    form: Literal["md", "latex"] = "md",
) -> str:
    """The scores of runs and, of several curves, their probabilities of improvement, as tables for a text.

    A run's score is its last value of the metric; with `smooth`, the mean of its last `smooth` values.

    Args:
        runs, metric, smooth: as `penstock.plot_runs` takes them.

    Raises:
        ConfigError: a directory holds no run, or no run a score.
    """
    metric, curves = named_curves(runs, metric, smooth)
    scores = scores_of(curves)
    rows: list[Sequence[str]] = []
    for one in scores:
        low, high = bootstrap_band(one.values[:, None])
        n, spread = len(one.values), np.std(one.values, ddof=1) if len(one.values) > 1 else np.nan
        between = _between(low[0], high[0]) if n > 1 else "-"
        middle = (f"{one.steps:,}", _short(interquartile_mean(one.values)), between)
        rows.append((one.env, one.name, str(n), *middle, _short(one.values.mean()), _short(spread)))
    tables = [_table(_HEAD, rows, f"{metric}, last values", form)]
    if len({one.name for one in scores}) > 1 and len({one.env for one in scores}) < len(scores):
        pairs = [
            (one.x, one.y, str(one.environments), f"{one.probability:.2f}", _interval(one, scores))
            for one in improvements(scores)
        ]
        tables.append(_table(_PAIR_HEAD, pairs, "probability of improvement", form))
    return "\n\n".join(tables)


def _interval(one: Improvement, scores: Sequence[Scores]) -> str:
    single = any(len(x.values) < 2 for x in scores if x.name in (one.x, one.y))
    return "-" if single else f"{one.low:.2f} to {one.high:.2f}"  # one run says nothing about others


def draw_profiles(curves: Sequence[tuple[str, list[Curve]]], label: str) -> Any:
    """Picture of performance profiles: the share of runs whose score exceeds a level, with 95% bootstrap bands."""
    scores = scores_of(curves)
    envs, names = (list(dict.fromkeys(found)) for found in zip(*((one.env, one.name) for one in scores)))
    with picture(6.8, 4.2 if len(envs) == 1 else 3.4 * len(envs)) as figure:
        for env, axes in zip(envs, figure.subplots(len(envs), 1, squeeze=False)[:, 0]):
            here = [one for one in scores if one.env == env]
            known = np.concatenate([one.values for one in here])
            margin = 0.05 * np.ptp(known) or 1.0
            levels = np.linspace(known.min() - margin, known.max() + margin, _LEVELS)
            for one in here:
                look = curve_look(index := names.index(one.name), len(names))
                share, low, high = performance_profile(one.values, levels)
                if len(one.values) > 1:
                    axes.fill_between(levels, low, high, color=look["color"], alpha=0.18, linewidth=0)
                axes.plot(levels, share, markevery=marks_every(index, _LEVELS), **look)
            axes.set_xlabel(f"{label}: more than")
            axes.set_ylabel("Share of runs")
            axes.set_ylim(-0.03, 1.03)
            axes.set_xlim(levels[0], levels[-1])
            plain_axes(axes)
            axes.set_title(escaped(env), loc="left", fontweight="bold")
        counts = {name: max(len(one.values) for one in scores if one.name == name) for name in names}
        entries = [
            (f"{name} ({counts[name]} run{'s' if counts[name] != 1 else ''})", curve_look(index, len(names)))
            for index, name in enumerate(names)
        ]
        legend(figure, entries, "Performance profiles, with 95% bootstrap bands")
    return figure


def draw_improvements(curves: Sequence[tuple[str, list[Curve]]], label: str) -> Any:
    """Picture of the probability of improvement of each pair of curves, with 95% bootstrap intervals."""
    pairs = improvements(scores_of(curves))
    with picture(6.8, 1.5 + 0.42 * len(pairs)) as figure:
        axes = figure.subplots()
        for row, one in enumerate(pairs):
            colour = curve_look(0, FEW)["color"]
            axes.barh(row, one.high - one.low, 0.55, left=one.low, color=colour, alpha=0.3)
            axes.plot([one.probability] * 2, [row - 0.275, row + 0.275], color=colour, linewidth=2.5)
        axes.set_yticks(range(len(pairs)), [escaped(f"{one.x}  >  {one.y}") for one in pairs])
        axes.set_ylim(len(pairs) - 0.4, -0.6)
        axes.axvline(0.5, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel(f"{label}\nP(X > Y), with its 95% bootstrap interval")
        plain_axes(axes)
        axes.yaxis.grid(False)
    return figure


def _short(value: Any) -> str:
    return "-" if value != value else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _between(low: float, high: float) -> str:
    return f"{_short(low)} to {_short(high)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str, form: str) -> str:
    if form == "latex":
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in (head, *rows)]
        columns = "".join(
            "r" if all(row[i][:1].isdigit() or row[i][:1] in "-" for row in rows) else "l" for i in range(len(head))
        )
        begin = [f"% {title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule"]
        return "\n".join([*begin, *lines[1:], r"\bottomrule", r"\end{tabular}"])
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([f"{title}:", "", lines[0], "|---" * len(head) + "|", *lines[1:]])


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
