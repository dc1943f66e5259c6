"""Observations of many agents written at once: a row of a policy's batch, or the turns of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from penstock.core.spec import LeafSpec
from penstock.core.tree import Tree

Write: TypeAlias = Callable[[Tree, Any, Sequence[Any]], bool]
"""(target, place in it, observations) -> False if the form of one is wrong. A refused observation may still be sound,
but of an unusual type."""

_shape = attrgetter("shape")
_INTEGERS = frozenset([int, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32])


def writable(row: Tree, spec: Tree) -> Tree:
    """Views of a row [B, *O] that `row_writer` of the same spec writes to."""
    if isinstance(spec, dict):
        return {key: writable(row[key], below) for key, below in spec.items()}
    if isinstance(spec, tuple):
        return [writable(part, below) for part, below in zip(row, spec)]
    return row if spec.kind == "discrete" or not spec.shape else row.reshape(-1, *row.shape[2:])


def row_writer(spec: Tree, B: int) -> Write:
    """A function that writes the observations of all columns; it copies each array once, into the batch.

    Its target is a row as `writable` returns it; it takes no place.
    """
    return _by_parts(spec, lambda leaf: _leaf_writer(leaf, B))


def turns_writer(spec: Tree) -> Write:
    """The same for n columns, each in a row of its own: target obs [T + 1, B, *O], place (rows [n], columns [n])."""
    return _by_parts(spec, _turns_leaf_writer)


def _by_parts(spec: Tree, leaf_writer: Callable[[LeafSpec], Write]) -> Write:
    """Writes dicts and tuples by the writers of their leaves."""
    if isinstance(spec, dict):
        keys = spec.keys()
        by_key = [(key, _by_parts(below, leaf_writer)) for key, below in spec.items()]

        def write_dict(target: Any, at: Any, found: Sequence[Any]) -> bool:
            for obs in found:
                if not isinstance(obs, dict) or obs.keys() != keys:
                    return False
            return all(write(target[key], at, [obs[key] for obs in found]) for key, write in by_key)

        return write_dict
    if isinstance(spec, tuple):
        writers = [_by_parts(below, leaf_writer) for below in spec]

        def write_tuple(target: Any, at: Any, found: Sequence[Any]) -> bool:
            for obs in found:
                if not isinstance(obs, tuple) or len(obs) != len(writers):
                    return False
            return all(write(target[i], at, [obs[i] for obs in found]) for i, write in enumerate(writers))

        return write_tuple
    return leaf_writer(spec)


def _leaf_writer(leaf: LeafSpec, B: int) -> Write:
    if leaf.kind == "discrete":

        def write_numbers(row: Any, at: Any, found: Sequence[Any]) -> bool:
            if not _INTEGERS.issuperset(map(type, found)):
                return False
            row[:] = found
            return True

        return write_numbers
    if not leaf.shape:
        dtype = np.dtype(leaf.dtype)

        def write_scalars(row: Any, at: Any, found: Sequence[Any]) -> bool:
            for x in found:
                if getattr(x, "shape", None) != () or x.dtype != dtype:
                    return False
            row[:] = found
            return True

        return write_scalars
    shapes = [leaf.shape] * B

    def write(row: Any, at: Any, found: Sequence[Any]) -> bool:
        try:
            if [*map(_shape, found)] != shapes:
                return False
            np.concatenate(found, out=row, casting="equiv")
        except (AttributeError, TypeError, ValueError):
            return False
        return True

    return write


def _turns_leaf_writer(leaf: LeafSpec) -> Write:
    one_row = leaf.kind == "discrete" or not leaf.shape
    dtype = np.dtype(leaf.dtype)

    def write(obs: Any, at: Any, found: Sequence[Any]) -> bool:
        n = len(found)
        rows = np.empty((n, *leaf.shape), dtype)
        if not _leaf_writer(leaf, n)(rows if one_row else rows.reshape(-1, *leaf.shape[1:]), None, found):
            return False
        obs[at] = rows
        return True

    return write


def column_of(row: Tree, b: int) -> Tree:
    """A view of one column of a row [B, *O], a tree like an observation."""
    if isinstance(row, dict):
        return {key: column_of(below, b) for key, below in row.items()}
    if isinstance(row, tuple):
        return tuple(column_of(below, b) for below in row)
    return row[b]
