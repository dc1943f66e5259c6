"""RankProcess: the process of one rank as rank 0 sees it: orders, reports, output, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import cloudpickle

import penstock.core.errors as errors
from penstock.core.machine import oom_kills
from penstock.processes.child import REAP_S
from penstock.processes.descriptors import read_all, write_all
from penstock.processes.killing import MARK, kill_group, kill_marked, new_mark
from penstock.processes.python import ONE_THREAD, child_environment, module_command

_MODULE = "penstock.run.gang.rank"
_TAIL_BYTES = 2_000
_MOST_BYTES = 1 << 20
_STACKS_S = 1.0


class RankProcess:
    """A process of its own group, which ends with this one, however that ends.

    Args:
        boot: what its command line says besides descriptors. payload: what it unpickles.
        shared: descriptors that it inherits. alive: the end of a pipe that keeps it alive; see `processes.tie`.
        progress: [size] int64 in memory that all share: of each rank the number of its last collective.
    """

    def __init__(
        self, rank: int, boot: dict[str, Any], payload: Any, shared: list[int], alive: int, progress: Any
    ) -> None:
        self.rank, self.said_ready, self._progress = rank, False, progress
        self.report: dict[str, Any] | None = None
        self._mark, self._status = new_mark(), None
        self._output = os.memfd_create("penstock-said", os.MFD_CLOEXEC)
        mail = os.memfd_create("penstock-mail", os.MFD_CLOEXEC)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)  # a report is one message
        self._oom_before = oom_kills()
        try:
            data, path = pickled(payload), json.dumps(sys.path).encode()
            write_all(mail, len(path).to_bytes(8, "little") + path + data)
            fds = [alive, mail, theirs.fileno(), *shared]
            told = {**boot, "rank": rank, "alive": alive, "learner_pid": os.getpid(), "mail": mail, "link": fds[2]}
            self.process = subprocess.Popen(
                module_command("penstock.processes.tie", _MODULE, json.dumps(told)),
                pass_fds=fds,
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**child_environment(), **ONE_THREAD, MARK: os.environ.get(MARK, "") + self._mark},
            )
        except OSError as error:
            raise errors.ConfigError(
                f"rank {rank} cannot be started: {error.strerror or error}; use a smaller run.learners"
            ) from error
        finally:
            theirs.close()
            os.close(mail)
        self._pidfd = os.pidfd_open(self.process.pid)
        self._link.setblocking(False)

    def order(self, order: dict[str, Any]) -> None:
        """Sends an order; one that has ended gets none."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(ConnectionError):
            self._link.send(json.dumps(order).encode())

    def listen(self) -> None:
        """Takes in what it has reported."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self._link.recv(_MOST_BYTES):
                told = json.loads(data)
                self.said_ready = self.said_ready or "ready" in told
                self.report = told if "error" in told else self.report

    @property
    def exited(self) -> bool:
        """True if it has ended, and all that it reported was taken in."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        ended = bool(poll.poll(0))
        self.listen()
        return ended

    def register(self, poll: select.poll) -> None:
        """Has `poll` watch for reports and the end."""
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._link, select.POLLIN)

    @property
    def label(self) -> str:
        """Its number and process."""
        return f"rank {self.rank} (pid {self.process.pid})"

    def is_behind(self, number: int) -> bool:
        """True if it has not come to the collective of this number."""
        return int(self._progress[self.rank]) < number

    def stacks(self) -> str:
        """The stacks of a process that hangs, from its fault handler."""
        before = os.fstat(self._output).st_size
        os.kill(self.process.pid, signal.SIGUSR2)
        until, size = time.monotonic() + _STACKS_S, -1
        while time.monotonic() < until and size != os.fstat(self._output).st_size:
            size = os.fstat(self._output).st_size
            time.sleep(0.1)
        found = read_all(self._output, _TAIL_BYTES, before).decode(errors="replace").strip()
        return found or "it does not say where: it is stopped, or waits in the kernel"

    def ending(self) -> str:
        """How it ended, with the end of its output."""
        status = self._reaped()
        if status < 0:
            lacked = status == -signal.SIGKILL and oom_kills() > self._oom_before
            how = "was killed for want of memory" if lacked else f"was killed by {_name(-status)}"
        else:
            how = f"ended with exit code {status}"
        size = os.fstat(self._output).st_size
        said = read_all(self._output, _TAIL_BYTES, max(size - _TAIL_BYTES, 0)).decode(errors="replace").strip()
        return f"{self.label} {how}" + (f"; the end of its output:\n{said}" if said else "")

    def end(self, grace_s: float) -> None:
        """Waits so long for its end, then kills it with all that it started. A second call does nothing."""
        if self._pidfd < 0:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(int(grace_s * 1e3))
        kill_group(self.process.pid)
        kill_marked(self._mark)
        self._reaped()
        os.close(self._pidfd)
        os.close(self._output)
        self._link.close()
        self._pidfd = -1

    def _reaped(self) -> int:
        try:
            return self.process.wait(timeout=REAP_S)
        except subprocess.TimeoutExpired:  # it waits in the kernel, as for a device or a network disk
            return -signal.SIGKILL


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def pickled(payload: Any) -> bytes:
    """What another rank unpickles. Raises ConfigError if it cannot travel."""
    try:
        return cloudpickle.dumps(payload)
    except Exception as error:
        raise errors.ConfigError(
            f"the experiment cannot be sent to the processes of run.learners: {type(error).__name__}: {error}; make "
            "files, locks, sockets and the like inside the environment's factory"
        ) from error
