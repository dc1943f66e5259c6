"""The learning curves of a run, from its metrics: its own, and one of each of several policies."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.run.log import read_metrics
from penstock.run.plots.bands import Floats
from penstock.run.plots.curve_groups import Identity, identify

EVAL = "eval/mean_reward"
_TIME = "time/time_elapsed"
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
    of, rows = identify(run_dir), read_metrics(run_dir)
    policies = _policies(rows)
    curves = [_curve(of, rows, _of_policy(metric, policy), _of_policy(EVAL, policy), policy) for policy in policies]
    curves = [curve for curve in curves if len(curve.own)]
    joint = _curve(of, rows, metric, EVAL, "" if curves else None)
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


def _policies(rows: Sequence[dict[str, float]]) -> list[str]:
    """Ids of policies, in the order in which rows name them; none where there is one."""
    keys = dict.fromkeys(key for row in rows for key in row)
    matches = [re.fullmatch(r"rollout/([^/]+)/ep_rew_mean|eval/([^/]+)/mean_reward", key) for key in keys]
    return list(dict.fromkeys(match[1] or match[2] for match in matches if match))


def _of_policy(metric: str, policy: str) -> str:
    kind, _, name = metric.partition("/")
    return f"{kind}/{policy}/{name}"


def _curve(of: Identity, rows: list[dict[str, float]], metric: str, evaluated: str, policy: str | None) -> Curve:
    evals = _points(rows, evaluated)
    if of.offline and metric.startswith("rollout/"):
        points, data = _points(rows, _EVALUATED.get(metric, "")), _points(rows, metric)
    else:
        points, data = _points(rows, metric), _points([], metric)
    return Curve(of, points, evals, data, policy)


def _points(rows: list[dict[str, float]], key: str) -> Series:
    """The points of one metric; rows of evaluations may lack the time, which is interpolated from their steps."""
    finite = [row for row in rows if math.isfinite(row.get(key, math.nan))]
    finite.sort(key=lambda row: row["step"])  # evaluations beside training are logged after later rows
    timed = [row for row in rows if math.isfinite(row.get(_TIME, math.nan))]
    steps, seconds = _column(finite, "step"), np.full(len(finite), math.nan)
    if timed:
        seconds = np.interp(steps, _column(timed, "step"), _column(timed, _TIME))
    return Series(steps, seconds, _column(finite, key))


def _column(rows: list[dict[str, float]], key: str) -> Floats:
    return np.array([row[key] for row in rows], np.float64)
