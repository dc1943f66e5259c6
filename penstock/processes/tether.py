"""Tether: what ties children to this process, so that none of them outlives it, however it ends."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any


class Tether:
    """A pipe with its write end in this process alone; the kernel kills children tied to it once that is closed.

    A fork of this process closes its copy of that end, and never ends the children, which are not its own.

    Args:
        owner: when it is collected, at the end of this process, and at `close`, `end(*args)` is called, and then the
            pipe is closed. Neither `end` nor `args` may refer to it.
    """

    def __init__(self, owner: object, end: Callable[..., None], *args: Any) -> None:
        self.fd, self._held = os.pipe2(os.O_CLOEXEC)
        """`fd` is the read end, which children inherit."""
        self._finalizer = weakref.finalize(owner, _end, end, args, (self.fd, self._held))
        _watch_forks()
        _tethers.add(self)

    @property
    def holds(self) -> bool:
        """True until `close`, and in no fork of this process."""
        return self._finalizer.alive

    def close(self) -> None:
        """Ends the children. A second call does nothing."""
        self._finalizer()

    def forget(self) -> None:
        """Lets go of the children in a fork of this process."""
        if self._finalizer.detach() is not None:
            os.close(self._held)


def _end(end: Callable[..., None], args: tuple[Any, ...], fds: tuple[int, ...]) -> None:
    try:
        end(*args)
    finally:
        for fd in fds:
            os.close(fd)


_tethers: weakref.WeakSet[Tether] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    def forget() -> None:
        for tether in list(_tethers):
            tether.forget()
        _tethers.clear()

    os.register_at_fork(after_in_child=forget)
