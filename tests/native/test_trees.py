"""Sum trees by the native kernel are those of numpy, bit for bit."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.native import library
from penstock.replay.sum_tree import SumTree

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("by_kernel")]
SIZES = [2049, 16_385, 16_393, 100_003, 1_000_001]


def pair(size: int) -> tuple[SumTree, SumTree]:
    """The same leaves, a tenth of them 0, in a tree of the kernel and in one of numpy."""
    rng = np.random.default_rng(size)
    values = rng.random(size) * (rng.random(size) < 0.9)
    values[-1] = 1.0
    own = SumTree(size)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(library, "found", None)
        theirs = SumTree(size)
    for tree in (own, theirs):
        tree.load(values)
    return own, theirs


@pytest.mark.parametrize("size", SIZES)
def test_leaves_and_sums_are_those_of_numpy(size: int) -> None:
    own, theirs = pair(size)
    rng = np.random.default_rng(1)
    for n in (0, 1, 3, 256, 1000):
        index, values = rng.integers(0, size, n), rng.random(n)
        index[n // 2 :] = index[: n - n // 2]  # of equal indices the last wins
        mass = rng.random(n)
        for tree in (own, theirs):
            tree.set(index, values)
        assert own.total == theirs.total == pytest.approx(own.values.sum())
        assert np.array_equal(own.values, theirs.values)
        for masses in (mass * own.total, np.sort(mass) * own.total, np.array([0.0, own.total])):
            for found, expected in zip(own.find(masses), theirs.find(masses)):
                assert np.array_equal(found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mass", [-1.0, -1e300, math.nan, math.inf, 1e300])
def test_masses_outside_are_refused_in_trees_of_any_depth(size: int, mass: float) -> None:
    own, _ = pair(size)
    with pytest.raises(ConfigError, match="masses in"):
        own.find(np.array([0.5, mass]))


def test_a_copy_has_memory_of_its_own() -> None:
    own, _ = pair(2049)
    for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert other.total == own.total
        other.set(np.array([3]), np.array([7.0]))
        assert other.get(np.array([3]))[0] == 7.0
        assert own.get(np.array([3]))[0] != 7.0
        assert other.find(np.array([other.total]))[0][0] == 2048
