"""The runs of a picture or table as named curves: seeds together, copies and runs without the metric left out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.core.errors import ConfigError, nearest
from penstock.run.files.stored_experiment import as_checkpoint_error, require_plain_run
from penstock.run.log import JSONL, read_metrics
from penstock.run.plots.curve_groups import by_number, curve_names
from penstock.run.plots.curves import Curve, read_curves, smoothed, without_copies
from penstock.run.plots.run_table import run_dirs as find_run_dirs

RETURN, _ELO = "rollout/ep_rew_mean", "self_play/elo"


def usual_metric(run_dirs: Sequence[Path]) -> str:
    """The mean return; where all runs are of self-play main's Elo, as the return of both sides of a game is 0."""
    rated = [any(_ELO in row for row in read_metrics(Path(d))) for d in run_dirs if (Path(d) / JSONL).is_file()]
    return _ELO if rated and all(rated) else RETURN


def named_curves(
    given: str | Path | Sequence[str | Path], metric: str | None, smooth: int = 1
) -> tuple[str, list[tuple[str, list[Curve]]]]:
    """The metric, by default the usual one, and the name and runs of each curve; warns of runs that are left out.

    Args:
        given: runs, or folders that hold some. smooth: each value becomes the mean of so many, of those up to it.

    Raises:
        ConfigError: a directory holds no run, no run has a row with the metric, or `smooth` is less than 1.
    """
    if smooth < 1:
        raise ConfigError(f"smooth={smooth}; expected a whole number of rows from 1")
    given = [given] if isinstance(given, (str, Path)) else given
    run_dirs = [run for path in given for run in find_run_dirs(Path(path))]
    metric = usual_metric(run_dirs) if metric is None else metric
    groups: dict[tuple[str, str, str], dict[str | None, list[Curve]]] = {}
    without: list[str] = []
    for run_dir in dict.fromkeys(Path(d).resolve() for d in run_dirs):
        require_plain_run(run_dir)
        with as_checkpoint_error(run_dir / JSONL):
            found = read_curves(run_dir, metric)
        for curve in found:
            groups.setdefault(curve.of.group, {}).setdefault(curve.policy, []).append(curve)
        if not found:
            without.append(str(run_dir))
    copies: dict[str, None] = {}
    for parts in groups.values():
        for policy, runs in parts.items():
            parts[policy], again = without_copies(runs)
            copies |= dict.fromkeys(str(run.of.run_dir) for run in again)
    if copies:
        warnings.warn(
            f"left out, the same run as another one, with its seed and values: {', '.join(copies)}", stacklevel=3
        )
    if not groups:
        looked = ", ".join(str(Path(d) / JSONL) for d in run_dirs) or "no directory at all"
        raise ConfigError(f"nothing to plot: no row with {metric!r} in {looked}; {_other(metric, run_dirs)}")
    if without:
        warnings.warn(f"left out, without a row with {metric!r}: {', '.join(without)}", stacklevel=3)
    names = curve_names([next(iter(parts.values()))[0].of for parts in groups.values()])
    return metric, [
        (name if policy is None else f"{name}, {policy or 'all agents'}", [_smooth(run, smooth) for run in runs])
        for name, parts in sorted(zip(names, groups.values()), key=lambda group: by_number(group[0]))
        for policy, runs in parts.items()
    ]


def _smooth(run: Curve, window: int) -> Curve:
    return run if window == 1 else replace(run, own=smoothed(run.own, window), data=smoothed(run.data, window))


def _other(metric: str, run_dirs: Sequence[Path]) -> str:
    """A hint at the metric that was meant, of those that the runs have."""
    known = {name for run_dir in run_dirs for row in read_metrics(run_dir) for name in row if "/" in name}
    return nearest(metric, known) if known else "give run directories, or folders that hold some"
