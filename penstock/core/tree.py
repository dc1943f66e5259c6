"""Trees of arrays: dicts, tuples and `@struct` records whose leaves are numpy or torch arrays; None has no leaves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform, overload

import numpy as np
import optree

Tree = Any
"""A leaf, or a dict, tuple, list or `@struct` of trees. None is an empty tree: it stays None in every map."""

T = TypeVar("T")
_NAMESPACE = "penstock"
_INLINE_BYTES = 256 << 10
"""Leaves up to this size travel as one string of bytes; of larger ones each is copied once on its way."""


@dataclass_transform(frozen_default=True)
def struct(cls: type[T]) -> type[T]:
    """Makes a class a frozen record whose fields are sub-trees, so that `tree_map` reaches every leaf."""
    record = dataclass(frozen=True, eq=False)(cls)
    names = tuple(f.name for f in fields(record))  # pyright: ignore[reportArgumentType]
    children = operator.attrgetter(*names)  # a tuple, as there are several

    def flatten(value: Any) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
        return children(value), None, names

    optree.register_pytree_node(
        record,  # pyright: ignore[reportArgumentType]
        flatten,  # pyright: ignore[reportArgumentType]
        lambda _, children: record(*children),  # pyright: ignore[reportArgumentType]
        namespace=_NAMESPACE,
    )
    return record


@overload
def tree_map(fn: Callable[[Any], Any], tree: Tree) -> Tree: ...
@overload
def tree_map(fn: Callable[[Any, Any], Any], tree: Tree, other: Tree, /) -> Tree: ...
@overload
def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree: ...
def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`fn` applied to every leaf (and the leaves at the same place in `rest`), in a tree of the same shape."""
    return optree.tree_map(fn, tree, *rest, namespace=_NAMESPACE)


def tree_kept(tree: Tree) -> Tree:
    """Copies the numpy leaves, which another owner may overwrite; returns other leaves unchanged."""
    return tree_map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)


def tree_assign(out: Tree, at: Any, values: Tree, source: Any = ...) -> None:
    """Writes `values[source]` into `out[at]`, leaf by leaf and in place; by default the whole of each leaf."""
    for x, y in zip(tree_leaves(out), tree_leaves(values), strict=True):
        x[at] = y if source is ... else y[source]


def tree_leaves(tree: Tree) -> list[Any]:
    """The leaves, dict keys in sorted order, fields in the order of their declaration."""
    if type(tree) is np.ndarray:
        return [tree]
    return optree.tree_leaves(tree, namespace=_NAMESPACE)


def tree_structure(tree: Tree) -> optree.PyTreeSpec:
    """The tree without its leaves; two trees of equal structure can be mapped together."""
    return optree.tree_structure(tree, namespace=_NAMESPACE)


def tree_unflatten(structure: optree.PyTreeSpec, leaves: list[Any]) -> Tree:
    """The tree of this structure with these leaves."""
    return optree.tree_unflatten(structure, leaves)


def tree_paths(tree: Tree) -> list[str]:
    """A readable path for every leaf, in `tree_leaves` order: `obs['camera']`, or '' for a bare leaf."""
    paths = optree.tree_paths(tree, namespace=_NAMESPACE)
    return ["".join(f"[{key!r}]" for key in path) for path in paths]


def tree_names(tree: Tree, root: str) -> list[str]:
    """A dotted name for every leaf, in `tree_leaves` order: `obs.camera`, or the root itself for a bare leaf."""
    return [".".join([root, *map(str, path)]) for path in optree.tree_paths(tree, namespace=_NAMESPACE)]


def tree_without(tree: Tree, keys: Sequence[str]) -> Tree:
    """A tree of dicts without these keys and dicts that they leave empty; absent keys are passed over.

    Args:
        keys: `a/b` is b in a, unless the tree itself has a key `a/b`.
    """
    if not isinstance(tree, dict):
        return tree
    out: dict[str, Any] = {}
    for key, below in tree.items():
        inner = [path[len(key) + 1 :] for path in keys if path.startswith(f"{key}/") and path not in tree]
        kept = tree_without(below, inner) if inner else below
        if key not in keys and not (inner and kept == {}):
            out[key] = kept
    return out


def is_leaf(tree: Tree) -> bool:
    """True for an array or a scalar, False for None, a container or a record."""
    return optree.tree_is_leaf(tree, namespace=_NAMESPACE)


def pack_leaves(tree: Tree) -> bytes | list[np.ndarray[Any, Any]]:
    """The leaves of a tree of numpy arrays, to be sent: one string of bytes if they are small, else copies."""
    leaves = tree_leaves(tree)
    if sum(x.nbytes for x in leaves) <= _INLINE_BYTES:
        return b"".join([x.tobytes() for x in leaves])
    return [np.array(x, order="C") for x in leaves]


def unpack_leaves(packed: bytes | Sequence[np.ndarray[Any, Any]], out: Tree) -> None:
    """Copies what `pack_leaves` returned into the leaves of `out`, such as columns of a batch."""
    leaves, at = tree_leaves(out), 0
    if not isinstance(packed, bytes):
        for x, y in zip(leaves, packed, strict=True):
            np.copyto(x, y)
        return
    for x in leaves:
        np.copyto(x, np.frombuffer(packed, x.dtype, x.size, at).reshape(x.shape))
        at += x.nbytes
