"""Files that survive a crash: written whole, forced to disk, renamed into place."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

_CHUNK_BYTES = 1 << 24


class HashedFile:
    """A new file that is hashed as it is written; `close` forces it to disk.

    An error is kept and raised by `close`, not by `write`: torch's zip writer calls `write` from C++ and turns any
    exception there, a full disk or Ctrl-C, into a RuntimeError without the cause.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self._hash = hashlib.sha256()
        self._error: BaseException | None = None
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        """Appends all of `data`, unless an earlier write failed; returns its length either way."""
        view = memoryview(data).cast("B")
        try:
            self._hash.update(view)
            self._size += len(view)
            done = 0
            while done < len(view) and self._error is None:
                done += os.write(self._fd, view[done:])
        except BaseException as error:
            self._error = error
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered here; file-like objects are asked to have it."""

    @property
    def entry(self) -> dict[str, int | str]:
        """`size` and `sha256` of what should be in the file: compare with what is read back."""
        return {"size": self._size, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        """Forces the file to disk. Raises the first error of its life."""
        try:
            if self._error is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
        if self._error is not None:
            raise self._error

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (self._error is not None and isinstance(error, Exception)):
            self.close()
        else:
            os.close(self._fd)


def fsync_dir(path: Path) -> None:
    """Forces the names in a directory to disk; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file by `data`: whoever reads, and whenever we die, the file is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with HashedFile(temporary) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_array(file: HashedFile, x: np.ndarray[Any, Any]) -> None:
    """Appends an array in numpy's .npy format, 16 MB at a time, so that no copy of it is made in memory."""
    header = {"descr": np.lib.format.dtype_to_descr(x.dtype), "fortran_order": False, "shape": x.shape}
    start = io.BytesIO()
    np.lib.format.write_array_header_1_0(start, header)
    file.write(start.getvalue())
    rows = max(1, _CHUNK_BYTES // max(x.nbytes // max(len(x), 1), 1))
    for i in range(0, len(x), rows):
        file.write(memoryview(np.ascontiguousarray(x[i : i + rows])).cast("B"))
