"""File descriptors that children inherit: none of them a standard stream, and whole reads and writes."""

from __future__ import annotations

import os

from penstock.processes.limits import resource

_MOST_AT_ONCE = 1 << 30
"""Bytes; Linux reads and writes less than 2 GiB in one call."""


def hold_standard_streams() -> None:
    """Opens /dev/null for a standard stream that is closed, so that no child's descriptor takes its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one


def write_all(fd: int, data: bytes, offset: int = 0) -> None:
    """Writes all of `data` into a file at an offset. Raises OSError that says how much there was to write."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done : done + _MOST_AT_ONCE], offset + done)
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            hint = (
                "" if limit == resource.RLIM_INFINITY else f"; files may have {limit:,} bytes (ulimit -f), raise that"
            )
            raise OSError(
                error.errno, f"a message of {len(view):,} bytes to or from a worker: {error.strerror}{hint}"
            ) from None


def read_all(fd: int, size: int, offset: int = 0) -> bytes:
    """Reads `size` bytes of a file from an offset, or as many as there are."""
    parts: list[bytes] = []
    while size:
        part = os.pread(fd, min(size, _MOST_AT_ONCE), offset)
        if not part:
            break
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
