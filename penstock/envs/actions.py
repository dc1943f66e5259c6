"""Uniform random actions of any action space, from uniform numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.spec import LeafSpec, choices, describe
from penstock.core.tree import Tree, tree_leaves, tree_structure, tree_unflatten


def action_noise_size(spec_tree: Tree) -> int:
    """The number of uniforms that `sample_action` needs for one action: one for each element of each leaf."""
    return sum(leaf.size for leaf in tree_leaves(spec_tree))


def sample_action(
    spec_tree: Tree, uniforms: npt.NDArray[np.floating[Any]], mask: npt.NDArray[Any] | None = None
) -> Tree:
    """Random actions, uniform over each leaf, in fresh arrays.

    Args:
        spec_tree: action spec. An element of a box without finite bounds is drawn from [-1, 1], one with a single
            finite bound from the 2 units beside it.
        uniforms: [N, action_noise_size(spec_tree)] in (0, 1).
        mask: [N, choices] of all leaves in order (`spec.choices`), nonzero where a choice is legal; a row or a
            dimension without a legal choice is drawn from all of them.

    Returns:
        The tree with leaves [N, *shape] of each leaf's dtype.

    Raises:
        ConfigError: `mask` with an action without choices.
    """
    leaves: list[LeafSpec] = tree_leaves(spec_tree)
    legal = None if mask is None else np.asarray(mask).reshape(len(mask), math.prod(np.shape(mask)[1:])) != 0
    sizes_by_leaf = choices(spec_tree, None if legal is None else legal.shape[1])
    if legal is not None and not any(sizes_by_leaf):
        raise ConfigError(
            f"an action mask with {describe(spec_tree)}, which has no choices to mask; drop the mask, or scale or clip "
            "a box instead"
        )
    u = np.asarray(uniforms, np.float64)
    out: list[npt.NDArray[Any]] = []
    at = at_mask = 0
    for leaf, choices_of_leaf in zip(leaves, sizes_by_leaf):
        part = u[:, at : at + leaf.size]
        at += leaf.size
        if leaf.kind == "box":
            drawn = _box(leaf, part)
        elif legal is not None and choices_of_leaf:
            width = sum(choices_of_leaf)
            drawn = _masked(choices_of_leaf, part, legal[:, at_mask : at_mask + width]) + np.asarray(leaf.start)
            at_mask += width
        elif leaf.kind == "multi_binary":
            drawn = part < 0.5
        else:
            sizes = np.asarray(leaf.sizes)
            drawn = np.minimum((part * sizes).astype(np.int64), sizes - 1) + np.asarray(leaf.start)
        out.append(drawn.reshape(len(u), *leaf.shape).astype(leaf.dtype))
    return tree_unflatten(tree_structure(spec_tree), out)


def _box(leaf: LeafSpec, u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    lower, upper = (bound.ravel() for bound in leaf.first_range())
    if np.issubdtype(np.dtype(leaf.dtype), np.integer):
        return np.minimum(np.floor(lower + u * (upper - lower + 1.0)), upper)
    return np.clip(lower + u * (upper - lower), lower, upper)


def _masked(sizes: tuple[int, ...], u: npt.NDArray[np.float64], legal: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    chosen = np.empty(u.shape, np.int64)
    for d, (size, stop) in enumerate(zip(sizes, np.cumsum(sizes))):
        part = legal[:, stop - size : stop]
        part = part | ~part.any(axis=1, keepdims=True)
        rank = np.floor(u[:, d] * part.sum(axis=1))
        chosen[:, d] = np.argmax(part.cumsum(axis=1) > rank[:, None], axis=1)
    return chosen
