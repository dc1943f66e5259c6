"""Stacks of a process that hangs, which its fault handler writes into a file when SIGUSR2 asks for them."""

from __future__ import annotations

import os
import signal
import time

_MOST_BYTES = 1 << 16
_LOOK_S = 0.05


def stacks_of(pid: int, path: str, limit_s: float = 2.0) -> str:
    """The stacks of a process of this machine; "" if it has ended, or does not come to write them in time.

    One that has no handler yet is not asked: the signal would end it.

    Args:
        path: of the file that its fault handler writes to.
    """
    try:
        if not _handles(pid, signal.SIGUSR2):
            return ""
        start = size = os.stat(path).st_size
        os.kill(pid, signal.SIGUSR2)
    except (FileNotFoundError, ProcessLookupError):  # its parent, a fork server, has died or reaped it meanwhile
        return ""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        time.sleep(_LOOK_S)  # a fault handler wakes nobody
        before, size = size, os.stat(path).st_size
        if size > start and size == before:
            break
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(_MOST_BYTES).decode(errors="replace").strip()


def _handles(pid: int, number: int) -> bool:
    """True if the process has a handler for the signal."""
    with open(f"/proc/{pid}/status") as file:
        mask = next(line for line in file if line.startswith("SigCgt:")).split()[1]
    return bool(int(mask, 16) >> (number - 1) & 1)
