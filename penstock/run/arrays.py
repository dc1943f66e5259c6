"""How an array of any size becomes a .npy file and is read back, without a second copy of it in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.mapped import release, stretches
from penstock.run.files import HashedFile

Array = npt.NDArray[Any]
_HEADER_BYTES = 4096
"""The data begins on a page, so that a file system that can share blocks between files may do so."""


def write_array(file: HashedFile, x: Array) -> None:
    """Appends an array in numpy's .npy format (version 1.0); one that lies in a mapped file is copied by the kernel."""
    text = repr({"descr": np.lib.format.dtype_to_descr(x.dtype), "fortran_order": False, "shape": x.shape})
    start = np.lib.format.magic(1, 0)
    room = _HEADER_BYTES - len(start) - 2
    file.write(start + room.to_bytes(2, "little") + f"{text:<{room - 1}}\n".encode("latin1"))
    source = _source(x)
    if source is not None:
        fd, offset = source
        try:
            file.write_from(fd, offset, x.nbytes)
        finally:
            os.close(fd)
        return
    for at in stretches(x) if x.nbytes else ():
        file.write(np.ascontiguousarray(x[at]).reshape(-1).view(np.uint8).data)
        release(x)


def map_array(path: Path) -> Array:
    """The array in a .npy file, read as it is used. Raises ValueError or OSError if it is none."""
    empty = path.stat().st_size <= _HEADER_BYTES
    return np.load(path, mmap_mode=None if empty else "r", allow_pickle=False)


def _source(x: Array) -> tuple[int, int] | None:
    """An open descriptor of the file that x is mapped from, and where x begins in it; None if there is none.

    The name that x was mapped by may be another file's by now, so the kernel's own table has the last word.
    """
    if not (isinstance(x, np.memmap) and x.flags.c_contiguous and x.nbytes and hasattr(os, "copy_file_range")):
        return None
    address = x.ctypes.data
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, access, offset, device, inode, *name = line.split(maxsplit=5)
                low, high = (int(part, 16) for part in span.split("-"))
                if low <= address < high:
                    break
            else:
                return None
        if access[3] != "s" or not name:
            return None
        fd = os.open(name[0].rstrip("\n"), os.O_RDONLY)
    except OSError:
        return None
    found = os.fstat(fd)
    seen = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    if (seen, found.st_ino) != (device, int(inode)):
        os.close(fd)
        return None
    return fd, int(offset, 16) + address - low
