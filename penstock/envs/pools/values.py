"""Values between environments and a row: observations are written and looked at, actions read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.spec import LeafSpec
from penstock.core.tree import Tree, is_leaf, tree_leaves, tree_structure, tree_unflatten
from penstock.envs.contract import Values, value_limits


def write_tree(row: Tree, b: int, obs: Any) -> bool:
    """Writes one slot's observation, known to be sound, into a row [B, *O]."""
    if isinstance(row, dict):
        for key, below in row.items():
            write_tree(below, b, obs[key])
    elif isinstance(row, tuple):
        for below, part in zip(row, obs):
            write_tree(below, b, part)
    else:
        row[b] = obs
    return True


def obs_writer(spec: Tree) -> Callable[[Tree, int, Any], bool]:
    """A function that writes one slot's observation into a row [B, *O], or returns False if its form is wrong."""
    if isinstance(spec, dict):
        keys = spec.keys()
        by_key = [(key, obs_writer(below)) for key, below in spec.items()]

        def write_dict(row: Any, b: int, obs: Any) -> bool:
            return isinstance(obs, dict) and obs.keys() == keys and all(w(row[key], b, obs[key]) for key, w in by_key)

        return write_dict
    if isinstance(spec, tuple):
        writers = [obs_writer(below) for below in spec]

        def write_tuple(row: Any, b: int, obs: Any) -> bool:
            if not isinstance(obs, tuple) or len(obs) != len(writers):
                return False
            return all(write(below, b, part) for write, below, part in zip(writers, row, obs))

        return write_tuple
    leaf: LeafSpec = spec
    if leaf.kind == "discrete":

        def write_scalar(row: Any, b: int, obs: Any) -> bool:
            if not isinstance(obs, (int, np.integer)):
                return False
            row[b] = obs
            return True

        return write_scalar
    shape, dtype = leaf.shape, np.dtype(leaf.dtype)

    def write(row: Any, b: int, obs: Any) -> bool:
        if obs.__class__ is not np.ndarray or obs.shape != shape or (obs.dtype is not dtype and obs.dtype != dtype):
            return False
        row[b] = obs
        return True

    return write


def action_reader(spec: Tree, dtypes: Sequence[np.dtype[Any]] = ()) -> Callable[[Tree], Sequence[Any]]:
    """A function from a row of actions [B, *A] to one for each environment, `dtypes` being those of its leaves."""
    if not is_leaf(spec):
        structure = tree_structure(spec)
        readers = [action_reader(leaf, dtypes[i : i + 1]) for i, leaf in enumerate(tree_leaves(spec))]
        return lambda row: [
            tree_unflatten(structure, list(parts)) for parts in zip(*(r(x) for r, x in zip(readers, tree_leaves(row))))
        ]
    leaf: LeafSpec = spec
    if leaf.kind == "discrete":
        if dtypes and dtypes[0] != leaf.dtype:
            return lambda row: list(row.astype(dtypes[0]))
        return list  # numpy integers, as `action_space.sample()` returns; Gymnasium checks Python ints more slowly
    if leaf.kind != "box":
        return lambda row: list(row.copy())
    _, low, high = value_limits(leaf)

    def clipped(row: Any) -> Any:
        return row.copy() if low is None and high is None else row.clip(low, high)

    if not leaf.shape:
        return lambda row: [np.asarray(x) for x in clipped(row)]
    return lambda row: list(clipped(row))


def row_checker(spec: Tree, values: Values = "bounds") -> Callable[[Tree], bool]:
    """A function that is True if no value of a row [B, *O] is one of those refused.

    It looks at all slots at once; `describe_violation` then names the slot and the fault.
    """
    checks = [_leaf_checker(leaf, values) for leaf in tree_leaves(spec)]
    if len(checks) == 1:
        return lambda row: checks[0](row if isinstance(row, np.ndarray) else tree_leaves(row)[0])
    return lambda row: all(check(x) for check, x in zip(checks, tree_leaves(row)))


def _leaf_checker(leaf: LeafSpec, values: Values) -> Callable[[Any], bool]:
    dtype, low, high = value_limits(leaf)
    if values != "bounds":
        low = high = None
    if dtype.kind == "f" and values != "any":  # NaN fails every comparison
        largest = np.finfo(dtype).max
        low = -largest if low is None else np.maximum(low, -largest)
        high = largest if high is None else np.minimum(high, largest)
    if low is None:
        return (lambda row: True) if high is None else (lambda row: bool((row <= high).all()))
    if high is None:
        return lambda row: bool((row >= low).all())
    return lambda row: bool(((row >= low) & (row <= high)).all())
