import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.core.tree import (
    is_leaf,
    struct,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_structure,
    tree_unflatten,
)


@struct
class Pair:
    right: Any
    left: Any


class Point(NamedTuple):
    y: Any
    x: Any


TREE = {"b": (1, [2, 3]), "a": Pair(right={"z": 4}, left=None), "c": None, "d": Point(5, 6)}


def test_leaves_come_in_key_order_and_field_order():
    assert tree_leaves(TREE) == [4, 1, 2, 3, 5, 6]
    assert tree_leaves(Pair(right=1, left=2)) == [1, 2]
    assert tree_leaves(None) == []
    assert tree_leaves(7) == [7]


def test_map_keeps_every_container_and_none():
    doubled = tree_map(lambda x: 2 * x, TREE)
    assert isinstance(doubled["a"], Pair)
    assert doubled["a"].right == {"z": 8}
    assert doubled["a"].left is None
    assert doubled["c"] is None
    assert doubled["b"] == (2, [4, 6])
    assert doubled["d"] == Point(10, 12)
    assert tree_map(lambda x: x, None) is None


def test_map_walks_several_trees_together():
    assert tree_map(lambda x, y: x - y, {"a": 5, "b": (3,)}, {"b": (1,), "a": 2}) == {"a": 3, "b": (2,)}
    with pytest.raises(ValueError):
        tree_map(lambda x, y: x, {"a": 5}, {"b": 5})


def test_structure_and_leaves_make_the_tree_again():
    structure = tree_structure(TREE)
    again = tree_unflatten(structure, tree_leaves(TREE))
    assert tree_leaves(again) == tree_leaves(TREE)
    assert structure == tree_structure(again)
    assert structure != tree_structure({"b": 1})


def test_paths_name_the_leaves():
    assert tree_paths({"b": (1, 2), "a": Pair(right=3, left=4)}) == ["['a']['right']", "['a']['left']", "['b'][0]",
                                                                     "['b'][1]"]  # fmt: skip
    assert tree_paths(5) == [""]


def test_only_arrays_and_scalars_are_leaves():
    assert is_leaf(np.zeros(3))
    assert is_leaf(0)
    assert is_leaf("text")
    for tree in (None, {}, (), [], {"a": 1}, (1,), Pair(1, 2), Point(1, 2)):
        assert not is_leaf(tree)


def test_a_struct_is_frozen_and_compared_by_identity():
    pair = Pair(1, left=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.right = 3  # pyright: ignore
    assert pair != Pair(1, 2)
    assert dataclasses.replace(pair, left=9).left == 9
