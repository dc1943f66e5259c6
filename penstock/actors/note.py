"""The note of a runner: a number that its own code sets while a call is under way, and its owner reads meanwhile.

Learners note the number of each collective that they enter, as one that hangs in its midst answers no call.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

Number = np.ndarray[Any, np.dtype[np.int64]]
"""[1] int64, in memory that owner and runner share where the runner is a process of this machine."""

_own: Number = np.zeros(1, np.int64)


def opened() -> tuple[int, Number]:
    """A new note: its descriptor, and the number behind it."""
    fd = os.memfd_create("penstock-note", os.MFD_CLOEXEC)
    os.ftruncate(fd, _own.nbytes)
    return fd, _number(fd)


def take(fd: int) -> None:
    """Has `write` of this process write into the note of this descriptor, which is closed."""
    global _own
    _own = _number(fd)
    os.close(fd)


def write(number: int) -> None:
    """Notes a number."""
    _own[0] = number


def read() -> int:
    """The number that this process noted last."""
    return int(_own[0])


def _number(fd: int) -> Number:
    return np.frombuffer(mmap.mmap(fd, _own.nbytes), np.int64)
