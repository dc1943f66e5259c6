"""The learning curves of a run, from its metrics: its own, and one of each of several policies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.run.log import read_metrics
from penstock.run.plots.bands import Floats
from penstock.run.plots.curve_groups import Identity, identify

Points = Callable[[str], Floats]
"""Step and value of each row in which a metric is finite, [N, 2] float64, in the order of writing."""
EVAL = "eval/mean_reward"
TIME, UPDATES = "time/time_elapsed", "train/n_updates"
_EVALUATED = {"rollout/ep_rew_mean": EVAL, "rollout/ep_len_mean": "eval/mean_ep_length"}


@dataclass(frozen=True)
class Series:
    """Finite values of one metric, by step; in the order they were logged where steps are equal."""

    steps: Floats
    """[N] float64."""
    seconds: Floats
    """[N] float64, wall time since the start; NaN where the run did not record it."""
    values: Floats
    """[N] float64."""
    updates: Floats
    """[N] float64, the updates of the policy until then; NaN where the run did not record them."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Curve:
    """The points that a picture shows of one run; `own` and `data` are not both empty."""

    of: Identity
    own: Series
    """The metric of the run's own policy."""
    evals: Series
    """Mean returns of its evaluations."""
    data: Series
    """The metric of the dataset that is played back; empty for a run that samples."""
    policy: str | None = None
    """Id of the curve's policy, "" for all agents together; None with a single policy."""


def read_curves(run_dir: Path, metric: str) -> list[Curve]:
    """The curve of a run, and behind it those of its policies if it has several; [] if no row holds the metric.

    For policy `a` the metric `rollout/ep_rew_mean` is `rollout/a/ep_rew_mean`. The `rollout` metrics of a run that
    learns from a dataset are those of the data; its own curve is the same quantity in its evaluations, if they have it.
    """
    rows = read_metrics(run_dir)
    keys = dict.fromkeys(key for row in rows for key in row)
    return curves_of(identify(run_dir), lambda key: _points(rows, key), metric, keys, updates=True)


def smoothed(series: Series, window: int) -> Series:
    """The series with each value replaced by the mean of the last `window` values up to it."""
    sums = np.concatenate([[0.0], np.cumsum(series.values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return replace(series, values=(sums[ends] - sums[starts]) / (ends - starts))


def curves_of(
    of: Identity,
    points: Points,
    metric: str,
    keys: Iterable[str],
    timed: bool = True,
    evaluated: bool = True,
    updates: bool = False,
) -> list[Curve]:
    """What `read_curves` returns, of a run whose rows have these keys.

    Args:
        timed: read the wall time too; without it, `seconds` are NaN.
        evaluated: read the evaluations too; without them, `evals` is empty.
        updates: read the count of updates too; without it, `updates` are NaN.
    """

    def curve(policy: str | None) -> Curve:
        own, played, count = (name if not policy else _of_policy(name, policy) for name in (metric, EVAL, UPDATES))

        def series(key: str) -> Series:
            return _series(points, key, TIME if timed else "", count if updates else "")

        evals = series(played if evaluated else "")
        if of.offline and own.startswith("rollout/"):
            return Curve(of, series(_EVALUATED.get(own, "")), evals, series(own), policy)
        return Curve(of, series(own), evals, series(""), policy)

    curves = [own for policy in _policies(keys) if len((own := curve(policy)).own)]
    joint = curve("" if curves else None)
    return [joint, *curves] if len(joint.own) or len(joint.data) else curves


def without_copies(runs: Sequence[Curve]) -> tuple[list[Curve], list[Curve]]:
    """The runs of one curve, and its duplicates: runs of the same seed with equal values as far as both go. The longest
    of duplicates stays."""
    kept: list[Curve] = []
    for run in sorted(runs, key=lambda run: -len(run.own)):
        if not any(_is_copy(run, other) for other in kept):
            kept.append(run)
    return [run for run in runs if run in kept], [run for run in runs if run not in kept]


def _is_copy(short: Curve, long: Curve) -> bool:
    n, seed = len(short.own), short.of.seed
    return (
        seed is not None
        and seed == long.of.seed
        and np.array_equal(short.own.steps, long.own.steps[:n])
        and np.array_equal(short.own.values, long.own.values[:n])
        and bool(n or np.array_equal(short.data.values, long.data.values[: len(short.data)]))
    )


def _policies(keys: Iterable[str]) -> list[str]:
    """Ids of policies, in the order in which rows name them; none where there is one."""
    matches = [re.fullmatch(r"rollout/([^/]+)/ep_rew_mean|eval/([^/]+)/mean_reward", key) for key in keys]
    return list(dict.fromkeys(match[1] or match[2] for match in matches if match))


def _of_policy(metric: str, policy: str) -> str:
    kind, _, name = metric.partition("/")
    return f"{kind}/{policy}/{name}"


def _series(points: Points, key: str, time: str, updates: str) -> Series:
    """The points of one metric; rows of evaluations may lack time and updates, interpolated from their steps."""
    found = points(key) if key else np.empty((0, 2))
    found = found[np.argsort(found[:, 0], kind="stable")]  # evaluations beside training are logged after later rows

    def beside(name: str) -> Floats:
        if name and len(found) and len(known := points(name)):
            return np.interp(found[:, 0], known[:, 0], known[:, 1])
        return np.full(len(found), math.nan)

    return Series(found[:, 0], beside(time), found[:, 1], beside(updates))


def _points(rows: list[dict[str, float]], key: str) -> Floats:
    pairs = [(row["step"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
    return np.array(pairs, np.float64).reshape(-1, 2)
