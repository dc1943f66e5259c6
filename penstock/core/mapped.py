"""How arrays that are larger than memory are copied: a stretch at a time, and mapped pages are given back."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_CHUNK_BYTES = 1 << 24


class Mapping(NamedTuple):
    """The part of this process's memory that an array lies in, as the kernel tells it."""

    start: int
    """Address of its first byte."""
    shared: bool
    """What is written goes to the file, so no page is lost if it is given back."""
    offset: int
    """Of its first byte in the file."""
    inode: int
    name: str
    """The file's, as `/proc/self/fd` gives it as well; it may be another's by now."""


def stretches(x: Array) -> Iterator[slice]:
    """Slices of x's rows of about 16 MB each, in order; of at least one row."""
    rows = max(1, _CHUNK_BYTES // max(x.nbytes // max(len(x), 1), 1))
    for start in range(0, len(x), rows):
        yield slice(start, min(start + rows, len(x)))


def copy_rows(target: Array, source: Array) -> None:
    """Copies source into target, of equal shape; neither of them has to fit into memory if it is a mapped file."""
    forget = releaser(source), releaser(target)
    for at in stretches(source):
        target[at] = source[at]
        for each in forget:
            each()


def releaser(x: Array) -> Callable[[], None]:
    """What gives back the memory that pages of x take in this process, if x is a mapped file; else it does nothing.

    The pages are read again when they are used, and what was written to them is the kernel's to write.
    """
    owner: Any = x
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        found = mapping(x)
        if found is not None and found.shared:  # of a private one, what was written would be lost
            return lambda: owner.madvise(mmap.MADV_DONTNEED)
    return lambda: None


def mapping(x: Array) -> Mapping | None:
    """Where x begins; None where the kernel does not tell, or if no file is mapped there."""
    address = x.ctypes.data
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                span, access, offset, _, inode, *name = line.rstrip("\n").split(maxsplit=5)
                low, high = (int(part, 16) for part in span.split("-"))
                if low <= address < high:
                    return Mapping(low, access[3] == "s", int(offset, 16), int(inode), name[0]) if name else None
    except (OSError, ValueError):
        return None
    return None
