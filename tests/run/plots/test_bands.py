from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.run.plots.bands import (
    bootstrap_band,
    common_grid,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
)


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, -50.0])) == 1.5
    assert interquartile_mean(np.array([3.0, 1.0, 9.0, 2.0, -7.0])) == 2.0
    assert interquartile_mean(np.array([1.0, 2.0, 9.0])) == 4.0
    x = np.array([[0.0, 1.0, 2.0, 99.0], [4.0, 4.0, 6.0, 6.0]])
    np.testing.assert_array_equal(interquartile_mean(x, axis=1), [1.5, 5.0])
    np.testing.assert_array_equal(interquartile_mean(x, axis=0), [2.0, 2.5, 4.0, 52.5])
    with pytest.raises(ConfigError, match="at least one value"):
        interquartile_mean(np.zeros((0, 3)))


def test_bootstrap_band_matches_a_slow_loop_and_covers_the_mean() -> None:
    from penstock.core.noise import Purpose, generator

    x = np.random.default_rng(0).normal(size=(6, 3))
    low, high = bootstrap_band(x, level=0.9, resamples=400, seed=3)
    picks = generator(3, Purpose.BOOTSTRAP).integers(0, 6, size=(400, 6))
    means = np.stack([interquartile_mean(x[pick]) for pick in picks])
    np.testing.assert_allclose(low, np.percentile(means, 5, axis=0))
    np.testing.assert_allclose(high, np.percentile(means, 95, axis=0))
    assert (low < interquartile_mean(x)).all()
    assert (interquartile_mean(x) < high).all()


def test_bootstrap_band_is_the_same_in_chunks_and_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.run.plots import bands

    x = np.random.default_rng(0).normal(size=(5, 7))
    whole = bootstrap_band(x)
    monkeypatch.setattr(bands, "_CHUNK", 1)
    np.testing.assert_array_equal(bootstrap_band(x), whole)
    assert not np.array_equal(bootstrap_band(x, seed=1), whole)


def test_bootstrap_coverage_of_a_known_mean() -> None:
    rng = np.random.default_rng(1)
    low, high = bootstrap_band(rng.normal(size=(20, 300)), resamples=500)
    covered = ((low < 0) & (high > 0)).mean()
    assert 0.85 < covered < 0.99


def test_bootstrap_of_senseless_input() -> None:
    for x, level in ((np.zeros(3), 0.95), (np.zeros((0, 3)), 0.95), (np.zeros((2, 3)), 1.0)):
        with pytest.raises(ConfigError, match="expected"):
            bootstrap_band(x, level=level)


def test_strata_are_resampled_by_themselves() -> None:
    from penstock.core.noise import Purpose, generator

    # Of two tasks with 2 and 3 runs the means lie 100 apart: apart, the share of each in a resample never changes.
    x = np.array([0.0, 1.0, 100.0, 101.0, 105.0])[:, None]
    low, high = bootstrap_band(x, resamples=400, statistic=np.mean, strata=(2, 3))
    draw = generator(0, Purpose.BOOTSTRAP)
    picks = np.concatenate([draw.integers(0, 2, (400, 2)), 2 + draw.integers(0, 3, (400, 3))], axis=1)
    np.testing.assert_allclose([low[0], high[0]], np.percentile(x[picks, 0].mean(axis=1), [2.5, 97.5]))
    assert low[0] >= 60.0 and high[0] <= (2 * 1.0 + 3 * 105.0) / 5  # the least and the most that a resample can have
    np.testing.assert_array_equal(bootstrap_band(x, strata=(5,)), bootstrap_band(x))
    # Half of a task's runs exceed 0.5, all of the other's do: from 3 / 5 to 5 / 5.
    share, least, most = performance_profile(x[:, 0], np.array([0.5]), strata=(2, 3))
    assert (share[0], least[0], most[0]) == (0.8, 0.6, 1.0)
    for wrong in ((2, 2), (5, 0)):
        with pytest.raises(ConfigError, match="add up to"):
            bootstrap_band(x, strata=wrong)


def test_common_grid_spans_what_all_curves_reach() -> None:
    grid, values = common_grid(
        [(np.array([0.0, 10.0]), np.array([0.0, 10.0])), (np.array([2.0, 6.0, 20.0]), np.array([1.0, 1.0, 8.0]))], 3
    ) or (np.zeros(0), np.zeros(0))
    np.testing.assert_array_equal(grid, [2.0, 6.0, 10.0])
    np.testing.assert_array_equal(values, [[2.0, 6.0, 10.0], [1.0, 1.0, 3.0]])
    apart = [(np.array([0.0, 1.0]), np.zeros(2)), (np.array([2.0, 3.0]), np.zeros(2))]
    assert common_grid(apart) is None


def test_performance_profile_by_hand() -> None:
    scores, levels = np.array([4.0, 1.0, 2.0, 3.0]), np.array([0.0, 1.0, 2.5, 4.0])
    share, low, high = performance_profile(scores, levels)
    np.testing.assert_array_equal(share, [1.0, 0.75, 0.5, 0.0])  # a run does not exceed its own score
    np.testing.assert_array_equal(low[[0, 3]], [1.0, 0.0])
    assert (low <= share).all() and (share <= high).all() and low[2] < 0.5 < high[2]
    # Of 4 runs of which 2 exceed a level, a resample has k above with the chance C(4, k) / 16: its 97.5% point is 1.
    assert (low[2], high[2]) == (0.0, 1.0)


def test_probability_of_improvement_by_hand() -> None:
    x, y = np.array([3.0, 5.0, 7.0]), np.array([4.0, 5.0])
    p, low, high = probability_of_improvement([(x, y)])
    assert p == pytest.approx(3.5 / 6)  # wins 5>4, 7>4, 7>5, and the tie 5=5 counts half
    assert low < p < high
    back, back_low, back_high = probability_of_improvement([(y, x)])
    assert back == pytest.approx(1 - p) and 0 <= back_low < back < back_high <= 1
    assert probability_of_improvement([(x, y), (y + 10, x)])[0] == pytest.approx((3.5 / 6 + 1) / 2)
    assert probability_of_improvement([(x + 10, y)]) == (1.0, 1.0, 1.0)
    assert probability_of_improvement([(x, x)])[0] == 0.5


def test_interval_of_an_improvement_matches_a_slow_loop() -> None:
    from penstock.core.noise import Purpose, generator

    rng = np.random.default_rng(3)
    tasks = [(rng.normal(1, 1, 4), rng.normal(0, 1, 6)), (rng.normal(0, 1, 3), rng.normal(0, 1, 5))]
    draw, each = generator(5, Purpose.BOOTSTRAP), []
    for x, y in tasks:
        of_x, of_y = draw.integers(0, len(x), size=(50, len(x))), draw.integers(0, len(y), size=(50, len(y)))
        each.append([np.mean([float(a > b) for a in x[i] for b in y[j]]) for i, j in zip(of_x, of_y)])
    _, low, high = probability_of_improvement(tasks, resamples=50, seed=5)
    np.testing.assert_allclose([low, high], np.percentile(np.mean(each, axis=0), [2.5, 97.5]))
