"""LocalProcess: the process of one runner as its owner sees it: calls on their way, answers, output and death."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle

from penstock.core.errors import ConfigError
from penstock.core.machine import oom_kills
from penstock.distributed.backends.backend import DeathKind, RunnerError, cannot_travel
from penstock.distributed.backends.link import Place, Shared, receive, send
from penstock.workers.descriptors import read_all
from penstock.workers.killing import MARK, kill_group, kill_marked, new_mark
from penstock.workers.process import ONE_THREAD, REAP_S, environment_of_children
from penstock.workers.python import module_command

_MODULE = "penstock.distributed.backends.runner_process"
_KEPT_BYTES, _TAIL_BYTES = 1 << 20, 2000
"""A runner's output is forgotten when there is more than this; and the part of it that is shown when it dies."""


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
    shared: list[Shared]


class LocalProcess:
    """A process that makes `cls(*args)` and carries calls out.

    Args:
        alive: the end of a pipe that keeps the process alive; see `penstock.workers.tie`.
    """

    def __init__(self, name: str, cls: type, args: Sequence[Any], alive: int) -> None:
        self.name, self._mark = name, new_mark()
        self._calls: deque[Call] = deque()
        """Those that have not ended, in the order in which they were sent, which is that of the answers."""
        self._outbox: deque[_Letter] = deque()
        self._sent, self._hung_up = 0, False
        self.gone: RunnerError | None = None
        path = json.dumps(sys.path).encode()
        first = len(path).to_bytes(8, "little") + path + _pickled((cls, tuple(args)), f"{name}: {cls.__name__}()")
        self._said = os.memfd_create("penstock-said", os.MFD_CLOEXEC)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._oom_before = oom_kills()
        try:
            self._process = self._launch(alive, theirs)
        except OSError as error:
            self._link.close()
            os.close(self._said)
            raise ConfigError(f"{name} cannot be started: {error.strerror or error}; use fewer runners") from error
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._post(_Letter(0, first, []))

    def _launch(self, alive: int, theirs: socket.socket) -> subprocess.Popen[bytes]:
        boot = json.dumps({"alive": alive, "learner_pid": os.getpid(), "link": theirs.fileno()})
        output = os.open(f"/proc/self/fd/{self._said}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            return subprocess.Popen(
                module_command("penstock.workers.tie", _MODULE, boot, self.name),
                pass_fds=[alive, theirs.fileno()],
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment_of_children(), **ONE_THREAD, MARK: os.environ.get(MARK, "") + self._mark},
            )
        finally:
            os.close(output)

    def call(self, method: str, args: Sequence[Any]) -> Call:
        """Sends a call; it has ended at once where the process is gone."""
        call = Call(self, method)
        if self.gone is not None:
            call.error = self.gone
            return call
        shared = [x for x in args if isinstance(x, Shared)]
        places = iter(range(len(shared)))
        sent = [Place(next(places)) if isinstance(x, Shared) else x for x in args]
        body = _pickled((method, sent), f"{self.name}.{method}()")
        self._sent += 1
        self._calls.append(call)
        self._post(_Letter(self._sent, body, shared))
        return call

    def register(self, poll: select.poll) -> None:
        """Has `poll` watch for what `progress` can do."""
        if not self._hung_up:
            poll.register(self._link, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        poll.register(self._pidfd, select.POLLIN)

    def progress(self) -> None:
        """Sends what waits, takes in the answers that are there, and notices the end of the process."""
        if self.gone is not None:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        ended = bool(poll.poll(0))  # asked before the last answers are read
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
        elif os.fstat(self._said).st_size > _KEPT_BYTES:
            os.ftruncate(self._said, 0)

    def kill(self) -> None:
        """Ends the process, and all that it started, at once."""
        if self.gone is None:
            self._end(RunnerError("exit", f"{self.name} was killed by its owner"))

    def _post(self, letter: _Letter) -> None:
        self._outbox.append(letter)
        with contextlib.suppress(BlockingIOError, ConnectionError):  # `progress` goes on, or tells of the death
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            letter = self._outbox[0]
            send(self._link, letter.number, letter.body, [x.fd for x in letter.shared])
            self._outbox.popleft()

    def _end(self, error: RunnerError | None) -> None:
        """Reaps the process, and ends every call that waits for it."""
        if error is not None:
            kill_group(self._process.pid)
        try:
            status = self._process.wait(timeout=REAP_S)
        except subprocess.TimeoutExpired:  # it waits in the kernel, as for a device or a network disk
            status = -signal.SIGKILL
        kill_marked(self._mark)
        self.gone = error or self._death(status)
        for call in self._calls:
            call.error = self.gone
        self._calls.clear()
        self._outbox.clear()
        self._link.close()
        os.close(self._pidfd)
        os.close(self._said)

    def _death(self, status: int) -> RunnerError:
        size = os.fstat(self._said).st_size
        said = read_all(self._said, _TAIL_BYTES, max(size - _TAIL_BYTES, 0)).decode(errors="replace").strip()
        trace = f"The end of its output:\n{said}" if said else ""
        kind: DeathKind = "exit" if status >= 0 else "signal"
        if status == -signal.SIGKILL and oom_kills() > self._oom_before:
            kind = "oom"
        why = {
            "exit": f"ended with exit code {status}",
            "signal": f"was killed by {_signal(-status)}",
            "oom": "was killed for want of memory; use fewer runners or slots, or a machine with more memory",
        }[kind]
        return RunnerError(kind, f"{self.name} {why}", trace)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pickled(message: Any, what: str) -> bytes:
    try:
        return cloudpickle.dumps(message)
    except Exception as error:
        raise cannot_travel(what, f"{type(error).__name__}: {error}") from error
