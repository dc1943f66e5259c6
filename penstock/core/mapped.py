"""How arrays that are larger than memory are copied: a stretch at a time, and mapped pages are given back."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
CHUNK_BYTES = 1 << 24


def stretches(x: Array) -> Iterator[slice]:
    """Slices of x's rows of about 16 MB each, in order; of at least one row."""
    rows = max(1, CHUNK_BYTES // max(x.nbytes // max(len(x), 1), 1))
    for start in range(0, len(x), rows):
        yield slice(start, min(start + rows, len(x)))


def copy_rows(target: Array, source: Array) -> None:
    """Copies source into target, of equal shape; neither of them has to fit into memory if it is a mapped file."""
    for at in stretches(source):
        target[at] = source[at]
        release(source)
        release(target)


def release(x: Array) -> None:
    """Gives back the memory that pages of a mapped file take in this process; they are read again when they are used.

    Nothing is lost: what was written to them is the kernel's to write. An array in memory stays as it is.
    """
    owner: Any = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    # Only of a shared mapping of a file: private or anonymous memory would be lost.
    shared = isinstance(owner, mmap.mmap) and isinstance(x, np.memmap) and x.mode in ("r", "r+", "w+")
    if shared and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)
