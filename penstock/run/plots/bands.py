"""One curve of several seeds: the interquartile mean and its bootstrap band (Agarwal et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.noise import Purpose, generator

Floats = npt.NDArray[np.float64]
_CHUNK = 4_000_000
"""Resampled numbers in memory at a time."""


def interquartile_mean(x: npt.NDArray[Any], axis: int = 0) -> Floats:
    """The mean of the middle half along `axis`, float64.

    As in Agarwal et al. 2021 ("Deep RL at the Edge of the Statistical Precipice") and rliable, floor(n / 4) values are
    dropped at each end: with up to 3 runs it is the mean.
    """
    n = x.shape[axis]
    if n == 0:
        raise ConfigError(f"interquartile mean over axis {axis} of shape {x.shape}; expected at least one value there")
    cut = n // 4
    middle = np.take(np.sort(x, axis=axis), np.arange(cut, n - cut), axis=axis)
    return np.asarray(middle.mean(axis=axis, dtype=np.float64))


def bootstrap_band(
    x: npt.NDArray[Any],
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    statistic: Callable[..., Floats] = interquartile_mean,
    strata: Sequence[int] | None = None,
) -> tuple[Floats, Floats]:
    """Lower and upper end, each [G], of the percentile bootstrap interval of a statistic of x [runs, G] along `axis`.

    Runs are resampled with replacement as whole curves, those of each task by themselves: the stratified bootstrap of
    Agarwal et al. 2021 (section 4.1). The same seed gives the same band.

    Args:
        strata: runs of each task, whose rows of x follow each other; None: all are of one.
    """
    if x.ndim != 2 or x.shape[0] == 0 or not 0 < level < 1 or resamples < 1:
        raise ConfigError(
            f"bootstrap of shape {x.shape}, level={level}, resamples={resamples}; "
            "expected [runs >= 1, G], 0 < level < 1, resamples >= 1"
        )
    n, points = x.shape
    counts = (n,) if strata is None else tuple(strata)
    if sum(counts) != n or min(counts) < 1:
        raise ConfigError(f"strata={counts} of {n} runs; expected counts of at least 1 that add up to them")
    draw, starts = generator(seed, Purpose.BOOTSTRAP), np.cumsum(counts) - counts
    picks = np.concatenate([at + draw.integers(0, k, size=(resamples, k)) for at, k in zip(starts, counts)], axis=1)
    # The statistic of each set of curves is computed once: of 5 seeds there are 126 sets.
    picks, drawn = np.unique(np.sort(picks, axis=1), axis=0, return_inverse=True)
    tail = 100 * (1 - level) / 2
    low, high = np.empty(points), np.empty(points)
    width = max(1, _CHUNK // (resamples * n))
    for start in range(0, points, width):
        part = slice(start, start + width)
        means = statistic(x[:, part][picks], axis=1)[drawn.reshape(-1)]
        low[part], high[part] = np.percentile(means, [tail, 100 - tail], axis=0)
    return low, high


def performance_profile(
    scores: Floats, levels: Floats, strata: Sequence[int] | None = None
) -> tuple[Floats, Floats, Floats]:
    """The share of runs [G] whose score exceeds each level (Agarwal et al. 2021, equation 1), and the ends of its band.

    Args:
        scores: [runs] float64, of several tasks on one scale. levels: [G] float64. strata: as in `bootstrap_band`.
    """
    above = scores[:, None] > levels
    return above.mean(axis=0), *bootstrap_band(above, statistic=np.mean, strata=strata)


def probability_of_improvement(
    tasks: Sequence[tuple[Floats, Floats]], resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """P(X > Y), the chance that a run of X scores more than one of Y, and the ends of its 95% bootstrap interval.

    Agarwal et al. 2021, section 4.3: the mean over tasks of the Mann-Whitney statistic divided by the count of pairs,
    in which a tie is half a win. Runs of each task and side are resampled by themselves (stratified bootstrap).

    Args:
        tasks: scores ([n] of X, [m] of Y) for each task.
    """
    draw = generator(seed, Purpose.BOOTSTRAP)
    means: list[float] = []
    resampled = np.zeros(resamples)
    for x, y in tasks:
        wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)
        means.append(float(wins.mean()))
        of_x, of_y = (draw.integers(0, len(side), size=(resamples, len(side))) for side in (x, y))
        resampled += wins[of_x[:, :, None], of_y[:, None, :]].mean(axis=(1, 2)) / len(tasks)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(np.mean(means)), float(low), float(high)


def common_grid(curves: Sequence[tuple[Floats, Floats]], points: int = 200) -> tuple[Floats, Floats] | None:
    """x [G] where every curve (x, y) is known, and y [runs, G] interpolated on it; None if there is no such stretch.

    No curve is extended beyond its own end: a mean over fewer and fewer seeds would jump as each one stops.
    """
    start = max(x[0] for x, _ in curves)
    end = min(x[-1] for x, _ in curves)
    if end <= start:
        return None
    grid = np.linspace(start, end, points)
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])
