"""InProcess: runners are objects of this process, so that a debugger steps from the group into them."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import penstock.actors.note as note
from penstock.actors.backend import ROOM, RunnerError, RunnerStatus
from penstock.actors.handle import Handle
from penstock.core.errors import words_of


class LocalHandle(Handle):
    """A runner of this process.

    Args:
        local: the object itself; None once it is gone.
        gone: the error of every call, where the constructor raised or the runner is gone.
    """

    def __init__(self, name: str, send: Any, local: Any, gone: RunnerError | None) -> None:
        super().__init__(name, send)
        self.local, self.gone = local, gone


@dataclass(frozen=True, eq=False)
class FinishedCall:
    """A call that was carried out: its result, or its error."""

    value: Any = None
    error: RunnerError | None = None


class InProcess:
    """Backend that carries out calls when they are sent, one after the other.

    A runner that hangs hangs the sender, and one that crashes takes it along; its other errors are those of the other
    backends. Arguments and results are handed over as they are, without a copy.
    """

    name = "in-process"

    def __init__(self) -> None:
        self._runners: list[LocalHandle] = []

    def require_room(self, runners: int, words: tuple[str, str] = ROOM) -> None:
        """Does nothing: there is no limit but memory."""

    def crowded(self) -> str:
        """Returns "": no runner waits for its place."""
        return ""

    def start(self, cls: type, args: Sequence[Any], name: str, **how: Any) -> LocalHandle:
        """Makes `cls(*args)` now."""
        made = _carry_out(f"{name}: {cls.__name__}()", cls, *args)
        self._runners.append(handle := LocalHandle(name, self.call, made.value, made.error))
        return handle

    def put(self, parts: Sequence[np.ndarray[Any, Any]]) -> bytes:
        """Returns a copy, one after the other."""
        return b"".join([x.data for x in parts])

    def call(self, runner: LocalHandle, method: str, *args: Any) -> FinishedCall:
        """Carries a call out, and keeps its result or error until it is asked for."""
        if runner.gone is not None:
            return FinishedCall(error=runner.gone)
        try:
            return FinishedCall(getattr(runner.local, method)(*args))
        except (Exception, SystemExit) as error:
            failed = _failed(f"{runner!r}.{method}()", error)
        if failed.kind == "exit":
            self._lose(runner, failed)
        return FinishedCall(error=failed)

    def wait(self, calls: Sequence[FinishedCall], timeout_s: float) -> list[FinishedCall]:
        """Returns all of them."""
        return list(calls)

    def result(self, call: FinishedCall, timeout_s: float) -> Any:
        """Returns the result of a call, or raises its RunnerError, whose cause is the runner's own error."""
        if call.error is not None:
            raise call.error
        return call.value

    def look(self, runner: LocalHandle, stacks: bool = True) -> RunnerStatus:
        """Returns the note of this process and no stacks: a runner that hangs hangs the one who would ask."""
        return RunnerStatus(note.words())

    def kill(self, runner: LocalHandle) -> None:
        """Calls the object's `close`, if it has one, and forgets it."""
        if runner.gone is None:
            self._lose(runner, RunnerError("exit", f"{runner!r} was killed by its owner"))

    def close(self) -> None:
        """Kills every runner."""
        for runner in self._runners:
            self.kill(runner)
        self._runners.clear()

    def _lose(self, runner: LocalHandle, error: RunnerError) -> None:
        local, runner.local, runner.gone = runner.local, None, error
        if hasattr(local, "close"):
            done = _carry_out(f"{runner!r}.close()", local.close)
            if done.error is not None:
                warnings.warn(f"{done.error}; what it holds may be left open", stacklevel=4)


def _carry_out(what: str, function: Any, *args: Any) -> FinishedCall:
    try:
        return FinishedCall(function(*args))
    except (Exception, SystemExit) as error:
        return FinishedCall(error=_failed(what, error))


def _failed(what: str, error: BaseException) -> RunnerError:
    """The error of a call, chained to the exception it raised."""
    kind, verb = ("exit", "ended with") if isinstance(error, SystemExit) else ("exception", "raised")
    found = RunnerError(
        kind, f"{what} {verb} {words_of(error)}", "".join(traceback.format_exception(error)), type(error).__name__
    )
    found.__cause__ = error
    return found
