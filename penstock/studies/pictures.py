"""Pictures of a search: its history, its trials as parallel coordinates, and how much each setting mattered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.run.plots.looks import FAINT, INK, NEUTRAL, STYLE, curve_look, escaped, legend
from penstock.studies.proposals import importances
from penstock.studies.report import setting
from penstock.studies.search import Search
from penstock.studies.space import Dimension
from penstock.studies.trial import Trial

_MARKS: dict[str, dict[str, Any]] = {
    "finished": {"marker": "o", "color": "#0072B2"},
    "pruned": {"marker": "o", "color": "#B8B8B8"},
    "going on": {"marker": "o", "color": "#E69F00"},
}
_BEST = {"marker": "*", "color": "#D55E00", "markersize": 15, "linestyle": "none"}
_WAY = {"color": NEUTRAL, "linestyle": "-", "linewidth": 1.4}


def draw_search(folder: Path, search: Search) -> tuple[Path, ...]:
    """Draws history.png, coordinates.png and importances.png; returns the paths of those that there was data for.

    A disk that refuses is a warning.
    """
    drawn: list[Path] = []
    pictures: tuple[tuple[str, Callable[[Search, Path], bool]], ...] = (
        ("history", _history),
        ("coordinates", _coordinates),
        ("importances", _importances),
    )
    for name, draw in pictures:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if draw(search, folder / f"{name}.png"):
                drawn.append(folder / f"{name}.png")
        except OSError as error:
            warnings.warn(f"cannot draw {folder / name}.png: {error.strerror or error}", stacklevel=2)
    return tuple(drawn)


def _history(search: Search, out: Path) -> bool:
    """Newest score of each trial with the best so far, and beside it the scores of each at its milestones."""
    known = [t for t in search.trials if search.worth(t.score) > -math.inf]
    if not known:
        return False
    goals = search.scheduler.goals

    def draw(figure: Any) -> None:
        several = len(goals) > 1
        panels = np.atleast_1d(figure.subplots(1, 1 + several, sharey=True))
        left, best = panels[0], search.best
        kinds = {kind: [t for t in known if _kind(t) == kind and t is not best] for kind in _MARKS}
        for kind, look in _MARKS.items():
            of = kinds[kind]
            left.plot([t.number for t in of], [t.score for t in of], linestyle="none", markersize=6, **look)
        so_far = np.maximum.accumulate([search.worth(t.score) for t in known])
        sign = 1 if search.settings.mode == "max" else -1
        if not several:
            left.step([t.number for t in known], sign * so_far, where="post", zorder=1, **_WAY)
        if best is not None:
            left.plot([best.number], [best.score], zorder=5, **_BEST)
        left.set_xlabel("Trial")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.set_ylabel(escaped(search.settings.metric))
        entries = [(kind, {**look, "linestyle": "none"}) for kind, look in _MARKS.items() if kinds[kind]]
        entries += [("best", _BEST)] + ([] if several else [("best so far", _WAY)])
        if several:
            _ways(panels[1], search, known)
        for axes in panels:
            _finish(axes)
        legend(figure, entries, None)

    _save(draw, (10.5 if len(goals) > 1 else 6.5, 4.0), out)
    return True


def _ways(axes: Any, search: Search, known: Sequence[Trial]) -> None:
    """The scores of each trial over environment steps."""
    for trial in sorted(known, key=lambda t: (t is search.best, len(t.scores))):
        at = [goal for goal, score in trial.scores.items() if score is not None]
        values = [trial.scores[goal] for goal in at]
        best = trial is search.best
        colour = _BEST["color"] if best else _MARKS[_kind(trial)]["color"]
        axes.plot(at, values, color=colour, marker="o", markersize=4, linewidth=2.2 if best else 1.2, alpha=0.9)
    goals = search.scheduler.goals
    axes.set_xlabel("Environment steps at the milestones")
    if search.scheduler.name == "asha":
        axes.set_xscale("log")
        axes.set_xticks(goals, [_steps(goal) for goal in goals])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter(lambda value, _: _steps(value))


def _coordinates(search: Search, out: Path) -> bool:
    """A line for each trial through its settings to its newest score, by which it is coloured."""
    known = [t for t in search.trials if search.worth(t.score) > -math.inf]
    if len(known) < 2:
        return False
    scores = np.array([t.score for t in known], np.float64)
    low, high = float(scores.min()), float(scores.max())
    span = (high - low) or 1.0

    def draw(figure: Any) -> None:
        from matplotlib import colormaps

        axes, paths = figure.subplots(), list(search.space)
        shade = colormaps["viridis"]
        for trial in sorted(known, key=lambda t: search.worth(t.score)):
            score = trial.score
            assert score is not None
            at = (score - low) / span
            heights = [_height(search.space[path], trial.values[path]) for path in paths]
            best = trial is search.best
            axes.plot(
                range(len(paths) + 1),
                [*heights, at],
                color=_BEST["color"] if best else shade(0.9 * at),
                linewidth=3.0 if best else 1.3,
                alpha=1.0 if trial.state == "finished" else 0.55,
                zorder=4 if best else 2,
            )
        for i, path in enumerate(paths):
            axes.axvline(i, color=INK, linewidth=1.0, zorder=3)
            for height, text in _ticks(search.space[path]):
                _label(axes, i, height, text)
        axes.axvline(len(paths), color=INK, linewidth=1.0, zorder=3)
        for height, value in ((0.0, low), (0.5, (low + high) / 2), (1.0, high)):
            _label(axes, len(paths), height, f"{value:.4g}")
        names = [*(path.partition(".")[2] for path in paths), search.settings.metric]
        axes.set_xticks(range(len(names)), [escaped(name) for name in names])
        axes.set_xlim(-0.35, len(paths) + 0.35)
        axes.set_ylim(-0.06, 1.06)
        axes.set_yticks([])
        axes.tick_params(axis="x", length=0, pad=10)
        axes.spines[:].set_visible(False)
        legend(
            figure, [("best", {"color": _BEST["color"], "linewidth": 3.0})], "Brighter: a larger score. Paler: pruned"
        )

    _save(draw, (max(2.2 * (len(search.space) + 1), 5.0), 4.6), out)
    return True


def _importances(search: Search, out: Path) -> bool:
    """A bar for each setting, of the scores at the farthest milestone that half of the trials reached."""
    reached = [g for g in search.scheduler.goals if 2 * sum(g in t.scores for t in search.trials) >= len(search.trials)]
    found = importances(search.space, search.trials, reached[-1], search.worth) if reached else {}
    if len(found) < 2:
        return False  # of one setting there is nothing to compare

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names = list(reversed(found))
        axes.barh([escaped(name) for name in names], [found[name] for name in names], color=curve_look(0, 1)["color"])
        for i, name in enumerate(names):
            axes.text(found[name] + 0.01, i, f"{found[name]:.2f}", va="center")
        axes.set_xlim(0, min(max(found.values()) * 1.15, 1.1))
        count = sum(reached[-1] in t.scores for t in search.trials)
        axes.set_xlabel(
            f"Importance for {escaped(search.settings.metric)} at {reached[-1]:,} steps (PED-ANOVA, {count} trials)"
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)

    _save(draw, (7.0, 1.3 + 0.45 * len(found)), out)
    return True


def _save(draw: Callable[[Any], None], size: tuple[float, float], out: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "axes.edgecolor": INK}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(out, dpi=160)


def _finish(axes: Any) -> None:
    axes.grid(True, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.04, y=0.08)


def _kind(trial: Trial) -> str:
    return trial.state if trial.state in _MARKS else "going on"


def _height(dimension: Dimension, value: Any) -> float:
    """Where on its axis a value lies, 0 to 1."""
    if dimension.kind == "choice":
        return dimension.choices.index(value) / (len(dimension.choices) - 1)
    if dimension.log:
        return math.log(value / dimension.low) / math.log(dimension.high / dimension.low)
    return (value - dimension.low) / (dimension.high - dimension.low)


def _ticks(dimension: Dimension) -> list[tuple[float, str]]:
    if dimension.kind == "choice":
        return [(_height(dimension, choice), str(choice)) for choice in dimension.choices]
    low, high = dimension.low, dimension.high
    decades = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1) if dimension.log else ()
    values = [10.0**k for k in decades] if len(decades) > 2 else []
    values = [low, *(v for v in values if low * 1.01 < v < high * 0.99), high] if values else [low, high]
    if not dimension.log:
        values = [low, (low + high) / 2, high]
    if dimension.whole:
        values = sorted({round(value) for value in values})
    return [(_height(dimension, value), setting(value)) for value in values]


def _label(axes: Any, x: float, height: float, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
    axes.text(x + 0.03, height, escaped(text), va="center", ha="left", fontsize=9, zorder=6, bbox=box)


def _steps(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"
