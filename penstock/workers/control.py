"""Counters in shared memory by which learner and workers hand over rows, and events to sleep by.

Each counter has one writer. A waiter looks at the counters for a short while, since a look costs 0.3 us and a
wake-up 30; then it says that it sleeps, looks once more, and polls its event. Where processes outnumber cores it yields
its core between looks, so that the one it waits for can run there. A writer moves its counter first, and
sets the event if the other one sleeps. Between saying and looking each side passes a fence: without one, both could
look before the other's store is visible, and an event would be missed. Nobody holds a lock that another needs: a
process that dies leaves counters that stand still.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import threading
import time
from collections.abc import Callable

MAX_GROUPS = 8
_LINE = 8
"""Words of a cache line: the learner's words and a worker's never share one."""

# The learner writes these words of a worker's block ...
COMMAND = 0
"""Counts commands; the words that follow describe the last one."""
CODE, POOL, BUFFER, ITR, MODE, T = 1, 2, 3, 4, 5, 6
SENT = _LINE
"""SENT + g: rows of the current batch that group g may step."""
# ... and the worker these.
DONE_COMMAND = 2 * _LINE
SLEEPS = 2 * _LINE + 1
ROWS = 2 * _LINE + 2
"""Rows of the batch that are whole, where the worker runs the loop itself; -1 before row 0 is."""
BUSY_NS = 2 * _LINE + 3
"""Nanoseconds spent stepping."""
ACTIVITY = 3 * _LINE
"""Six words that `SerialPool` keeps: see its `activity`."""
ACTIVITY_WORDS = 6
DONE = 4 * _LINE
"""DONE + g: rows of the current batch that group g has stepped."""
WORDS = 5 * _LINE

BIND, COLLECT, MAIL, QUIT = 1, 2, 3, 4
"""Command codes."""

_WORD = 8
_fence = threading.Lock()


def fence() -> None:
    """Orders this process's stores before its next loads: taking a lock is a full barrier."""
    with _fence:
        pass


class Control:
    """The blocks of all workers, and one of the learner, in one shared page or two."""

    def __init__(self, fd: int, workers: int) -> None:
        size = (workers + 1) * WORDS * _WORD
        if os.fstat(fd).st_size < size:
            os.posix_fallocate(fd, 0, size)
        self._memory = mmap.mmap(fd, size)
        words = memoryview(self._memory).cast("q")
        self.blocks = [words[w * WORDS : (w + 1) * WORDS] for w in range(workers)]
        self.learner = words[workers * WORDS :]
        """Word 0: the learner sleeps."""


SPIN_S = 300e-6
"""Seconds for which waiters poll counters."""
_FADES = 0.996
"""Share of the usual wait that remains after each wait that slept: after long ones, a waiter that yields tries again in
1 of 30, since a yield to another user's process lasts milliseconds."""


class Spin:
    """Polls counters before sleeping: for `limit_s` if recent waits were shorter than that, else for an eighth of it.

    Args:
        limit_s: 0 for a single look.
        yields: the core is given to others between looks. After long waits it sleeps at once, and tries now and then.
    """

    def __init__(self, limit_s: float, yields: bool = False) -> None:
        self.limit_s, self.yields = limit_s, yields
        self._usual_s = 0.0

    def until(self, ready: Callable[[], bool]) -> bool:
        """True as soon as `ready()`; False once looking any longer is not worth it."""
        if ready():
            return True
        if not self.limit_s:
            return False
        if self.yields and self._usual_s >= self.limit_s:
            self._usual_s *= _FADES
            return False
        started = time.perf_counter()
        limit = self.limit_s if self._usual_s < self.limit_s else self.limit_s / 8
        found = False
        while not found and time.perf_counter() - started < limit:
            if self.yields:
                os.sched_yield()
                found = ready()
                continue
            found = ready() or ready() or ready() or ready() or ready() or ready() or ready() or ready()
        waited = time.perf_counter() - started if found else 2 * self.limit_s
        self._usual_s += 0.125 * (waited - self._usual_s)
        return found


class Event:
    """An eventfd that wakes the process that polls it."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Clears the event without blocking."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def sleep_on(event: Event, block: memoryview, word: int, ready: Callable[[], bool], timeout_s: float) -> None:
    """Sleeps until the event is set or time is up, unless `ready()` by now; says so in `block[word]` meanwhile."""
    block[word] = 1
    fence()
    if not ready():
        poll = select.poll()
        poll.register(event.fd, select.POLLIN)
        poll.poll(timeout_s * 1e3)
    block[word] = 0
    event.clear()


def outnumbered(processes: int) -> bool:
    """True where `processes` that compute leave no core free for a waiter."""
    return len(os.sched_getaffinity(0)) < processes
