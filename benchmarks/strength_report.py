"""Tables and pictures of `strength.py`, from the lines that stand: results/strength.md, results/strength-*.png."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tasks
from strength_settings import BSUITE, BSUITE_TAGS, NOTES, SUITES, Suite

from penstock.run.plots.bands import bootstrap_band, interquartile_mean, performance_profile, probability_of_improvement
from penstock.run.plots.looks import INK, curve_look, legend, picture, plain_axes

RESULTS = Path(__file__).parent / "results"
LIBRARIES = {"penstock": "penstock", "sb3": "SB3", "contrib": "sb3-contrib", "sbx": "SBX"}
NAMES = {
    "dqn+rainbow": "Rainbow",
    "crossq": "CrossQ",
    "crossq+256": "CrossQ-256",
    "boot-dqn": "BootDQN",
    "pqn+320k": "PQN-320k",
    "pqn+400k": "PQN-400k",
    "recurrentppo": "RecurrentPPO",
    "ppo+lstm": "PPO-LSTM",
}
Scores = dict[str, list[float]]
"""By task, of one entry."""
Value = tuple[float, float, float]
"""A number and the ends of its 95% interval, which are NaN where some task has one run."""


@dataclass(frozen=True)
class Comparison:
    """An algorithm of ours beside a peer's, over the tasks that both have."""

    ours: str
    peer: str
    counts: tuple[tuple[int, int], ...]
    """Runs of both, for each task."""
    scaled: tuple[Value, Value]
    """Interquartile mean of the scaled scores of both."""
    better: Value
    """Probability that a run of ours scores more than one of the peer."""
    cpu: float
    """Median over tasks of our median of CPU seconds divided by the peer's."""

    @property
    def verdict(self) -> str:
        """In a word; the interval decides."""
        _, low, high = self.better
        if math.isnan(low):
            return "one seed: open"
        return "above" if low > 0.5 else "**below**" if high < 0.5 else "no difference shown"


class Results:
    """The lines of one suite."""

    def __init__(self, suite: Suite, rows: Sequence[Mapping[str, Any]]) -> None:
        self.suite = suite
        self.rows = [row for row in rows if row["task"].startswith(f"{suite.name}/")]
        self.by_entry: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
        for row in sorted(self.rows, key=lambda row: row["seed"]):
            name = row["task"].removeprefix(f"{suite.name}/")
            self.by_entry.setdefault(f"{row['library']}/{row['algo']}", {}).setdefault(name, []).append(row)

    def scores(self, entry: str) -> Scores:
        """As the suite defines them."""
        found = {task: [self._score(task, row) for row in rows] for task, rows in self.by_entry.get(entry, {}).items()}
        return {task: [x for x in xs if x is not None] for task, xs in found.items()}

    def _score(self, task: str, row: Mapping[str, Any]) -> float | None:
        if self.suite is BSUITE:
            return tasks.bsuite_score(task.partition("/")[0], [(0, row["bsuite"])])
        return row["last" if row["library"] == "random" else self.suite.score]

    def scaled(self, entry: str) -> Scores:
        """Scores with random actions at 0 and the best mean of any entry at 1; those of bsuite as they are."""
        if self.suite is BSUITE:
            return self.scores(entry)
        random = self.scores("random/random")
        means = {e: {t: statistics.fmean(x) for t, x in self.scores(e).items() if x} for e in self.by_entry}
        found: Scores = {}
        for task, xs in self.scores(entry).items():
            zero = random[task][0]
            best = max(by_task[task] for e, by_task in means.items() if task in by_task and e != "random/random")
            found[task] = [(x - zero) / (best - zero) for x in xs]
        return found

    def comparison(self, ours: str, peer: str) -> Comparison | None:
        """None if there is no task that both have."""
        mine, theirs = self.scaled(ours), self.scaled(peer)
        common = [task for task in mine if mine[task] and theirs.get(task)]
        if not common:
            return None
        pairs = [(np.array(mine[task]), np.array(theirs[task])) for task in common]
        p, low, high = probability_of_improvement(pairs)
        several = all(min(len(x), len(y)) > 1 for x, y in pairs)
        cpu = [self._cpu(ours, task) / self._cpu(peer, task) for task in common]
        return Comparison(
            ours, peer, tuple((len(x), len(y)) for x, y in pairs),
            (pooled([x for x, _ in pairs]), pooled([y for _, y in pairs])),
            (p, low, high) if several else (p, math.nan, math.nan), statistics.median(cpu),
        )  # fmt: skip

    def _cpu(self, entry: str, task: str) -> float:
        return statistics.median(row["cpu_s"] for row in self.by_entry[entry][task])

    def cells(self, entry: str, task: str) -> list[str]:
        """Seeds, interquartile mean with its interval, that of the whole curve, and CPU seconds of an entry on a task."""
        xs = self.scores(entry).get(task, [])
        if not xs:
            return ["0", "not run", "", ""]
        whole = [statistics.fmean(y for _, y in row["curve"]) for row in self.by_entry[entry][task] if row["curve"]]
        curve = shown(pooled([np.array(whole)])) if whole else ""
        return [str(len(xs)), shown(pooled([np.array(xs)])), curve, f"{self._cpu(entry, task):.0f}"]


def pooled(runs: Sequence[np.ndarray[Any, Any]]) -> Value:
    """The interquartile mean of the runs of all tasks and its stratified bootstrap interval."""
    x, counts = np.concatenate(runs), [len(one) for one in runs]
    low, high = bootstrap_band(x[:, None], strata=counts)
    several = min(counts) > 1
    return float(interquartile_mean(x)), float(low[0]) if several else math.nan, float(high[0]) if several else math.nan


def shown(value: Value) -> str:
    """E.g. "0.53 [0.41, 0.62]"."""
    x, low, high = (f"{one:,.0f}" if abs(one) >= 1000 else f"{one:.3g}" for one in value)
    return f"{x} [{low}, {high}]" if not math.isnan(value[1]) else x


def title(entry: str) -> str:
    """E.g. "SB3 PPO"."""
    library, _, algo = entry.partition("/")
    return f"{LIBRARIES[library]} {NAMES.get(algo, algo.upper())}"


def summary(found: Sequence[tuple[Suite, Comparison]]) -> list[str]:
    """A line for each pair that has been run."""
    lines = ["| suite | ours | peer | tasks | seeds | scaled IQM, ours | the peer's | P(ours > peer) | CPU s, ours / peer's | ours is |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for suite, one in found:
        counts = [n for both in one.counts for n in both]
        seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        lines.append(
            f"| {suite.name} | {title(one.ours).removeprefix('penstock ')} | {title(one.peer)} | {len(one.counts)} | {seeds} | "
            f"{shown(one.scaled[0])} | {shown(one.scaled[1])} | {shown(one.better)} | {one.cpu:.2f} | {one.verdict} |"
        )
    return lines


def by_task(results: Results) -> list[str]:
    """A line for each task and pair, those not run too."""
    suite = results.suite
    lines = ["| task | steps | ours | seeds | IQM [95%] | curve | CPU s | peer | seeds | IQM [95%] | curve | CPU s | P(ours > peer) |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for task in suite.tasks:
        entries = {f"{entry.library}/{entry.algo}": entry for entry in task.entries or suite.entries}
        for ours, peer in suite.pairs:
            if ours in entries and peer in entries:
                mine, theirs = results.scores(ours).get(task.name), results.scores(peer).get(task.name)
                better = ""
                if mine and theirs:
                    p, low, high = probability_of_improvement([(np.array(mine), np.array(theirs))])
                    better = shown((p, low, high) if min(len(mine), len(theirs)) > 1 else (p, math.nan, math.nan))
                cells = [task.name, f"{entries[ours].steps or task.steps:,}", title(ours).removeprefix("penstock ")]
                cells += [*results.cells(ours, task.name), title(peer), *results.cells(peer, task.name), better]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def bsuite_table(results: Results) -> list[str]:
    """A line for each id that some entry has run."""
    entries = [entry for entry in (f"{e.library}/{e.algo}" for e in BSUITE.entries) if entry in results.by_entry]
    scores = {entry: results.scores(entry) for entry in entries}
    lines = [f"| id | share | {' | '.join(map(title, entries))} |", f"|{'---|' * (2 + len(entries))}"]
    absent: list[str] = []
    for task in BSUITE.tasks:
        cells = [_bsuite_cell(results, entry, task.name, scores[entry].get(task.name)) for entry in entries]
        if any(cells):
            lines.append(f"| {task.name} | {task.share:g} | {' | '.join(cell or 'not run' for cell in cells)} |")
        else:
            absent.append(task.name)
    return [
        *lines,
        "",
        f"Not run by any: {', '.join(absent) or 'none'}; mnist's, whose data are not at hand, are left out.",
    ]


def _bsuite_cell(results: Results, entry: str, task: str, scores: list[float] | None) -> str:
    if not scores:
        return ""
    seeds = f" x{len(scores)}" if len(scores) > 1 else ""
    detail = ""
    if task.startswith(("memory", "umbrella")):
        detail = f" ({statistics.fmean(row['bsuite']['x'] for row in results.by_entry[entry][task]):.2f})"
    return f"{statistics.fmean(scores):.2f}{detail}{seeds}"


def tag_scores(results: Results, entries: Sequence[str]) -> dict[str, dict[str, float]]:
    """By tag and entry, over the ids that all entries have: the mean of the tag's experiments."""
    ids = [task.name for task in BSUITE.tasks if all(task.name in results.by_entry.get(e, {}) for e in entries)]
    found: dict[str, dict[str, float]] = {}
    for tag, experiments in BSUITE_TAGS.items():
        run = [experiment for experiment in experiments if any(name.partition("/")[0] == experiment for name in ids)]
        if run:
            found[tag] = {e: statistics.fmean(_experiment(results, e, x, ids) for x in run) for e in entries}
    return found


def _experiment(results: Results, entry: str, experiment: str, ids: Sequence[str]) -> float:
    """Over its ids and seeds. Those of `_noise` and `_scale` are five levels of four ids."""
    names = [name for name in ids if name.partition("/")[0] == experiment]
    return tasks.bsuite_score(
        experiment,
        [(int(n.partition("/")[2]) // 4, row["bsuite"]) for n in names for row in results.by_entry[entry][n]],
    )


RADARS = (("penstock/ppo", "sb3/ppo"), ("penstock/dqn", "penstock/pqn", "penstock/boot-dqn", "sb3/dqn"),
          ("penstock/ppo+lstm", "penstock/r2d1", "contrib/recurrentppo"))  # fmt: skip


def draw_radar(results: Results) -> None:
    """results/strength-bsuite.png: tags of bsuite around a circle, of the entries that share at least five."""
    run = [[entry for entry in entries if entry in results.by_entry] for entries in RADARS]
    panels = [
        (entries, scores) for entries in run if len(scores := tag_scores(results, entries)) >= 5 and len(entries) > 1
    ]
    if not panels:
        return
    with picture(4.6 * len(panels), 4.2) as figure:
        shown_entries = list(dict.fromkeys(entry for entries, _ in panels for entry in entries))
        for place, (entries, scores) in enumerate(panels):
            axes: Any = figure.add_subplot(1, len(panels), place + 1, projection="polar")
            angles = np.linspace(0, 2 * np.pi, len(scores), endpoint=False)
            for entry in entries:
                look = curve_look(shown_entries.index(entry), len(shown_entries))
                values = np.array([by_entry[entry] for by_entry in scores.values()])
                axes.plot(np.append(angles, angles[0]), np.append(values, values[0]), **look)
                axes.fill(angles, values, color=look["color"], alpha=0.08)
            axes.set_xticks(angles, [tag.replace(" ", "\n") for tag in scores])
            axes.tick_params(axis="x", pad=5)
            axes.set_yticks([0.25, 0.5, 0.75, 1.0], ["", "0.5", "", "1"])
            axes.set_ylim(0, 1)
        names = [(title(entry), curve_look(i, len(shown_entries))) for i, entry in enumerate(shown_entries)]
        legend(figure, names, "Scores of bsuite by tag")
        figure.savefig(RESULTS / "strength-bsuite.png", dpi=110)


def draw_profiles(results: Results, found: Sequence[Comparison]) -> None:
    """results/strength-SUITE-profiles.png: the share of runs above each scaled score, for each pair."""
    if not found:
        return
    columns = min(3, len(found))
    rows = math.ceil(len(found) / columns)
    with picture(3.7 * columns, 2.9 * rows) as figure:
        for place, one in enumerate(found):
            axes = figure.add_subplot(rows, columns, place + 1)
            both = results.scaled(one.ours), results.scaled(one.peer)
            common = [task for task in both[0] if both[1].get(task)]
            runs = [np.concatenate([scores[task] for task in common]) for scores in both]
            levels = np.linspace(min(0.0, *map(np.min, runs)) - 0.02, max(1.0, *map(np.max, runs)) + 0.02, 201)
            for index, (scores, x) in enumerate(zip(both, runs)):
                look = curve_look(index, 2)
                share, low, high = performance_profile(x, levels, [len(scores[task]) for task in common])
                axes.fill_between(levels, low, high, color=look["color"], alpha=0.18, linewidth=0)
                axes.plot(levels, share, **{**look, "label": title((one.ours, one.peer)[index])})
            axes.set(ylim=(-0.03, 1.03), xlabel="Scaled score: more than", ylabel="Share of runs")
            axes.set_title(f"Tasks: {len(common)}. Runs: {len(runs[0])}, {len(runs[1])}", fontsize=9, loc="left")
            axes.legend(frameon=False, fontsize=8, loc="lower left")
            plain_axes(axes)
        figure.savefig(RESULTS / f"strength-{results.suite.name}-profiles.png", dpi=110)


def draw_comparisons(found: Sequence[tuple[Suite, Comparison]]) -> None:
    """results/strength.png: interquartile means and probabilities of improvement of all pairs, with intervals."""
    with picture(10.5, 1.4 + 0.42 * len(found)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for row, (_, one) in enumerate(found):
            for side, value in enumerate(one.scaled):
                _bar(left, row + 0.17 * (2 * side - 1), value, curve_look(side, 2)["color"], 0.13)
            _bar(right, row, one.better, curve_look(2, 7)["color"], 0.25)
        labels = [f"{suite.name}: {title(one.ours)}, {title(one.peer)}" for suite, one in found]
        left.set_yticks(range(len(found)), labels)
        left.set_ylim(len(found) - 0.4, -0.6)
        left.set_xlabel("Scaled scores: ours above (blue), the peer's below")
        right.axvline(0.5, color=INK, linewidth=0.8, linestyle=":")
        right.set(xlim=(-0.02, 1.02), xlabel="P(ours > peer)")
        for axes in (left, right):
            plain_axes(axes)
            axes.yaxis.grid(False)
        figure.savefig(RESULTS / "strength.png", dpi=110)


def _bar(axes: Any, y: float, value: Value, colour: str, half: float) -> None:
    x, low, high = value
    if not math.isnan(low):
        axes.barh(y, high - low, 2 * half, left=low, color=colour, alpha=0.3)
    axes.plot(
        [x, x],
        [y - half, y + half],
        color=colour,
        **({"linewidth": 2.5} if low == low else {"linewidth": 1.5, "linestyle": ":"}),
    )


HEAD = """# Strength beside the peers

How well algorithms learn, ours beside Stable-Baselines3's, sb3-contrib's and SBX's, at equal steps on one machine:
`python benchmarks/strength.py --peer PYTHON`, then `--report`, which writes this page and its pictures from the lines of
[strength.jsonl](strength.jsonl) (a line a run, with its learning curve). Settings stand in
[strength_settings.py](../strength_settings.py). {parts}

IQM: interquartile mean over seeds, with its 95% bootstrap interval. Scaled: random actions at 0, the best mean of any row of the
task at 1 (bsuite's scores are on one scale as they are); over several tasks runs of each are resampled by themselves. P(ours > peer):
the probability that a run of ours scores more than one of the peer, the mean over tasks (Agarwal et al. 2021, arXiv:2108.13264).
"Curve": the same of the mean return of training episodes over the whole run, twenty points of equal weight: who learns sooner.
"Above" and "below" are said where its interval leaves 0.5 out. CPU seconds are of training on a shared core, for scale only: speed is
measured by turns, in [speed.md](speed.md) and [off_policy.md](off_policy.md). Versions: {versions}. Lines of {dates}.

Many agents (mpe2, Leduc) and learning from datasets have no peer here: [many_agents.md](many_agents.md), [offline.md](offline.md).
"""


def write(rows: Sequence[Mapping[str, Any]], parts: Sequence[Any]) -> None:
    """Writes the page and the pictures."""
    of_suite = [Results(suite, rows) for suite in SUITES]
    by_suite = {
        results.suite.name: [one for pair in results.suite.pairs if (one := results.comparison(*pair)) is not None]
        for results in of_suite
    }
    found = [(results.suite, one) for results in of_suite for one in by_suite[results.suite.name]]
    dates = sorted({row["date"] for row in rows})
    versions = "; ".join(sorted({row["version"] for row in rows if "version" in row}))
    done = len({(row["task"], row["library"], row["algo"], row["seed"]) for row in rows})
    head = HEAD.format(parts=f"{done} of {len(parts)} parts have been run.", versions=versions,
                       dates=dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}")  # fmt: skip
    lines = [*head.splitlines(), "", "![Interquartile means and probabilities of improvement of every pair](strength.png)", "",
             *summary(found), "", *_notes("")]  # fmt: skip
    for results in of_suite:
        suite = results.suite
        lines += [f"## {suite.name}", "", suite.says, ""]
        lines += bsuite_table(results) if suite is BSUITE else by_task(results)
        if by_suite[suite.name]:
            draw_profiles(results, by_suite[suite.name])
            lines += ["", f"![Profiles of {suite.name}](strength-{suite.name}-profiles.png)"]
        lines += ["", *_notes(suite.name)]
    draw_comparisons(found)
    draw_radar(next(results for results in of_suite if results.suite is BSUITE))
    (RESULTS / "strength.md").write_text("\n".join(lines).rstrip() + "\n")


def _notes(suite: str) -> list[str]:
    return [NOTES[suite], ""] if suite in NOTES else []
