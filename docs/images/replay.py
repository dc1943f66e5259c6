"""Draws the pictures of docs/replay.md: what the storage holds, what the index draws, and as what the view shows it.

python docs/images/replay.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

HERE = Path(__file__).parent
INK, FAINT, LINE = "#1f2933", "#7b8794", "#9fb3c8"
STEP, RESET, OLD, HOT, NEXT, STATE = "#bcd7ee", "#e4e7eb", "#ffffff", "#f0a35e", "#8fcb9b", "#c3a6d8"
plt.rcParams |= {"font.size": 10, "font.family": "DejaVu Sans", "text.color": INK, "savefig.dpi": 130}


def canvas(width: float, height: float, title: str) -> tuple[Any, Any]:
    """An empty figure whose unit is one cell."""
    figure, axes = plt.subplots(figsize=(width * 0.42, height * 0.42))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.text(0.1, height - 0.45, title, fontsize=12, fontweight="bold", va="center")
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    return figure, axes


def cell(axes: Any, x: float, y: float, color: str, text: str = "", **style: Any) -> None:
    """One row of one slot."""
    axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=color, edgecolor=LINE, linewidth=0.8, **style))
    if text:
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9)


def say(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, **{"va": "center", "fontsize": 9.5, "color": INK, **style})


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0, color: str = INK) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.2,
                                   connectionstyle=f"arc3,rad={bend}", shrinkA=1, shrinkB=1))  # fmt: skip


def bracket(axes: Any, x0: float, x1: float, y: float, text: str, color: str = INK, below: bool = True) -> None:
    """A span over cells x0 to x1 with its name."""
    tip = 0.18 if below else -0.18
    axes.plot([x0 + 0.08, x0 + 0.08, x1 - 0.08, x1 - 0.08], [y + tip, y, y, y + tip], color=color, linewidth=1.2)
    say(axes, (x0 + x1) / 2, y - (0.36 if below else -0.36), text, ha="center", color=color)


def legend(axes: Any, x: float, y: float, entries: list[tuple[str, str, float]]) -> None:
    for color, text, width in entries:
        axes.add_patch(Rectangle((x, y - 0.22), 0.44, 0.44, facecolor=color, edgecolor=LINE, linewidth=0.8))
        say(axes, x + 0.62, y, text, fontsize=9, color=FAINT)
        x += width


def storage() -> None:
    """The ring of three slots, and the frames of one of them."""
    figure, axes = canvas(26, 16.2, "Storage: one ring of rows for all slots, over time")
    slots = [
        "=====T.==========O.",
        "=O.======X.........",
        "==========T.=======",
    ]
    left, rows = 4.2, len(slots[0])
    for b, row in enumerate(slots):
        y = 11.6 - b
        say(axes, left - 0.3, y + 0.5, f"slot {b}", ha="right")
        for i, kind in enumerate(row):
            lost = b == 1 and i > 10
            cell(
                axes,
                left + i,
                y,
                RESET if kind == "." else STEP,
                "" if lost or kind in "=." else {"X": "!"}.get(kind, kind),
            )
        cell(axes, left + rows, y, OLD, "obs")
    say(axes, left + 0.5, 13.0, "1040", ha="center", color=FAINT, fontsize=9)
    say(axes, left - 0.3, 13.0, "row", ha="right", color=FAINT, fontsize=9)
    for i in (5, 10, 15):
        say(axes, left + i + 0.5, 13.0, str(1040 + i), ha="center", color=FAINT, fontsize=9)
    say(axes, left + rows + 0.5, 13.0, "1059", ha="center", color=FAINT, fontsize=9)
    arrow(axes, (left + 0.5, 14.2), (left + 0.5, 13.35))
    say(axes, left + 0.2, 14.55, "tail: the oldest row kept; the next batch overwrites it")
    arrow(axes, (left + rows + 0.5, 14.2), (left + rows + 0.5, 13.35))
    say(axes, left + rows + 0.9, 14.55, "head: the newest observation, no action yet", ha="right")
    legend(axes, left, 8.95, [(STEP, "a step", 2.6), (RESET, "not valid: never drawn", 6.0)])
    say(axes, left + 8.8, 8.95, "T terminal    O truncated    ! a fault, the slot idles", fontsize=9, color=FAINT)

    say(axes, 0.1, 7.6, "deduplicate_frames=True: a row keeps its newest frame only; stacks are put together as they are read",
        fontweight="bold", fontsize=10.5)  # fmt: skip
    names = ["a5", "a6", "a7", "a8", "a9", "b1", "b2", "b3", "b4", "b5"]
    for i, name in enumerate(names):
        cell(axes, left + 1.5 * i, 5.2, STEP if i < 5 else NEXT, name)
        say(axes, left + 1.5 * i + 0.5, 6.5, f"row {1040 + i}", ha="center", color=FAINT, fontsize=8)
    say(axes, left - 0.3, 5.7, "frames", ha="right")
    for x, picks, text in (
        (0.6, (1, 2, 3, 4), "row 1044"),
        (7.6, (5, 5, 5, 6), "row 1046"),
        (14.6, (6, 7, 8, 9), "row 1049"),
    ):
        for k, pick in enumerate(picks):
            cell(axes, left + x + k, 1.5, STEP if pick < 5 else NEXT, names[pick])
            arrow(axes, (left + 1.5 * pick + 0.5, 5.2), (left + x + k + 0.5, 2.55), color=FAINT)
        say(axes, left + x + 2, 1.05, f"the stack of {text}", ha="center", fontsize=9)
    say(
        axes,
        left + 9.6,
        0.4,
        "an episode opens: its first frame again, or zeros, as the wrapper does",
        ha="center",
        fontsize=9,
        color=FAINT,
    )
    figure.savefig(HERE / "replay-storage.png")


def index() -> None:
    """The same ten units under three indexes."""
    figure, axes = canvas(22, 12.9, "Index: which of the usable units are drawn")
    priority = [0.6, 2.2, 0.3, 0.0, 1.1, 3.0, 0.9, 0.0, 1.2, 1.3]
    left, width = 6.2, 1.5

    def units(y: float, height: float, values: list[float], colors: list[str]) -> None:
        for i, (value, color) in enumerate(zip(values, colors)):
            x = left + width * i
            if priority[i] == 0.0:
                say(axes, x + 0.65, y + 0.3, "not\nvalid", ha="center", fontsize=7.5, color=FAINT)
            axes.add_patch(Rectangle((x, y), 1.3, value * height, facecolor=color, edgecolor=LINE, linewidth=0.8))
        axes.plot([left - 0.2, left + width * 10], [y, y], color=FAINT, linewidth=1)

    usable = [float(p > 0.0) for p in priority]
    say(axes, 0.1, 10.9, "uniform", fontweight="bold", fontsize=10.5)
    say(axes, 0.1, 10.2, "each with the\nsame chance", color=FAINT, fontsize=9, va="top")
    units(9.6, 1.4, usable, [STEP] * 10)

    say(axes, 0.1, 7.6, "prioritized", fontweight="bold", fontsize=10.5)
    say(
        axes,
        0.1,
        6.9,
        "by (|error| + eps)^alpha;\none from each of N\nequal parts of the total",
        color=FAINT,
        fontsize=9,
        va="top",
    )
    units(6.0, 0.7, priority, [HOT] * 10)
    total, at = sum(priority), 0.0
    for i, value in enumerate(priority):
        start, end = left + 14.8 * at / total, left + 14.8 * (at + value) / total
        axes.add_patch(Rectangle((start, 4.3), end - start, 0.7, facecolor=HOT, edgecolor=INK, linewidth=0.6))
        if value >= 0.5:
            say(axes, (start + end) / 2, 4.65, str(i), ha="center", fontsize=8.5)
        at += value
    for k, share in enumerate((0.4, 0.75, 0.2, 0.6)):
        axes.plot([left + 3.7 * (k + 1)] * 2, [4.1, 5.2], color=INK, linewidth=1.4, linestyle=(0, (3, 2)))
        arrow(axes, (left + 3.7 * (k + share), 3.4), (left + 3.7 * (k + share), 4.25))
    say(axes, 0.1, 4.65, "the total, N = 4", color=FAINT, fontsize=9)
    for i in range(10):
        say(axes, left + width * i + 0.65, 5.65, str(i), ha="center", fontsize=8.5, color=FAINT)

    say(axes, 0.1, 2.2, "fifo", fontweight="bold", fontsize=10.5)
    say(axes, 0.1, 1.5, "each once, in order", color=FAINT, fontsize=9, va="top")
    units(0.9, 1.4, usable, [RESET] * 4 + [HOT] * 3 + [STEP] * 3)
    bracket(axes, left, left + 5.8, 0.65, "drawn before", FAINT)
    bracket(axes, left + 6.0, left + 10.3, 0.65, "this batch", INK)
    bracket(axes, left + 10.5, left + 14.8, 0.65, "later", FAINT)
    figure.savefig(HERE / "replay-index.png")


def view() -> None:
    """Transitions, sequences and hindsight over rows of one slot."""
    figure, axes = canvas(26, 19.2, "View: what a drawn unit is shown as")
    left = 2.4

    def strip(y: float, colors: list[str], marks: dict[int, str] | None = None) -> None:
        for i, color in enumerate(colors):
            cell(axes, left + i, y, color, (marks or {}).get(i, ""))

    say(axes, 0.1, 17.4, "n-step transitions", fontweight="bold", fontsize=10.5)
    say(axes, 5.6, 17.4, "n = 3: the rewards of up to 3 rows, then the value of the next observation", color=FAINT)
    cases = [([STEP, HOT, HOT, HOT, NEXT, STEP], {1: "t", 4: "next"}, "discount³ · V(next)"),
             ([STEP, HOT, HOT, NEXT, RESET, STEP], {1: "t", 2: "T", 3: "next"}, "2 rewards, then 0: a terminal state"),
             ([STEP, HOT, HOT, NEXT, RESET, STEP], {1: "t", 2: "O", 3: "next"}, "2 rewards, then discount² · V(next): truncated"),
             ([STEP, HOT, NEXT, RESET, RESET, RESET], {1: "t", 2: "next"}, "1 reward, then discount · V(next): a cut")]  # fmt: skip
    for k, (colors, marks, text) in enumerate(cases):
        strip(15.7 - 1.25 * k, colors, marks)
        say(axes, left + 6.5, 16.2 - 1.25 * k, text)

    say(axes, 0.1, 10.6, "sequences", fontweight="bold", fontsize=10.5)
    say(axes, 4.0, 10.6, "of burn_in = 4, train_length = 8 and a tail of n = 3, from every 4th row on", color=FAINT)
    colors = [STEP] * 22
    colors[4:8], colors[8:16], colors[16:19], colors[19] = [RESET] * 4, [HOT] * 8, ["#f9dcc0"] * 3, NEXT
    strip(8.4, colors)
    for i in range(0, 22, 4):
        axes.scatter([left + i + 0.08], [9.75], marker="D", s=42, color=STATE, edgecolor=INK, linewidth=0.6, zorder=3)
    say(axes, left + 22.3, 9.75, "state", color=FAINT, fontsize=9)
    bracket(axes, left + 4, left + 8, 8.15, "burn-in")
    bracket(axes, left + 8, left + 16, 8.15, "trained on")
    bracket(axes, left + 16, left + 20, 8.15, "for the last targets")

    say(axes, 0.1, 6.0, "hindsight", fontweight="bold", fontsize=10.5)
    say(
        axes, 4.0, 6.0, "of k + 1 samples k get the goal that was reached after a later row of the episode", color=FAINT
    )
    goals = [STEP] * 12 + [RESET] + [STEP] * 5
    goals[3] = HOT
    strip(2.6, goals, {3: "t", 11: "O"})
    for i in range(3, 12):
        axes.scatter([left + i + 1.0], [4.05], marker="*", s=70, color=NEXT if i != 8 else "#e0564a", edgecolor=INK,
                     linewidth=0.5, zorder=3)  # fmt: skip
    say(axes, left + 18.3, 4.05, "achieved goals", color=FAINT, fontsize=9, ha="left")
    arrow(axes, (left + 9.0, 4.35), (left + 3.3, 3.6), bend=0.42, color="#e0564a")
    say(
        axes,
        left,
        1.9,
        "row t is told that this was its desired_goal; reward_fn says what it earned, and whether that ended it",
    )
    legend(axes, left, 0.7, [(STEP, "a step", 2.6), (HOT, "drawn", 2.5), (NEXT, "what the value is taken of", 6.6),
                             (RESET, "not valid, or no gradient", 6.4)])  # fmt: skip
    figure.savefig(HERE / "replay-view.png")


if __name__ == "__main__":
    storage()
    index()
    view()
