"""The form of a stored state: what of it is no container, array or number like that of a new run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def require_form(stored: Any, new: Any, at: str) -> None:
    """Raises TypeError if a part of a stored state is of another type than the same part of a new run.

    Parts that only one of the two has, and those that are None in the new one, may be anything. Lists may have any
    length, and arrays any shape of the same number of dimensions.

    Args:
        at: names the state in the message.
    """
    if new is None:
        return
    if not _alike(stored, new):
        raise TypeError(f"{at} is {stored!r:.60} ({type(stored).__name__}); expected the like of {new!r:.60}")
    if isinstance(new, Mapping):
        for key in new.keys() & stored.keys():
            require_form(stored[key], new[key], f"{at}.{key}")
    elif isinstance(new, (list, tuple)) and new:
        for i, part in enumerate(stored):
            require_form(part, new[i] if isinstance(new, tuple) else new[0], f"{at}[{i}]")


def _alike(stored: Any, new: Any) -> bool:
    """True if both are of one type; whole numbers and fractions may be Python's or numpy's."""
    if isinstance(new, (bool, np.bool_)) or isinstance(stored, (bool, np.bool_)):
        return isinstance(new, (bool, np.bool_)) and isinstance(stored, (bool, np.bool_))
    if isinstance(new, (int, np.integer)):
        return isinstance(stored, (int, np.integer))
    if isinstance(new, (float, np.floating)):
        return isinstance(stored, (int, float, np.number))
    if isinstance(new, np.ndarray):
        return isinstance(stored, np.ndarray) and (stored.dtype, stored.ndim) == (new.dtype, new.ndim)
    if isinstance(new, tuple):
        return isinstance(stored, tuple) and len(stored) == len(new)
    return isinstance(stored, Mapping if isinstance(new, Mapping) else type(new))
