"""Arrays larger than memory: mapped from files, their pages dropped after use, or fetched; and copied in chunks."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_CHUNK_BYTES = 1 << 24


class Mapping(NamedTuple):
    """The mapped region of this process's memory in which an array begins."""

    start: int
    """Address of its first byte."""
    shared: bool
    """Writes go to the file, so that a dropped page is not lost."""
    offset: int
    """Offset of that byte in the file."""
    inode: int
    name: str
    """Name of the file, spelled as in `/proc/self/fd`; another file may have it by now."""


class FetchedArray:
    """An array [n, ...] that lies elsewhere: reading a slice of its rows fetches them.

    Args:
        fetch: (start, stop) -> [stop - start, ...] rows of it.
    """

    def __init__(self, fetch: Callable[[int, int], Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._fetch, self.shape, self.dtype = fetch, shape, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        start, stop, _ = rows.indices(len(self))
        return self._fetch(start, stop)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole = np.empty(self.shape, self.dtype)
        for rows in chunks(self) if self.nbytes else ():
            whole[rows] = self[rows]
        return whole if dtype is None else whole.astype(dtype)

    def __deepcopy__(self, memo: Any) -> Array:
        return np.asarray(self)


def map_npy(file: BinaryIO) -> Array:
    """The array in an open .npy file, mapped read-only; the file may be closed then.

    Raises ValueError or OSError if the file holds no array of numbers, or has another size than its header says:
    before anything is allocated.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
        whole = all(isinstance(n, int) and n >= 0 for n in shape)
    except Exception as error:  # a forged header may make numpy's parser raise anything
        raise ValueError(f"its header is no .npy header: {error}") from error
    start, found = file.tell(), os.fstat(file.fileno()).st_size
    if not whole or dtype.kind not in "biufcSU" or found != start + math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"its header says {dtype}{list(shape)}, its size is {found:,} bytes with the header's {start:,}"
        )
    if not math.prod(shape) * dtype.itemsize:
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype, "r", start, shape, "F" if fortran else "C")


def chunks(x: Array | FetchedArray) -> Iterator[slice]:
    """Slices of about 16 MB of x's rows, in order; each of at least one row."""
    rows = max(1, _CHUNK_BYTES // max(x.nbytes // max(len(x), 1), 1))
    for start in range(0, len(x), rows):
        yield slice(start, min(start + rows, len(x)))


def copy_rows(target: Any, source: Array, sent: Callable[[Array], Any] = lambda x: x) -> None:
    """Copies source into target, of equal shape; one that is a mapped file need not fit into memory.

    Args:
        sent: brings rows to where the target is, if that is no numpy array.
    """
    drops = releaser(source), releaser(target)
    for at in chunks(source):
        target[at] = sent(source[at])
        for drop in drops:
            drop()


def releaser(x: Array) -> Callable[[], None]:
    """Returns a function that drops x's resident pages if x is a mapped file, and does nothing otherwise.

    Dropped pages are read again when they are used; the kernel writes changed ones to the file.
    """
    owner: Any = x
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        found = mapping(x)
        if found is not None and found.shared:  # writes to a private mapping would be lost
            return lambda: owner.madvise(mmap.MADV_DONTNEED)
    return lambda: None


def mapping(x: Array) -> Mapping | None:
    """The mapped file in which x begins; None if there is none, or if the kernel does not say."""
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
