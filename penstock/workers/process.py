"""WorkerProcess: the descriptors of one worker, and its process, which may be replaced."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from penstock.core.wire import decode
from penstock.processes.child import Child
from penstock.processes.descriptors import read_all, write_all
from penstock.processes.fork_client import ForkServer
from penstock.processes.serialization import CURE, ship
from penstock.processes.tether import Tether
from penstock.workers.control import Event
from penstock.workers.messages import WorkerSettings

DESCRIPTORS = 5
"""Descriptors of one worker: event, mailbox and report, and the crash report and end of its process."""


@dataclass(frozen=True)
class StartArguments:
    """Common start arguments of a set of workers: the module they run, tether, mark and descriptors."""

    module: str
    workers: int
    tether: Tether
    mark: str
    descriptors: dict[str, Any]
    forks: ForkServer | None


class WorkerProcess:
    """The learner's side of one worker; its process may be replaced."""

    def __init__(self, index: int, arguments: StartArguments) -> None:
        self.index, self._arguments = index, arguments
        self.event = Event()
        self.mailbox, self.report = (os.memfd_create(f"penstock-{x}", os.MFD_CLOEXEC) for x in ("mailbox", "report"))
        self.child: Child | None = None
        self.started, self.up = False, False
        """`started` once a process was there. `up` between the answer to the first message and its end."""
        self.start_at: float | None = None
        """When a replacement is due to be started."""
        self.token, self.moved_at = b"", 0.0

    def close(self) -> None:
        """Ends the process, and closes the descriptors."""
        self.release()
        self.event.close()
        for fd in (self.mailbox, self.report):
            os.close(fd)

    def launch(self, start: WorkerSettings) -> None:
        """Starts a process, and clears the descriptors of what earlier ones left.

        Raises:
            ConfigError: the system does not start it. ChildProcessError, ConnectionError, TimeoutError: the process
                that it was to be forked of has died or hangs.
        """
        self.release()
        self.event.clear()
        os.ftruncate(self.report, 0)
        os.lseek(self.report, 0, os.SEEK_SET)
        self.write(start, path=True)
        self.start_at, self.started = None, True
        self.token, self.moved_at = b"", time.monotonic()
        arguments, own = self._arguments, {"event": self.event.fd, "mailbox": self.mailbox, "report": self.report}
        self.child = Child(
            arguments.module,
            f"worker {self.index} of {arguments.workers}",
            arguments.tether,
            {**arguments.descriptors, **own},
            {"index": self.index, "workers": arguments.workers},
            mark=f"{arguments.mark}{self.index:06d}.",
            forks=arguments.forks,
            cure="use fewer workers, or SerialSampler",
        )

    def write(self, message: Any, *, path: bool = False) -> None:
        """Puts a message, or a list of them, where the process reads it once it is told to."""
        data = packed(message, path=path)
        os.ftruncate(self.mailbox, 0)
        write_all(self.mailbox, data)

    def read_report(self) -> Any:
        """The last report of the process, {"answer": ...} or {"error": ...}; None if there is none, or no whole one."""
        head = os.pread(self.report, 8, 0)
        size = int.from_bytes(head, "little")
        data = read_all(self.report, size, 8) if len(head) == 8 else b""
        return decode(data) if data and len(data) == size else None

    @property
    def exited(self) -> bool:
        """True if there is no process, or it has ended."""
        return self.child is None or self.child.exited

    def release(self) -> None:
        """Ends the process, if there is one, with all that its environments started, and forgets it."""
        if self.child is not None:
            self.child.kill()
            self.child.close()
            self.child = None


def packed(message: Any, *, path: bool = False) -> bytes:
    """The message as bytes for a worker. Raises ConfigError that names the part that cannot be pickled."""
    what = "the environment, its arguments or the agent cannot be sent to a worker process"
    return ship(message, what, f"{CURE}, or use SerialSampler", path=path)
