"""Records timed spans of the learner and the processes it starts, while a trace is active.

The learner makes a folder and names it in the environment, so that the processes that it starts, and those that they
start, find it. Each process keeps its spans in a ring, a file in that folder. Times are nanoseconds of the monotonic
clock, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError

KINDS = 8
STEP, ACT, WAIT, LEARN, SERVE, SEND, SERVER_WAIT, SAMPLE = range(KINDS)
"""Kinds of span. SERVE to SERVER_WAIT are an action server's, which may share a process with the learner; SAMPLE is a
whole fragment of a runner that notes nothing itself."""
VARIABLE = "PENSTOCK_TRACE"
"""Environment variable with the folder of the rings."""
CAPACITY = 1 << 16
"""Spans that a ring holds (1.5 MB); the oldest give way."""

_COUNT, _CLOSED, _HEAD = 0, 1, 8
_SHORTEST_NS = 1_000
_BEYOND_PIDS = 1 << 22  # the kernel's largest
_SPAN = 3
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Ring:
    """Spans (start, stop, kind) of one process in a file that another one reads."""

    def __init__(self, path: Path) -> None:
        size = 8 * (_HEAD + _SPAN * CAPACITY)
        with path.open("xb+") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._memory).cast("q")

    def add(self, kind: int, started: int, stopped: int = 0) -> None:
        """Notes a span from `started` until `stopped`, or now."""
        words, now = self._words, stopped or time.perf_counter_ns()
        if words[_CLOSED] or now - started < _SHORTEST_NS:
            return
        n = words[_COUNT]
        at = _HEAD + _SPAN * (n % CAPACITY)
        words[at], words[at + 1], words[at + 2] = started, now, kind
        words[_COUNT] = n + 1


ring: Ring | None = None
"""The ring of this process while a trace is active, else None."""


def enter(name: str) -> None:
    """Makes the ring of this process if the process that started it is being traced."""
    global ring
    folder = os.environ.get(VARIABLE)
    if folder and os.path.isdir(folder):
        ring = Ring(Path(folder) / f"{os.getpid()}.{name}")


def of_another(name: str, number: int) -> Ring | None:
    """A ring of this process for spans that another one reports, while a trace is active; else None.

    Args:
        number: of the process among those with a ring, for it may be on another machine.
    """
    return None if ring is None else Ring(Path(os.environ[VARIABLE]) / f"{_BEYOND_PIDS + number}.{name}")


def timed(kind: int, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`; while a trace is active, a wrapper that notes each call as a span."""
    mine = ring
    if mine is None:
        return function

    def noted(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        started = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            mine.add(kind, started)

    return noted


@dataclass(frozen=True)
class Track:
    """The spans of one process."""

    name: str
    pid: int
    spans: npt.NDArray[np.int64]
    """[n, 3] start, stop (ns of the monotonic clock) and kind, in the order in which they ended."""
    lost: int = 0
    """Older spans that the ring had no room for."""


class Trace:
    """A trace of this process and of those started from now on; one at a time.

    Raises:
        ConfigError: another trace is active.
    """

    def __init__(self) -> None:
        if VARIABLE in os.environ:
            raise ConfigError("a trace is going on already; close its Trainer first")
        self._folder: Any = tempfile.TemporaryDirectory(prefix="penstock-trace-")
        os.environ[VARIABLE] = self._folder.name
        self.since = 0
        enter("learner")

    def open(self) -> None:
        """Forgets earlier spans: only those from now on count."""
        self.since = time.perf_counter_ns()

    def close(self) -> list[Track]:
        """Ends the trace; returns the spans of each process that has any, the learner first; on a second call []."""
        global ring
        if self._folder is None:
            return []
        until = time.perf_counter_ns()
        os.environ.pop(VARIABLE, None)
        ring = None
        paths = sorted(Path(self._folder.name).iterdir(), key=lambda path: int(path.name.partition(".")[0]))
        tracks = [_read(path, self.since, until) for path in paths]
        self._folder.cleanup()
        self._folder = None
        tracks.sort(key=lambda track: (track.name != "learner", track.name))
        return [track for track in tracks if len(track.spans)]


def _read(path: Path, since: int, until: int) -> Track:
    """The spans in a window of time; the process is told to note no more."""
    with path.open("rb+") as file:
        words = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
    words[_CLOSED] = 1
    count = int(words[_COUNT])
    spans = words[_HEAD:].reshape(CAPACITY, _SPAN).copy()
    if count > CAPACITY:
        spans = np.roll(spans, -(count % CAPACITY), axis=0)
    spans = spans[: min(count, CAPACITY)]
    start, stop = spans[:, 0], spans[:, 1]
    # A span may be half written as we read: then it does not lie where it should.
    kept = spans[(start >= since) & (stop >= start) & (stop <= until) & (spans[:, 2] < KINDS)]
    pid, _, name = path.name.partition(".")
    lost = count - CAPACITY if count > CAPACITY and start.min(initial=until) > since else 0
    return Track(name, int(pid), kept, max(lost, 0))
