"""Writers of observations and readers of actions: functions made once from a spec, called every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.spec import LeafSpec
from penstock.core.tree import Tree, is_leaf, tree_leaves, tree_map, tree_structure, tree_unflatten
from penstock.envs.contract import value_limits


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


def write_tree(row: Tree, b: int, obs: Any) -> bool:
    if isinstance(row, dict):
        for key, below in row.items():
            write_tree(below, b, obs[key])
    elif isinstance(row, tuple):
        for below, part in zip(row, obs):
            write_tree(below, b, part)
    else:
        row[b] = obs
    return True


def action_reader(spec: Tree) -> Callable[[Tree], Sequence[Any]]:
    """A function from a row of actions [B, *A] to one action for each environment: numpy integers, or arrays of its own."""
    if not is_leaf(spec):
        structure = tree_structure(spec)
        readers = [action_reader(leaf) for leaf in tree_leaves(spec)]
        return lambda row: [
            tree_unflatten(structure, list(parts)) for parts in zip(*(r(x) for r, x in zip(readers, tree_leaves(row))))
        ]
    leaf: LeafSpec = spec
    if leaf.kind == "discrete":
        return list  # numpy integers, as `action_space.sample()` returns; Gymnasium checks Python ints more slowly
    if leaf.kind != "box":
        return lambda row: list(row.copy())
    _, low, high = value_limits(leaf)

    def clipped(row: Any) -> Any:
        return row.copy() if low is None and high is None else np.clip(row, low, high)

    if not leaf.shape:
        return lambda row: [np.asarray(x) for x in clipped(row)]
    return lambda row: list(clipped(row))


def row_views(out: SampleBatch, t: int) -> tuple[Tree, Tree, Any, Any, Any, Any, dict[str, Any]]:
    """Views that a step of row t reads and writes, made once for each buffer: making them costs as much as a step.

    Returns:
        obs and action, then reward, terminated, truncated and valid, then the env info columns; obs is of row t + 1.
    """
    env_info = out.info.get("env", {}) if isinstance(out.info, dict) else {}
    return (
        tree_map(lambda x: x[t + 1], out.obs),
        tree_map(lambda x: x[t], out.action),
        out.reward[t],
        out.terminated[t],
        out.truncated[t],
        out.valid[t],
        {key: column[t] for key, column in env_info.items()},
    )


def row_checker(spec: Tree) -> Callable[[Tree], bool]:
    """A function that is True if every value of a row [B, *O] is finite and in its space.

    It looks at all slots at once; `describe_violation` then names the slot and the fault.
    """
    checks = [_leaf_checker(leaf) for leaf in tree_leaves(spec)]
    if len(checks) == 1:
        return lambda row: checks[0](row if isinstance(row, np.ndarray) else tree_leaves(row)[0])
    return lambda row: all(check(x) for check, x in zip(checks, tree_leaves(row)))


def _leaf_checker(leaf: LeafSpec) -> Callable[[Any], bool]:
    dtype, low, high = value_limits(leaf)
    if dtype.kind == "f":  # NaN fails every comparison
        largest = np.finfo(dtype).max
        low = -largest if low is None else np.maximum(low, -largest)
        high = largest if high is None else np.minimum(high, largest)
    if low is None:
        return (lambda row: True) if high is None else (lambda row: bool((row <= high).all()))
    if high is None:
        return lambda row: bool((row >= low).all())
    return lambda row: bool(((row >= low) & (row <= high)).all())
