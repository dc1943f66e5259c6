"""Arrays of any size in .npy files, written and read without a second copy in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.files import HashedFile, open_stored
from penstock.core.memmap import chunks, map_npy, mapping, releaser

Array = npt.NDArray[Any]
_HEADER_BYTES = 4096
"""The data begins on a page, so that a file system that can share blocks between files may do so."""


def write_array(file: HashedFile, x: Array) -> None:
    """Appends an array in numpy's .npy format (version 1.0); the kernel copies one that lies in a mapped file."""
    _write_header(file, x.dtype, x.shape)
    source = _source(x)
    if source is not None:
        file.write_from(*source, x.nbytes)
        return
    forget = releaser(x)
    for at in chunks(x) if x.nbytes else ():
        file.write(np.ascontiguousarray(x[at]).reshape(-1).view(np.uint8).data)
        forget()


def write_bytes(file: HashedFile, parts: Iterable[bytes | memoryview], size: int) -> None:
    """Appends bytes, `size` in all, as an array of uint8."""
    _write_header(file, np.dtype(np.uint8), (size,))
    for part in parts:
        file.write(part)


def map_array(path: Path) -> Array:
    """The array in a .npy file, memory-mapped. Raises ValueError or OSError if the file holds none."""
    with open_stored(path, path.parent) as file:
        return map_npy(file)


def _write_header(file: HashedFile, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    text = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    start = np.lib.format.magic(1, 0)
    room = _HEADER_BYTES - len(start) - 2
    file.write(start + room.to_bytes(2, "little") + f"{text:<{room - 1}}\n".encode("latin1"))


def _source(x: Array) -> tuple[int, int] | None:
    """Descriptor of the file that x is mapped from, and the offset of x in it; None if there is none.

    Python keeps a descriptor for each mapping and does not show it. Names would not do: the file may have none.
    """
    if not (isinstance(x, np.ndarray) and x.flags.c_contiguous and x.nbytes and hasattr(os, "copy_file_range")):
        return None  # an array whose slices are fetched from elsewhere is no ndarray
    found = mapping(x)
    if found is None or not found.shared:
        return None
    for entry in os.scandir("/proc/self/fd"):
        try:
            same = os.readlink(entry.path) == found.name and os.fstat(int(entry.name)).st_ino == found.inode
        except OSError:  # the scan's own
            continue
        if same:
            return int(entry.name), found.offset + x.ctypes.data - found.start
    return None
