"""Are the sum tree's draws those of a plain cumulative sum, and its sums a function of its leaves alone?"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.replay.sum_tree import FAN, TOP, SumTree

SIZES = (1, 2, 3, 7, 8, 9, 63, 64, 65, TOP - 1, TOP, TOP + 1, 2 * TOP + 1, FAN * TOP, FAN * TOP + 1, 9 * TOP + 5)
Floats = NDArray[np.float64]


def tree_of(values: Floats | list[float]) -> SumTree:
    tree = SumTree(len(values))
    tree.load(np.asarray(values, np.float64))
    return tree


def slow_find(values: Floats, mass: Floats) -> NDArray[np.int64]:
    """The first leaf whose cumulative sum exceeds the mass; exact where all values are small integers."""
    return np.array([next(i for i, c in enumerate(np.cumsum(values)) if c > m) for m in mass])


def whole_numbers(size: int, seed: int) -> Floats:
    """Integers, half of them 0, so that every sum is exact in any order."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 9, size) * (rng.random(size) < 0.5)
    values[rng.integers(size)] = 3  # at least one is not 0
    return values.astype(np.float64)


def test_four_leaves_by_hand() -> None:
    tree = tree_of([1.0, 0.0, 2.0, 0.5])
    assert len(tree) == 4
    assert tree.total == 3.5
    assert tree.find(np.array([0.0, 0.9, 1.0, 2.9, 3.0, 3.4]))[0].tolist() == [0, 0, 2, 2, 3, 3]
    assert tree.get(np.array([2, 0])).tolist() == [2.0, 1.0]
    tree.set(np.array([1, 2]), np.array([4.0, 0.0]))
    assert tree.total == 5.5
    assert tree.find(np.array([0.5, 1.0, 4.9, 5.0]))[0].tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("size", SIZES)
def test_finds_what_a_cumulative_sum_finds(size: int) -> None:
    values = whole_numbers(size, size)
    tree = tree_of(values)
    sums = np.cumsum(values)
    rng = np.random.default_rng(size)
    borders = np.concatenate([[0.0], sums[:-1]])
    mass = np.concatenate([rng.random(500) * sums[-1], borders[borders < sums[-1]], np.nextafter(sums[sums > 0], 0.0)])
    assert tree.total == sums[-1]
    assert np.array_equal(tree.find(mass)[0], np.searchsorted(sums, mass, "right"))
    assert np.array_equal(tree.find(mass[:40])[0], slow_find(values, mass[:40]))


@pytest.mark.parametrize("size", SIZES)
def test_updates_in_any_order_leave_the_tree_of_their_leaves(size: int) -> None:
    """Bits, not tolerances: sums are a function of the leaves, whatever the way to them."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        tree, plain = SumTree(size), np.zeros(size)
        for _ in range(1 + seed):
            if rng.random() < 0.5:
                index = rng.integers(0, size, rng.integers(1, 50))
                value = rng.exponential(1.0, len(index)) * (rng.random(len(index)) < 0.7)
                tree.set(index, value)
                for i, v in zip(index, value):  # of equal indices the last wins
                    plain[i] = v
            else:
                start = int(rng.integers(0, size))
                value = rng.exponential(1.0, int(rng.integers(0, size - start + 1)))
                tree.set_range(start, value)
                plain[start : start + len(value)] = value
        assert np.array_equal(tree.values, plain)
        again = tree_of(plain)
        assert tree.total == again.total
        assert tree.total == pytest.approx(math.fsum(plain), rel=1e-12)
        if tree.total > 0.0:
            mass = rng.random(300) * tree.total
            found, _ = tree.find(mass)
            assert np.array_equal(found, again.find(mass)[0])
            assert np.all(plain[found] > 0.0)


def test_the_total_does_not_drift() -> None:
    """A million updates whose values span nine orders of magnitude."""
    rng = np.random.default_rng(0)
    tree = tree_of(rng.random(20_000))
    for _ in range(1_000):
        index = rng.integers(0, 20_000, 1_000)
        tree.set(index, 10.0 ** rng.uniform(-6.0, 3.0, 1_000))
    assert tree.total == pytest.approx(math.fsum(tree.values), rel=1e-12)


def test_loaded_leaves_draw_the_same_bits() -> None:
    rng = np.random.default_rng(1)
    tree = tree_of(rng.random(10_001))
    for _ in range(50):
        tree.set(rng.integers(0, 10_001, 64), rng.random(64))
        tree.set_range(int(rng.integers(0, 9_000)), rng.random(7))
    saved = tree.values.copy()
    other = SumTree(10_001)
    other.set(rng.integers(0, 10_001, 500), rng.random(500))  # what was there before must not matter
    other.load(saved)
    for _ in range(20):
        mass = rng.random(256) * tree.total
        found, _ = tree.find(mass)
        assert other.total == tree.total
        assert np.array_equal(other.find(mass)[0], found)
        value = rng.random(256)
        tree.set(found, value)
        other.set(found, value)


@pytest.mark.parametrize("size", [5, TOP + 1, 6 * TOP])
def test_a_zero_leaf_is_never_found_even_where_sums_round(size: int) -> None:
    """Values of 20 orders of magnitude make nearly every sum inexact; borders and their neighbours are tried."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = 10.0 ** rng.uniform(-18.0, 2.0, size) * (rng.random(size) < 0.3)
        values[rng.integers(size)] = 1.0
        tree = tree_of(values)
        ends = np.cumsum(values)
        mass = np.concatenate(
            [[0.0], ends, np.nextafter(ends, 0.0), np.nextafter(ends, np.inf), rng.random(1000) * tree.total]
        )
        found, value = tree.find(mass[mass < tree.total])
        assert np.all(value > 0.0) and np.array_equal(value, values[found])


@pytest.mark.parametrize("size", SIZES)
def test_the_two_ends(size: int) -> None:
    values = np.random.default_rng(size).random(size)
    values[: size // 3] = 0.0
    values[size - size // 4 :] = 0.0
    tree = tree_of(values)
    filled = np.flatnonzero(values)
    ends = np.array([0.0, -0.0, np.nextafter(tree.total, 0.0), tree.total, np.nextafter(tree.total, np.inf)])
    assert tree.find(ends)[0].tolist() == [filled[0], filled[0], filled[-1], filled[-1], filled[-1]]


def test_one_leaf_that_is_not_zero_is_always_found() -> None:
    size = 5 * TOP
    for leaf in (0, 1, TOP, size // 2, size - 1):
        tree = SumTree(size)
        tree.set(np.array([leaf]), np.array([5e-324]))
        assert tree.find(np.zeros(3))[0].tolist() == [leaf] * 3


def test_a_remainder_that_rounds_up_to_its_node_stays_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """left + right is a tie that rounds to 1. The mass below 1 less left is a tie too, and rounds to right itself: as if
    it lay beyond the one leaf of right's block. The fast search errs here, and the careful one is asked.
    """
    left, right = 0.75 * 2.0**-52, 1.0 - 2.0**-52
    mass = np.nextafter(1.0, 0.0)
    assert left + right == 1.0 and mass - left == right
    tree = SumTree(FAN * FAN * TOP)
    tree.set(np.array([0, FAN]), np.array([left, right]))
    careful = tree._find_nonzero  # pyright: ignore
    asked: list[int] = []
    monkeypatch.setattr(tree, "_find_nonzero", lambda mass: (asked.append(len(mass)), careful(mass))[1])
    assert [x.tolist() for x in tree.find(np.array([0.5, mass, 0.0]))] == [[FAN, FAN, 0], [right, right, left]]
    assert asked == [1]


@pytest.mark.parametrize("size", [10, 3 * TOP, FAN * TOP + 1])
def test_the_careful_search_agrees_with_the_fast_one(size: int) -> None:
    values = whole_numbers(size, 3)
    tree = tree_of(values)
    mass = np.random.default_rng(3).random(2_000) * tree.total
    assert np.array_equal(tree._find_nonzero(mass), tree.find(mass)[0])  # pyright: ignore


def test_draws_follow_the_values() -> None:
    """Chi-square of 100,000 draws over 64 groups of leaves: with 63 degrees of freedom 103.44 is p = 1e-3."""
    rng = np.random.default_rng(11)
    values = rng.exponential(1.0, 3 * TOP)
    tree = tree_of(values)
    found, _ = tree.find(rng.random(100_000) * tree.total)
    group = np.arange(len(values)) % 64  # far apart, so that every level of the tree takes part
    expected = np.bincount(group, values) / values.sum() * 100_000
    seen = np.bincount(group[found], minlength=64)
    assert float(((seen - expected) ** 2 / expected).sum()) < 103.44


@pytest.mark.parametrize("size", [1000, 5 * TOP])
def test_stratified_masses_find_one_leaf_of_each_segment(size: int) -> None:
    """Equal leaves in n equal segments: exactly one draw falls in each run of size / n leaves; and order is kept."""
    tree = tree_of(np.ones(size))
    n = size // 8
    mass = (np.arange(n) + np.random.default_rng(2).random(n)) * (tree.total / n)
    found, _ = tree.find(mass)
    assert np.array_equal(found // 8, np.arange(n))


def test_order_of_masses_does_not_matter() -> None:
    rng = np.random.default_rng(4)
    tree = tree_of(rng.random(3 * TOP))
    mass, order = rng.random(500) * tree.total, rng.permutation(500)
    assert np.array_equal(tree.find(mass)[0][order], tree.find(mass[order])[0])


def test_arguments_are_left_alone_and_the_view_is_read_only() -> None:
    tree = tree_of(np.ones(3 * TOP))
    mass, index, value = np.array([5.5, 1.5]), np.array([7, 7, 9]), np.array([1.0, 2.0, 3.0])
    tree.find(mass)
    tree.set(index, value)
    assert (mass.tolist(), index.tolist(), value.tolist()) == ([5.5, 1.5], [7, 7, 9], [1.0, 2.0, 3.0])
    assert tree.get(index).tolist() == [2.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="read-only"):
        tree.values[0] = 1.0


def test_empty_arguments_do_nothing() -> None:
    tree, none = tree_of([1.0, 2.0]), np.zeros(0)
    tree.set(none.astype(np.int64), none)
    tree.set_range(2, none)
    assert tree.find(none)[0].shape == tree.find(none)[1].shape == tree.get(none.astype(np.int64)).shape == (0,)
    assert tree.total == 3.0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf, -5e-324, 1.7e308])
def test_refused_values_change_nothing(bad: float) -> None:
    tree = tree_of([1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match="finite"):
        tree.set(np.array([0, 1]), np.array([9.0, bad]))
    with pytest.raises(ConfigError, match="finite"):
        tree.set_range(1, np.array([9.0, bad]))
    assert tree.values.tolist() == [1.0, 2.0, 3.0]
    assert tree.total == 6.0


def test_minus_zero_is_zero() -> None:
    tree = tree_of([-0.0, 1.0])
    assert not np.signbit(tree.values).any()
    assert tree.find(np.array([0.0]))[0].tolist() == [1]


@pytest.mark.parametrize("index", [[-1], [3], [0, 2**62], [0.0], [True], [[0]]])
def test_refused_indices(index: list[object]) -> None:
    tree = tree_of([1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match="indices"):
        tree.get(np.array(index))  # pyright: ignore
    with pytest.raises(ConfigError, match="indices"):
        tree.set(np.array(index), np.ones(len(index)))  # pyright: ignore


def test_other_integers_serve_as_indices() -> None:
    assert tree_of([1.0, 2.0, 3.0]).get(np.array([2, 0], np.int32)).tolist() == [3.0, 1.0]  # pyright: ignore


@pytest.mark.parametrize("mass", [-1e-300, 6.1, math.nan, math.inf])
def test_refused_masses(mass: float) -> None:
    with pytest.raises(ConfigError, match="masses in"):
        tree_of([1.0, 2.0, 3.0]).find(np.array([1.0, mass]))


def test_refused_shapes() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        SumTree(0)
    tree = tree_of([1.0, 2.0, 3.0])
    for start, size in ((-1, 1), (2, 2), (4, 0)):
        with pytest.raises(ConfigError, match=r"0\.\.3"):
            tree.set_range(start, np.ones(size))
    with pytest.raises(ConfigError, match="as many"):
        tree.set(np.array([0, 1]), np.ones(1))
    with pytest.raises(ConfigError, match="expected \\(3,\\)"):
        tree.load(np.ones(2))
    with pytest.raises(ConfigError, match="masses of shape"):
        tree.find(np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="all 0"):
        SumTree(5).find(np.array([0.0]))
