"""Processes: runners are processes of this machine, without Ray; they die with this process, however it ends."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.actors.backend import ROOM, RunnerError, RunnerStatus
from penstock.actors.handle import Handle
from penstock.actors.link import SharedBytes
from penstock.actors.local_process import Call, LocalProcess
from penstock.core.wire import decode
from penstock.processes.descriptors import hold_standard_streams
from penstock.processes.limits import require_linux, require_room
from penstock.processes.tether import Tether

DESCRIPTORS = 5
"""File descriptors of one runner: link, note, output, crash report and end of its process."""
INLINE_BYTES = 64 << 10
"""Largest `put` that is sent inside each call; a larger one goes to memory shared by all runners."""

_LOOK_S = 0.5
"""Longest wait between two looks at how much the runners have said, which is kept in memory until then."""


class Processes:
    """Backend with single-threaded processes as runners, which Ctrl-C does not reach.

    Calls travel pickled from here to them; answers come back as plain data, which is never unpickled: nested dicts,
    lists, tuples, numbers, text, bytes, None and arrays of numbers. What runners print is kept from the terminal; its
    end is shown when one dies.
    """

    name = "processes"

    def __init__(self) -> None:
        require_linux()
        hold_standard_streams()
        self._processes: dict[Handle, LocalProcess] = {}
        self._tether = Tether(self, _end, self._processes)

    def require_room(self, runners: int, words: tuple[str, str] = ROOM) -> None:
        """Raises ConfigError if this process may not open the descriptors of this many runners."""
        require_room(runners, words[0], DESCRIPTORS, "use the in-process backend")

    def crowded(self) -> str:
        """Returns "": no runner waits for its place."""
        return ""

    def start(self, cls: type, args: Sequence[Any], name: str, **how: Any) -> Handle:
        """Starts a process; its import of penstock and of the class goes on meanwhile."""
        handle = Handle(name, self.call)
        self._processes[handle] = LocalProcess(name, cls, args, self._tether)
        return handle

    def put(self, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
        """Returns bytes, or a memory file that every runner maps and that is freed after the last call with it."""
        return b"".join([x.data for x in parts]) if sum(x.nbytes for x in parts) <= INLINE_BYTES else SharedBytes(parts)

    def call(self, runner: Handle, method: str, *args: Any) -> Call:
        """Sends a call, also to a busy runner."""
        return self._processes[runner].call(method, args)

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """Returns the calls that have ended, in the order of `calls`."""
        deadline = time.monotonic() + timeout_s
        while True:
            waiting = {call.process for call in calls if not call.ended}
            for process in waiting:
                process.progress()
            found = [call for call in calls if call.ended]
            left = deadline - time.monotonic()
            if found or not calls or left <= 0:
                return found
            poll = select.poll()
            for process in waiting:
                process.register(poll)
            poll.poll(min(left, _LOOK_S) * 1000 + 1)

    def result(self, call: Call, timeout_s: float) -> Any:
        """Returns the result of a call."""
        name = call.process.name
        if not self.wait([call], timeout_s):
            raise RunnerError("timeout", f"{name}: no result of {call.method}() within {timeout_s:.3g} s")
        if call.answer is None:
            assert call.error is not None
            raise call.error
        found = decode(call.answer)
        if "error" in found:
            error = found["error"]
            kind = error.partition(":")[0].rpartition(".")[2]
            raise RunnerError("exception", f"{name}.{call.method}() raised {error}", found["trace"], kind)
        return found["value"]

    def look(self, runner: Handle, stacks: bool = True) -> RunnerStatus:
        """Returns the words of a process's note, and its stacks from its fault handler."""
        return self._processes[runner].look(stacks)

    def kill(self, runner: Handle) -> None:
        """Ends a process, its process group, and all else that it started."""
        self._processes[runner].kill()

    def close(self) -> None:
        """Kills every runner."""
        self._tether.close()


def _end(processes: dict[Handle, LocalProcess]) -> None:
    for process in processes.values():
        process.kill()
