"""Reads replay ahead in another thread, and waits for the result with a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from penstock.core.errors import LearnerError

S = TypeVar("S")
READ_TIMEOUT_S = 300.0


class PendingRead(Generic[S]):
    """A call of `read` that has begun in a thread.

    Args:
        what: names the read in messages.
    """

    def __init__(self, read: Callable[[], S], what: str) -> None:
        self._what = what
        self._future: Future[S] = Future()

        def work() -> None:
            try:
                self._future.set_result(read())
            except BaseException as error:  # raised where the result is asked for
                self._future.set_exception(error)

        # Unlike an executor's thread, a daemon does not keep the process alive if the disk stops answering.
        threading.Thread(target=work, name="replay", daemon=True).start()

    def result(self) -> S:
        """The result of `read`, or the error that it raised. Raises LearnerError if it takes longer than the limit."""
        if not self.settle():
            raise LearnerError(
                f"{self._what} was not read within {READ_TIMEOUT_S:g} s; resume from the last checkpoint, with "
                "replay.dir on a disk that answers"
            )
        return self._future.result(0)

    def settle(self) -> bool:
        """Waits until the read has ended, whether or not it failed; False if the limit passed before."""
        return bool(wait([self._future], READ_TIMEOUT_S).done)
