"""LocalProcess: the process of one runner as its owner sees it: calls on their way, answers, output and death."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import penstock.actors.note as note
from penstock.actors.backend import RunnerError, RunnerStatus, cannot_travel
from penstock.actors.link import Argument, DescriptorPlace, LentDescriptor, SharedBytes, receive, send
from penstock.processes.child import Child
from penstock.processes.death import Death
from penstock.processes.serialization import ship
from penstock.processes.tether import Tether

_MODULE = "penstock.actors.runner_process"


class Call:
    """A call that was sent: its answer, or its error, once there is one."""

    def __init__(self, process: LocalProcess, method: str) -> None:
        self.process, self.method = process, method
        self.answer: bytes | mmap.mmap | None = None
        self.error: RunnerError | None = None

    @property
    def ended(self) -> bool:
        """True once there is an answer or an error."""
        return self.answer is not None or self.error is not None


class _Letter(NamedTuple):
    """A packet on its way, and what its descriptors belong to."""

    number: int
    body: bytes
    fds: list[int]
    lent: list[Argument]
    """Holds the descriptors open until the packet is sent."""


class LocalProcess:
    """A process that makes `cls(*args)` and carries calls out; it dies with this one by the tether.

    Raises:
        ConfigError: the arguments cannot be sent, or the system does not start it.
    """

    def __init__(self, name: str, cls: type, args: Sequence[Any], tether: Tether) -> None:
        self.name = name
        self._calls: deque[Call] = deque()
        """Those that have not ended, in the order in which they were sent, which is that of the answers."""
        self._outbox: deque[_Letter] = deque()
        self._sent, self._hung_up = 0, False
        self.gone: RunnerError | None = None
        first = self._letter((cls, tuple(args)), f"{name}: {cls.__name__}()", args, path=True)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._note_fd, words = note.opened()
        self._note: note.Words | None = words
        """None once the process is gone."""
        try:
            with theirs:
                named = {"link": theirs.fileno(), "note": self._note_fd}
                self._child = Child(_MODULE, name, tether, named, {}, output="kept", cure="use fewer runners")
        except BaseException:
            self._link.close()
            os.close(self._note_fd)
            raise
        self._post(first)

    def call(self, method: str, args: Sequence[Any]) -> Call:
        """Sends a call; it has ended at once where the process is gone."""
        call = Call(self, method)
        if self.gone is not None:
            call.error = self.gone
            return call
        letter = self._letter((method, args), f"{self.name}.{method}()", args)
        self._calls.append(call)
        self._post(letter)
        return call

    def register(self, poll: select.poll) -> None:
        """Has `poll` watch for what `progress` can do."""
        if not self._hung_up:
            poll.register(self._link, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        self._child.register(poll)

    def look(self, stacks: bool) -> RunnerStatus:
        """Its note, and with `stacks` where its threads are now; nothing of a process that is gone."""
        if self._note is None:
            return RunnerStatus()
        return RunnerStatus(self._note.tolist(), self._child.stacks() if stacks else "")

    def progress(self) -> None:
        """Sends what waits, takes in the answers that are there, and notices the end of the process."""
        if self.gone is not None:
            return
        ended = self._child.exited  # asked before the last answers are read
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._flush()
        try:
            while not self._hung_up and (packet := receive(self._link)) is not None:
                self._calls.popleft().answer = packet.body
                for fd in packet.fds:
                    os.close(fd)
            self._hung_up = True  # it is about to end; its exit code tells how
        except BlockingIOError:
            pass
        except ConnectionError:
            self._hung_up = True
        if ended:
            self._end(None)
        else:
            self._child.trim()

    def kill(self) -> None:
        """Ends the process, and all that it started, at once."""
        if self.gone is None:
            self._end(RunnerError("exit", f"{self.name} was killed by its owner"))

    def _letter(
        self, message: tuple[Any, Sequence[Any]], what: str, args: Sequence[Any], path: bool = False
    ) -> _Letter:
        """A packet with a class or method and its arguments, of which some are descriptors beside it."""
        lent: list[Argument] = [x for x in args if isinstance(x, (SharedBytes, LentDescriptor))]
        places = iter([DescriptorPlace(i, isinstance(x, LentDescriptor)) for i, x in enumerate(lent)])
        sent = [next(places) if isinstance(x, (SharedBytes, LentDescriptor)) else x for x in args]
        body = ship((message[0], sent), *cannot_travel(what), path=path)
        self._sent += 1
        return _Letter(self._sent, body, [x.fd for x in lent], lent)

    def _post(self, letter: _Letter) -> None:
        self._outbox.append(letter)
        with contextlib.suppress(BlockingIOError, ConnectionError):  # `progress` goes on, or tells of the death
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            letter = self._outbox[0]
            send(self._link, letter.number, letter.body, letter.fds)
            self._outbox.popleft()

    def _end(self, error: RunnerError | None) -> None:
        """Reaps the process, and ends every call that waits for it."""
        death = self._child.death()
        self.gone = error or _lost(self.name, death)
        for call in self._calls:
            call.error = self.gone
        self._calls.clear()
        self._outbox.clear()
        self._link.close()
        self._child.close()
        os.close(self._note_fd)
        self._note = None  # with the memory that it lies in


def _lost(name: str, death: Death) -> RunnerError:
    cure = "; use fewer runners or slots, or a machine with more memory" if death.kind == "oom" else ""
    return RunnerError(death.kind, f"{name} {death.text}{cure}", death.said)
