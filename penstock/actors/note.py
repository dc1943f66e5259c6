"""The note of a runner: words that its code sets during a call, and its owner reads meanwhile.

Learners note in the first word the number of each collective that they enter, as one that hangs in a collective answers
no call. The other words are free: samplers keep the activity of their environments there.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

WORDS = 4096
"""Length of a note; pages that nobody writes take no memory."""
Words = np.ndarray[Any, np.dtype[np.int64]]
"""[WORDS] int64, in memory that owner and runner share where the runner is a process of this machine."""

_own: Words = np.zeros(WORDS, np.int64)
_watched = False


def opened() -> tuple[int, Words]:
    """A new note: its descriptor, and the words behind it."""
    fd = os.memfd_create("penstock-note", os.MFD_CLOEXEC)
    os.ftruncate(fd, WORDS * 8)
    return fd, _words(fd)


def take(fd: int) -> None:
    """Has `write` of this process write into the note of this descriptor, which is closed."""
    global _own, _watched
    _own, _watched = _words(fd), True
    os.close(fd)


def write(number: int) -> None:
    """Notes a number in the first word."""
    _own[0] = number


def watched() -> Words | None:
    """The note of this process if another one reads it, else None."""
    return _own if _watched else None


def words() -> list[int]:
    """The words of this process's note."""
    return _own.tolist()


def _words(fd: int) -> Words:
    return np.frombuffer(mmap.mmap(fd, WORDS * 8), np.int64)
