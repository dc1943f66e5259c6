"""Draws the pictures of docs/studies.md: who holds what in a search, and who trains when, by the schedulers themselves.

python docs/images/search.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from penstock.studies.search import Search, SearchSettings

HERE = Path(__file__).parent
INK, FAINT, EDGE, DONE, GREY, COPY = "#1f2933", "#7b8794", "#9fb3c8", "#bdd7ee", "#e4e7eb", "#d9480f"
STEPS = 27


class Leg(NamedTuple):
    """A stretch that a trial trains in one go, and what then happens to it."""

    lane: int
    begins: int
    ends: int
    fate: str


class Copied(NamedTuple):
    """At a milestone the state of one member becomes another's."""

    at: int
    of: int
    to: int


def score(values: Mapping[str, Any], goal: int) -> float:
    return goal * math.exp(-abs(math.log10(values["algo.lr"]) + 3))


def searched(scheduler: str, interval: int, trials: int) -> tuple[list[Leg], list[Copied]]:
    """Every leg and copy of a search with this scheduler."""
    settings = SearchSettings(
        {"algo.lr": "loguniform(1e-5, 1e-1)"}, STEPS, scheduler=scheduler, trials=trials, interval=interval,
        suggest="random", seed=4,
    )  # fmt: skip
    search, began, copies = Search(settings), list[tuple[int, int, int]](), list[Copied]()
    while (trial := search.ask()) is not None:
        began.append((trial.number, max(trial.scores, default=0), trial.goal))
        for decision in search.tell(trial, score(trial.values, trial.goal)):
            if decision.copy_of is not None:
                copies.append(Copied(began[-1][2], decision.copy_of.number, decision.trial.number))
    fates = {trial.number: trial.state for trial in search.trials}
    last = {lane: ends for lane, _, ends in began}
    return [Leg(*leg, fates[leg[0]] if leg[2] == last[leg[0]] else "") for leg in began], copies


def schedulers(out: Path) -> None:
    """Nine trials under asha, median and pbt: a bar for each leg."""
    figure = Figure(figsize=(11.0, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, sharey=True)
    parts = (
        ("asha", 3, "the best third goes on from each rung"),
        ("median", 9, "those below the others' median end"),
        ("pbt", 9, "the worst go on from a copy of the best"),
    )
    for axes, (name, interval, what) in zip(panels, parts):
        legs, copies = searched(name, interval, 9)
        for leg in legs:
            colour = GREY if leg.fate == "pruned" else DONE
            axes.barh(leg.lane, leg.ends - leg.begins, left=leg.begins, height=0.62, color=colour, edgecolor=EDGE)
            if leg.fate:
                mark = {"pruned": "x", "finished": "o"}[leg.fate]
                axes.plot(leg.ends + 0.9, leg.lane, marker=mark, color=INK, markersize=5, clip_on=False)
        for k, copy in enumerate(copies):
            at = copy.at + (k % 2 - 0.5) * 0.7
            arrow = {"arrowstyle": "->", "color": COPY, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (at, copy.to), (at, copy.of), arrowprops=arrow)
        axes.set_title(f"{name}: {what}", fontsize=10.5, loc="left", color=INK)
        axes.set_xlabel("environment steps", color=FAINT)
        axes.set_xticks(sorted({0, *(leg.ends for leg in legs)}))
        axes.tick_params(colors=FAINT, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(EDGE)
        axes.set_xlim(0, STEPS + 1.5)
    panels[0].set_yticks(range(9), [f"trial {n}" for n in range(9)])
    panels[0].invert_yaxis()
    figure.text(0.5, -0.07, "x  ended early, its checkpoint kept     o  finished     arrow: copied state", ha="center",
                fontsize=9.5, color=FAINT)  # fmt: skip
    figure.savefig(out, dpi=110, bbox_inches="tight")


def holds(out: Path) -> None:
    """The search, its slots and what lies on disk."""
    figure = Figure(figsize=(11.0, 4.1))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 110)
    axes.set_ylim(0, 41)
    axes.axis("off")

    def box(x: float, y: float, w: float, h: float, head: str, lines: str, colour: str) -> None:
        style = "round,pad=0,rounding_size=0.8"
        axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor=colour, edgecolor=EDGE))
        axes.text(x + 1.2, y + h - 1.4, head, va="top", fontsize=11, fontweight="bold", color=INK)
        axes.text(x + 1.2, y + h - 4.6, lines, va="top", fontsize=9.5, color=INK, linespacing=1.5)

    def arrow(a: tuple[float, float], b: tuple[float, float], said: str, at: tuple[float, float]) -> None:
        axes.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.3})
        axes.text(*at, said, fontsize=9, color=FAINT, ha="center", linespacing=1.3)

    search = "scheduler: who goes on, who ends\nOptuna: which settings are next\nlauncher: a process for each slot"
    box(2, 16, 30, 13, "penstock tune", search, "#f4e6c3")
    box(2, 1, 30, 10, "study.json, best.toml, plots/", "values, scores, states of all trials", "#ffffff")
    box(45, 21, 25, 11, "slot 1, CPU 0", "penstock train, or resume,\nto the trial's next goal", DONE)
    box(45, 4, 25, 11, "slot 2, CPU 1", "penstock train, or resume,\nto the trial's next goal", DONE)
    box(83, 21, 25, 11, "trial-000/", "checkpoints, metrics, config:\nan ordinary run", "#ffffff")
    box(83, 4, 25, 11, "trial-001/", "ended early, and kept:\nresume goes on with it", "#ffffff")
    arrow((32, 24), (45, 26.5), "settings,\ngoal", (38, 28))
    arrow((32, 19), (45, 10), "settings,\ngoal", (36.5, 10.5))
    arrow((70, 26.5), (83, 26.5), "writes", (76.5, 28))
    arrow((70, 9.5), (83, 9.5), "writes", (76.5, 11))
    arrow((17, 16), (17, 11), "", (0, 0))
    axes.text(18.5, 13.2, "after every event", fontsize=9, color=FAINT, va="center")
    bend = {"arrowstyle": "->", "color": INK, "linewidth": 1.3, "connectionstyle": "angle,angleA=0,angleB=90,rad=4"}
    axes.annotate("", (17, 29), (95, 37), arrowprops=bend)
    axes.plot([95, 95], [32, 37], color=INK, linewidth=1.3)
    axes.text(56, 38, "the score: the last row of metrics, once the process has ended", fontsize=9, color=FAINT,
              ha="center")  # fmt: skip
    figure.savefig(out, dpi=110)


def main() -> None:
    """Draws both."""
    schedulers(HERE / "search-schedulers.png")
    holds(HERE / "search-holds.png")


if __name__ == "__main__":
    main()
