"""Values in the form that the contract wants, where another form means the same; others as they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.spec import LeafSpec

NOT_YOURS = ", or, if it is not yours, wrap it: --wrappers penstock.envs.wrappers:Conform (wrappers=)"
"""End of each message about what `penstock.envs.wrappers.Conform` cures."""


def conform_reward(reward: Any) -> Any:
    """One number as a float, out of an array, list or tensor."""
    x = _array(reward)
    return float(x.item()) if x is not None and x.size == 1 and x.dtype.kind in "biuf" else reward


def conform_flag(flag: Any) -> Any:
    """A flag that is 0 or 1, in an array or not, as a bool."""
    x = _array(flag)
    one = x is not None and x.size == 1 and x.dtype.kind in "biuf"
    return bool(x.item()) if one and x is not None and x.item() in (0, 1) else flag


def conform_info(info: Any) -> Any:
    """An info as a dict; of nothing an empty one."""
    return {} if info is None else dict(info) if isinstance(info, Mapping) else info


def conform_leaf(obs: Any, leaf: LeafSpec) -> Any:
    """An array or number as its space has it, in new memory: of lists and tensors, and of another dtype.

    A cast that changes a value, but for the rounding of floats, is not made, and sizes are not changed.
    """
    x = _array(obs)
    if x is None:
        return obs
    dtype = np.dtype(leaf.dtype)
    if x.shape != leaf.shape:
        if [n for n in x.shape if n != 1] != [n for n in leaf.shape if n != 1]:
            return obs
        x = x.reshape(leaf.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        cast = x.astype(dtype)
    rounds = dtype.kind == "f" and x.dtype.kind == "f"
    if not rounds and not np.array_equal(cast, x):
        return obs
    return int(cast) if leaf.kind == "discrete" else cast


def conforms(obs: Any, leaf: LeafSpec) -> bool:
    """True if `conform_leaf` would bring an observation into its space's form."""
    found = conform_leaf(obs, leaf)
    if leaf.kind == "discrete":
        return type(found) is int
    return isinstance(found, np.ndarray) and found.shape == leaf.shape and found.dtype == leaf.dtype


def _array(value: Any) -> Any:
    """A numpy array of numbers; None for anything that is none."""
    if hasattr(value, "detach"):  # a torch tensor, wherever it lies
        value = value.detach().cpu()
    try:
        x = np.asarray(value)
    except (TypeError, ValueError):  # lists of unequal lengths
        return None
    return x if x.dtype.kind in "biuf" else None
