from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.core.spec import LeafSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.contract import describe_violation
from penstock.envs.pools.values import action_reader, obs_writer, row_checker, write_tree
from penstock.envs.spaces import space_to_spec

INT64, UINT64 = np.iinfo(np.int64), np.iinfo(np.uint64)
LEAVES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "uneven box": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 3], np.float32)),
    "free box": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "half box": spaces.Box(0, np.inf, (2,), np.float32),
    "half precision box": spaces.Box(-np.inf, 5, (2,), np.float16),
    "scalar box": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (3, 4, 4), np.uint8),
    "dim image": spaces.Box(3, 200, (3, 4, 4), np.uint8),
    "bool box": spaces.Box(0, 1, (2,), np.bool_),
    "int8 box": spaces.Box(-3, 127, (2,), np.int8),
    "int8 box from below": spaces.Box(-128, 3, (2,), np.int8),
    "int64 box": spaces.Box(INT64.min, INT64.max, (2,), np.int64),
    "uint64 box": spaces.Box(0, UINT64.max, (2,), np.uint64),
    "discrete": spaces.Discrete(3, start=-5),
    "multi_discrete": spaces.MultiDiscrete([2, 3], start=[1, -2]),
    "multi_discrete 2 x 2": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), dtype=np.int32),
    "multi_binary": spaces.MultiBinary([2, 2]),
}
TREES: dict[str, spaces.Space[Any]] = {
    "one in a dict": spaces.Dict({"a": LEAVES["box"]}),
    "all": spaces.Dict({"b": spaces.Tuple((LEAVES["box"], LEAVES["discrete"])), "a": LEAVES["multi_binary"]}),
}
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def sampled(space: spaces.Space[Any], seed: int) -> Any:
    space.seed(seed)
    return space.sample()


def row_of(spec: Any, observations: list[Any]) -> Any:
    row = tree_map(lambda leaf: np.zeros((len(observations), *leaf.shape), leaf.dtype), spec)
    for b, obs in enumerate(observations):
        assert write_tree(row, b, obs)
    return row


@pytest.mark.parametrize("name", [*LEAVES, *TREES])
def test_what_is_in_the_space_is_written_and_sound(name: str):
    space = {**LEAVES, **TREES}[name]
    spec = space_to_spec(space, "observation")
    write, check = obs_writer(spec), row_checker(spec)
    observations = [sampled(space, b) for b in range(4)]
    row = tree_map(lambda leaf: np.zeros((4, *leaf.shape), leaf.dtype), spec)
    for b, obs in enumerate(observations):
        if not write(row, b, obs):  # a numpy scalar, where an array is usual
            assert name == "scalar box"
            write_tree(row, b, obs)
    for x, y in zip(tree_leaves(row), tree_leaves(row_of(spec, observations))):
        assert np.array_equal(x, y)
    assert check(row)


VECTOR = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("space", "sound", "unsound"),
    [
        (LEAVES["box"], VECTOR, [[0.0, 0.0], None, VECTOR[:1], VECTOR[None], VECTOR.astype(np.float64), {"a": VECTOR}]),
        (LEAVES["discrete"], -5, [None, -4.0, np.float32(-4), "a", [-4], VECTOR]),
        (
            TREES["one in a dict"],
            {"a": VECTOR},
            [VECTOR, {}, {"b": VECTOR}, {"a": VECTOR, "b": VECTOR}, {"a": [0.0] * 2}],
        ),
        (
            spaces.Tuple((LEAVES["box"], LEAVES["discrete"])),
            (VECTOR, -5),
            [VECTOR, [VECTOR, -5], (VECTOR,), (VECTOR, -5, -5), (-5, VECTOR), (VECTOR, None), None],
        ),
    ],
    ids=["box", "discrete", "dict", "tuple"],
)
def test_what_is_of_another_form_is_not_written(space: Any, sound: Any, unsound: list[Any]):
    spec = space_to_spec(space, "observation")
    write = obs_writer(spec)
    row = tree_map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), spec)
    assert write(row, 0, sound)
    assert not any(write(row, 0, obs) for obs in unsound)
    assert all(describe_violation(obs, spec, "obs") for obs in unsound)


def values_of(leaf: LeafSpec) -> list[Any]:
    """Values of the leaf's dtype, on both sides of whatever bounds it has, and the bounds."""
    dtype = np.dtype(leaf.dtype)
    if dtype.kind == "b":
        return [np.False_, np.True_]
    wide = [np.nan, np.inf, -np.inf] if dtype.kind == "f" else [np.iinfo(dtype).min, np.iinfo(dtype).max]
    return [np.array(value, dtype) for value in [*wide, *(x for x in range(-9, 10) if dtype.kind != "u" or x >= 0)]]


@pytest.mark.parametrize("name", LEAVES)
def test_what_is_not_in_the_space_is_found_wherever_it_stands(name: str):
    spec: Any = space_to_spec(LEAVES[name], "observation")
    check = row_checker(spec)
    good = row_of(spec, [sampled(LEAVES[name], b) for b in range(3)])
    found = set()
    for value in values_of(spec):
        for at in np.ndindex(*good.shape):
            row = good.copy()
            row[at] = value
            found.add(describe_violation(row[at[0]], spec, "") is None)
            assert check(row) == (describe_violation(row[at[0]], spec, "") is None)
    assert found == ({True} if name in ("bool box", "int64 box", "uint64 box", "image") else {True, False})


def test_what_is_not_in_the_space_is_found_in_every_leaf_of_a_tree():
    space = TREES["all"]
    spec = space_to_spec(space, "observation")
    check = row_checker(spec)
    for i in range(3):
        row = row_of(spec, [sampled(space, b) for b in range(3)])
        assert check(row)
        tree_leaves(row)[i][2] = 77
        assert not check(row)


@pytest.mark.parametrize("name", [*LEAVES, *TREES])
def test_actions_of_the_space_pass_unchanged_in_memory_of_their_own(name: str):
    space = {**LEAVES, **TREES}[name]
    spec = space_to_spec(space, "action")
    chosen = [sampled(space, b) for b in range(4)]
    row = row_of(spec, chosen)
    given = action_reader(spec)(row)
    assert len(given) == 4
    for action, expected in zip(given, chosen):
        assert space.contains(action)
        for x, y in zip(tree_leaves(action), tree_leaves(expected)):
            assert np.array_equal(x, y)
            assert np.asarray(x).dtype == np.asarray(y).dtype
    kept = [tree_map(np.copy, action) for action in given]
    tree_map(lambda x: x.fill(0), row)
    for action, copy in zip(given, kept):
        assert all(np.array_equal(x, y) for x, y in zip(tree_leaves(action), tree_leaves(copy)))


def test_boxes_are_clipped_and_nothing_else_is():
    spec = space_to_spec(LEAVES["uneven box"], "action")
    given = action_reader(spec)(np.array([[-2, -2], [2, 2], [4, 4]], np.float32))
    assert [x.tolist() for x in given] == [[-1, 0], [1, 2], [1, 3]]
    half = action_reader(space_to_spec(LEAVES["half box"], "action"))(np.array([[-2, 1e30]], np.float32))
    assert half[0].tolist() == [0, np.float32(1e30)]
    scalar = action_reader(space_to_spec(LEAVES["scalar box"], "action"))(np.array([-2, 0.5], np.float32))
    assert [(type(x), x.shape, x.tolist()) for x in scalar] == [(np.ndarray, (), -1), (np.ndarray, (), 0.5)]
