"""Signals and broken output: handlers and streams that a long command installs for as long as it lasts."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any


def ending_signals() -> list[int]:
    """The signals that end a run tidily: Ctrl-C, SIGTERM, and a hang-up unless nohup had it ignored."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)
    return [*numbers, hang_up] if hang_up is not None and signal.getsignal(hang_up) == signal.SIG_DFL else [*numbers]


@contextlib.contextmanager
def handling(numbers: Iterable[int], note: Callable[[int], None]) -> Generator[None]:
    """Calls `note` with each of these signals inside the block; outside the main thread they are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, frame: note(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_of(number: int) -> None:
    """Ends this process by a signal, as if no handler had been there."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def tell(fd: int, text: str) -> None:
    """Writes past the streams, as a signal handler must, and past a pipe whose reader the same Ctrl-C has ended."""
    with contextlib.suppress(OSError):
        os.write(fd, text.encode())


class UnfailingStream:
    """A text stream that drops what cannot be written: a full disk or a closed pipe ends no run.

    Everything but `write` and `flush` is the stream's own.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        """Why something was dropped, unless nobody wanted it: the reader of a pipe may leave when it pleases."""

    def write(self, text: str) -> int:
        """Writes what can be written; returns the length of the text."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._empty(error)
        return len(text)

    def flush(self) -> None:
        """Flushes what can be flushed."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._empty(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _empty(self, error: OSError | ValueError) -> None:
        """Empties the stream's buffer into nothing: Python would flush it at exit, fail, and exit with 120."""
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            self.lost = self.lost or error
        with contextlib.suppress(OSError, ValueError):
            fd = self._stream.fileno()
            kept, nothing = os.dup(fd), os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nothing, fd)
                self._stream.flush()
            finally:
                os.dup2(kept, fd)
                os.close(kept)
                os.close(nothing)


@contextlib.contextmanager
def unfailing_output() -> Generator[UnfailingStream | None]:
    """Inside the block stdout, which it gives, and stderr are `UnfailingStream`; None if there is no stdout."""
    before = sys.stdout, sys.stderr
    streams = [None if stream is None else UnfailingStream(stream) for stream in before]
    sys.stdout, sys.stderr = streams  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield streams[0]
    finally:
        for stream in streams:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def open_standard_files() -> None:
    """Opens /dev/null for standard files that were closed, or the next file would take their number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is fd
