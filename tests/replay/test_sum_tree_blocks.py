"""Do the sum tree's blocks of eight hold the right sums, whatever wrote to them, and is each searched to its last leaf?"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.replay.sum_tree import FAN, TOP, SumTree


def tree_of(values: NDArray[np.float64]) -> SumTree:
    tree = SumTree(len(values))
    tree.load(values)
    return tree


def whole_numbers(size: int, seed: int) -> NDArray[np.float64]:
    """Integers, half of them 0, so that every sum is exact in any order."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 9, size) * (rng.random(size) < 0.5)).astype(np.float64)


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_as_many_levels_as_the_leaves_need(depth: int, more: int) -> None:
    """What is left of a mass goes from level to level in turns, so that each number of them is another case."""
    size = TOP * FAN**depth // FAN + more
    values = whole_numbers(size, depth)
    tree, sums = tree_of(values), np.cumsum(values)
    rng = np.random.default_rng(depth)
    index, value = rng.integers(0, size, 300), rng.integers(0, 9, 300).astype(np.float64)
    for _ in range(2):
        mass = np.concatenate([rng.random(1000), np.arange(64) / 64]) * sums[-1]
        assert tree.total == sums[-1]
        assert np.array_equal(tree.find(mass)[0], np.searchsorted(sums, mass, "right"))
        tree.set(index, value)
        values[index] = value
        sums = np.cumsum(values)


@pytest.mark.parametrize("lone", range(FAN))
@pytest.mark.parametrize("size", [3 * TOP, FAN * TOP + FAN])
def test_zeros_at_either_end_of_a_block(size: int, lone: int) -> None:
    """One leaf of each block is not 0: all masses of a block, its very last one too, belong to that leaf."""
    values = np.zeros(size)
    values[lone::FAN] = 2.0
    blocks = np.arange(len(values[lone::FAN]))
    begin = np.arange(0.0, 2.0 * len(blocks), 2.0)
    mass = np.concatenate([begin, begin + 1.0, np.nextafter(begin + 2.0, 0.0)])
    assert np.array_equal(tree_of(values).find(mass)[0], np.tile(FAN * blocks + lone, 3))


def test_all_sums_are_those_of_a_loaded_tree() -> None:
    """Every block's sum, by bits, after single leaves, short ranges and long ones; and as added up by hand."""
    size = FAN * TOP + 3
    rng = np.random.default_rng(5)
    tree = SumTree(size)
    for width in (size, 40 * FAN, 5 * FAN, 4 * FAN + 1, 3 * FAN, 2, 1) * 4:
        start = int(rng.integers(0, size - width + 1))
        tree.set_range(start, rng.exponential(1.0, width))
        tree.set(rng.integers(0, size, width), 10.0 ** rng.uniform(-9.0, 3.0, width))
    again = tree_of(tree.values.copy())
    for (_, blocks, sums), (_, other_blocks, other_sums) in zip(tree._up, again._up, strict=True):  # pyright: ignore
        assert np.array_equal(blocks, other_blocks)
        assert np.array_equal(sums, other_sums)
        a, b, c, d, e, f, g, h = blocks.T
        assert np.array_equal(sums[: len(blocks)], ((a + b) + (c + d)) + ((e + f) + (g + h)))


def test_how_many_are_asked_may_change_between_calls() -> None:
    """The arrays worked in are kept for the last number; neither they nor what was returned before may be mixed up."""
    values = whole_numbers(FAN * TOP + 1, 8)
    tree, sums = tree_of(values), np.cumsum(values)
    rng = np.random.default_rng(8)
    before: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for n in (3, 3, 0, 1, 5000, 5000, 256, 1, 256, 4096, 4097, 2):
        mass = rng.random(n) * sums[-1]
        before.append((tree.find(mass)[0], np.searchsorted(sums, mass, "right")))
        index = rng.integers(0, len(values), n // 2)
        tree.set(index, tree.get(index))
    assert all(np.array_equal(found, expected) for found, expected in before)


def test_arrays_that_are_not_contiguous_serve_as_well() -> None:
    values = whole_numbers(3 * TOP, 9)
    tree, sums = tree_of(values), np.cumsum(values)
    mass = np.random.default_rng(9).random(200) * sums[-1]
    assert np.array_equal(tree.find(mass[::-2])[0], np.searchsorted(sums, mass[::-2], "right"))
    index, value = np.arange(40), np.arange(40.0)
    tree.set(index[::-3], value[::-3])
    assert np.array_equal(tree.get(index[::-3]), value[::-3])
