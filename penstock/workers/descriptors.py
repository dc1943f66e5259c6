"""File descriptors of worker processes: room for them, none of them a standard stream, and whole reads and writes."""

from __future__ import annotations

import importlib
import os
from typing import Any

from penstock.core.errors import ConfigError

resource: Any = importlib.import_module("resource") if os.name == "posix" else None
"""Windows has no such module, and no worker processes."""

_EACH, _SHARED = 5, 32
"""Descriptors of each worker (bell, mail, report, crash, process), and those of all with some to spare."""
_MOST_AT_ONCE = 1 << 30
"""Bytes; Linux reads and writes less than 2 GiB in one call."""


def hold_standard_streams() -> None:
    """Opens /dev/null in the place of a standard stream that is closed: a worker's descriptors must not go there."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one


def require_room(workers: int) -> None:
    """Raises ConfigError if this process may not open the descriptors that so many workers need."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(os.listdir("/proc/self/fd"))
    needed = _EACH * workers + _SHARED
    if limit == resource.RLIM_INFINITY or is_open + needed <= limit:
        return
    fits = (limit - is_open - _SHARED) // _EACH
    fewer = f"use workers<={fits}" if fits > 0 else "use SerialSampler"
    at_most = "" if hard == resource.RLIM_INFINITY else f"; {hard} is the most that it may set"
    raise ConfigError(
        f"workers={workers} need {needed} file descriptors beside the {is_open} that are open, and this process may "
        f"have {limit} (ulimit -n); raise that to {is_open + needed} or more (ulimit -n 4096{at_most}), or {fewer}"
    )


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
