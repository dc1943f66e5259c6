"""The picture of matches between several sides: a square for each two, shaded by the points of the one in its row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.run.playing.matches import Match
from penstock.run.plots.looks import INK, STYLE, require_matplotlib

_DARK = 0.25
"""Distance of the points from 1/2 from which on the number is written in white."""
_LONGEST = 28
_COLOURS = ("#D55E00", "#FFFFFF", "#0072B2")
"""Lost, even, won: apart for all common kinds of colour vision."""


def draw_matrix(matches: Sequence[Match], out: Path, title: str) -> Path:
    """Draws the points of each side in a row against each side in a column; returns the path. Needs two sides.

    Raises MissingExtraError without matplotlib.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for match in matches for name in match.sides))
    size = 2.4 + 0.95 * len(names)
    with rc_context({**STYLE, "axes.edgecolor": INK}):
        figure = Figure(figsize=(size + 1.2, size), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        shades = LinearSegmentedColormap.from_list("points", _COLOURS)
        points = [[0.5 if a == b else points_of(matches, a, b) for b in names] for a in names]
        axes.imshow(points, cmap=shades, vmin=0.0, vmax=1.0)
        for i, row in enumerate(points):
            for j, value in enumerate(row):
                colour = "white" if abs(value - 0.5) > _DARK else INK
                axes.text(j, i, "" if i == j else f"{value:.2f}", ha="center", va="center", color=colour)
        short = [_short(name) for name in names]
        axes.set_xticks(range(len(names)), short, rotation=35, ha="right")
        axes.set_yticks(range(len(names)), short)
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=11, color=INK, loc="left")
        axes.set_xlabel("against")
        axes.set_ylabel("points an episode of")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=160)
    return out


def points_of(matches: Sequence[Match], one: str, other: str) -> float:
    """Points of one side against another."""
    for match in matches:
        if match.sides == (one, other):
            return match.points
        if match.sides == (other, one):
            return match.turned().points
    raise KeyError((one, other))


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"...{name[3 - _LONGEST :]}"
