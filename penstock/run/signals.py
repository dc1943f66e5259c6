"""Signal handlers that a long command installs for as long as it lasts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterable


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
