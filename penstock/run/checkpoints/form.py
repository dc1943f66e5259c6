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
    fits = isinstance(stored, _kinds(new)) and (isinstance(new, bool) or not isinstance(stored, bool))
    if fits and isinstance(new, np.ndarray):
        fits = (stored.dtype, stored.ndim) == (new.dtype, new.ndim)
    if not fits or (isinstance(new, tuple) and len(stored) != len(new)):
        raise TypeError(f"{at} is {stored!r:.60} ({type(stored).__name__}); expected the like of {new!r:.60}")
    if isinstance(new, Mapping):
        for key in new.keys() & stored.keys():
            require_form(stored[key], new[key], f"{at}.{key}")
    elif isinstance(new, (list, tuple)) and new:
        for i, part in enumerate(stored):
            require_form(part, new[i] if isinstance(new, tuple) else new[0], f"{at}[{i}]")


def _kinds(new: Any) -> Any:
    """The types that stand for a value: of whole numbers and fractions Python's and numpy's."""
    if isinstance(new, (int, np.integer)):
        return bool if isinstance(new, bool) else (int, np.integer)
    if isinstance(new, (float, np.floating)):
        return (int, float, np.number)
    return Mapping if isinstance(new, Mapping) else type(new)
