"""Colours, lines and marks that tell curves apart, and the legend with their names."""

from __future__ import annotations

import importlib.util
import io
import math
import textwrap
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.core.errors import MissingExtraError

INK, FAINT, NEUTRAL = "#333333", "#D9D9D9", "#707070"
STYLE: Any = {
    "font.size": 10.5,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
"""Settings of matplotlib for every picture."""
FEW = 7
"""Curves that colour alone tells apart at a glance."""
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8B1A3A",
    "#76D862",
    "#8976EB",
    "#76624E",
    "#004E00",
    "#002789",
    "#EB89FF",
    "#B11414",
    "#9D8900",
    "#620076",
    "#D8A0A0",
    "#274E62",
    "#3B7600",
    "#9D2789",
)
"""First Okabe and Ito's set, told apart by all common kinds of colour vision (Wong 2011, Nature Methods 8, 441), then
colours that are far from those before them in Oklab."""
_MARKS, _LINES = ("", "o", "^"), ("-", "--", "-.", ":")
_COLUMNS, _WRAP, _MARGIN = 4, 100, 0.4
"""Most columns of names, characters in a line of a name, and inches left free beside a legend."""
EVALUATION: dict[str, Any] = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 5.5,
    "markerfacecolor": "white",
    "markeredgewidth": 1.5,
}
DATA: dict[str, Any] = {"linestyle": (0, (1, 1.5)), "linewidth": 1.0}


_DPI_SHOWN = 80
"""Dots per inch of a picture that a notebook shows."""


@contextmanager
def picture(width: float, height: float) -> Generator[Any]:
    """A figure of so many inches, drawn in this style inside the block and saved in it anywhere.

    It needs no pyplot to be shown by a notebook.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    class Picture(Figure):
        def savefig(self, *args: Any, **kwargs: Any) -> None:
            with rc_context(style):
                super().savefig(*args, **kwargs)

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=_DPI_SHOWN)
            return file.getvalue()

    style: Any = {**STYLE, "axes.edgecolor": INK, "svg.fonttype": "none", "pdf.fonttype": 42}
    with rc_context(style):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.07, wspace=0.04)  # else texts touch, or touch the border
        figure = Picture(figsize=(width, height), layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def plain_axes(axes: Any) -> None:
    """A grid behind the curves, and no lines at the top and on the right."""
    axes.grid(True, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def curve_look(index: int, count: int) -> dict[str, Any]:
    """Colour, line and mark of curve `index` of `count`: the first 21 differ in colour, all 84 in one of the three.

    From the eighth on, each group of seven has its own mark: more colours alone are hard to tell apart.
    """
    colour = _COLOURS[index % len(_COLOURS)]
    line = _LINES[index // len(_COLOURS) % len(_LINES)]
    mark = _MARKS[index % len(_COLOURS) // FEW]
    return {
        "color": colour,
        "linestyle": line,
        "marker": mark,
        "markersize": 4.5,
        "linewidth": 1.8 if count <= FEW else 1.4,
    }


def marks_every(index: int, points: int) -> int | tuple[float, float]:
    """`markevery` of a line: each point of a short one, else places that differ from its neighbours' places."""
    return 1 if points <= 10 else (0.02 * (index % 5), 0.11)


def require_matplotlib() -> None:
    """Raises MissingExtraError, which names the extra `plot`, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plot")


def legend(figure: Any, entries: Sequence[tuple[str, dict[str, Any]]], title: str | None) -> None:
    """Puts names below the axes in as many columns as fit; the figure grows by the rows, and to the longest name."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look) for _, look in entries]
    labels = [escaped("\n".join(textwrap.wrap(name, _WRAP))) for name, _ in entries]
    tried = sorted({_balanced(len(labels), columns) for columns in range(1, _COLUMNS + 1)}, reverse=True)
    for columns in tried:
        below = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, title=title, title_fontsize=9
        )
        width, height = below.get_window_extent().size / figure.dpi + _MARGIN
        if width <= figure.get_figwidth() or columns == tried[-1]:
            figure.set_size_inches(max(width, figure.get_figwidth()), figure.get_figheight() + height - _MARGIN)
            return
        below.remove()


def _balanced(count: int, columns: int) -> int:
    """The fewest columns that need no more rows than `columns` do."""
    return math.ceil(count / math.ceil(count / columns))


def escaped(text: str) -> str:
    """The text with $ escaped, which matplotlib takes for mathematics."""
    return text.replace("$", r"\$")
