"""WorkerProcess: the descriptors of one worker, and the processes that follow each other in its place."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle

import penstock.core.errors as errors
from penstock.core.machine import oom_kills
from penstock.core.wire import decode
from penstock.workers.control import Bell
from penstock.workers.descriptors import read_all, write_all
from penstock.workers.forking import ForkedProcess, ForkServer
from penstock.workers.killing import MARK, kill_group, kill_marked, new_mark
from penstock.workers.messages import Boot, Start
from penstock.workers.python import module_command

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment variables of a process whose libraries use one thread."""
REAP_S = 60.0
"""Longest wait for a process that was killed, which on a busy machine comes late to its end."""
_LIMITS = {
    errno.EAGAIN: ": this user may have no more processes and threads (ulimit -u, or the container's limit of pids); "
    "raise that",
    errno.EMFILE: ": this process may open no more files (ulimit -n); raise that",
    errno.ENFILE: ": the system may open no more files (fs.file-max)",
    errno.ENOMEM: ": there is too little memory",
}
_STACKS_S = 2.0
"""Longest wait for the stacks of a process that hangs."""


class WorkerProcess:
    """The learner's side of one worker; processes may follow each other in its place."""

    def __init__(self, index: int, mark: str | None = None) -> None:
        self.index = index
        self.mark = f"{mark or new_mark()}{index:06d}."
        """Borne by the process and all that it starts; opens with the mark of its supervisor, as long as `SERVER`."""
        self.bell, self.mail = Bell(), os.memfd_create("penstock-mail", os.MFD_CLOEXEC)
        self.report, self.crash = (
            os.memfd_create(name, os.MFD_CLOEXEC) for name in ("penstock-report", "penstock-crash")
        )
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.pidfd = -1
        self.up = False
        """True between the answer to the first message and the end of the process."""
        self.start_at: float | None = None
        """When a replacement is due to be started."""
        self.oom_before = 0
        self.token, self.moved_at = b"", 0.0

    def close(self) -> None:
        """Closes the descriptors."""
        self.bell.close()
        for fd in (self.mail, self.report, self.crash):
            os.close(fd)
        self.release()

    def launch(self, module: str, boot: Boot, start: Start, forks: ForkServer | None = None) -> None:
        """Starts a process in a group of its own, and clears the descriptors of what earlier ones left.

        Args:
            forks: process to fork it of, where that is possible; None: a fresh interpreter.
        """
        self.bell.drain()
        for fd in (self.report, self.crash):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        self.write(start)
        self.start_at, self.oom_before = None, oom_kills()
        self.token, self.moved_at = b"", time.monotonic()
        marks = os.environ.get(MARK, "") + self.mark
        environment = {**environment_of_workers(), MARK: marks}
        try:
            self.process = (forks and forks.fork(module, boot, environment)) or subprocess.Popen(
                module_command("penstock.workers.tie", module, json.dumps(asdict(boot))),
                pass_fds=boot.fds(),
                process_group=0,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            raise errors.ConfigError(
                f"worker {self.index} of {boot.workers} cannot be started: {error.strerror or error}"
                f"{_LIMITS.get(error.errno or 0, '')}; use fewer workers, or SerialSampler"
            ) from error
        self.release()
        self.pidfd = os.pidfd_open(self.process.pid)

    def write(self, message: Any) -> None:
        """Puts a message, or a list of them, where the process reads it once it is told to."""
        data = pickled(message)
        os.ftruncate(self.mail, 0)
        # The import path comes first, in plain text: unpickling needs it.
        path = json.dumps(sys.path).encode() if isinstance(message, Start) else b""
        write_all(self.mail, len(data).to_bytes(8, "little") + len(path).to_bytes(8, "little") + path + data)

    def read_report(self) -> Any:
        """The last report of the process, {"answer": ...} or {"error": ...}; None if there is none, or no whole one."""
        head = os.pread(self.report, 8, 0)
        size = int.from_bytes(head, "little")
        data = read_all(self.report, size, 8) if len(head) == 8 else b""
        return decode(data) if data and len(data) == size else None

    def ask_where_it_is(self) -> None:
        """Has the fault handler of a process that hangs write its stacks into `crash`, and waits a while for them."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGUSR2)
        deadline, before = time.monotonic() + _STACKS_S, 0
        while not self.exited and time.monotonic() < deadline:
            time.sleep(0.05)
            size = os.fstat(self.crash).st_size
            if size and size == before:
                return
            before = size

    def kill(self) -> int:
        """Kills the process and all that its environments started, reaps it, and returns its exit status."""
        assert self.process is not None
        if self.process.returncode is not None:  # reaped: the number may be another's by now
            return self.process.returncode
        kill_group(self.process.pid)  # also what its environments left behind
        kill_marked(self.mark)
        try:
            return self.process.wait(timeout=REAP_S)
        except subprocess.TimeoutExpired:
            warnings.warn(
                f"worker {self.index}, pid {self.process.pid}, was killed and has not ended within {REAP_S:.0f} s: it "
                "waits in the kernel, as for a device or a network disk; it is left behind",
                stacklevel=2,
            )
            return -signal.SIGKILL

    @property
    def exited(self) -> bool:
        """True if the process has ended; it is not reaped yet, so its number cannot be another's."""
        if self.pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def release(self) -> None:
        """Forgets a process that is over."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def environment_of_children() -> dict[str, str]:
    """The environment variables of this process, by which a child finds the penstock that runs here."""
    parent = str(Path(errors.__file__).parent.parent.parent)
    path = os.pathsep.join([parent, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def environment_of_workers() -> dict[str, str]:
    """The environment variables of a worker process, but for its mark."""
    return {**environment_of_children(), **ONE_THREAD}


def pickled(message: Any) -> bytes:
    """The message as bytes for a worker. Raises ConfigError that names the part that cannot be pickled."""
    try:
        return cloudpickle.dumps(message)
    except Exception as error:
        raise errors.ConfigError(
            f"the environment, its arguments or the agent cannot be sent to a worker process: {type(error).__name__}: "
            f"{error}; make files, locks, sockets and the like inside the factory, or use SerialSampler"
        ) from error


def require_linux() -> None:
    """Raises ConfigError where worker processes cannot work."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and hasattr(os, "eventfd")):
        raise errors.ConfigError(
            f"worker processes need Linux 5.3 or newer; this is {sys.platform}: use SerialSampler, which works "
            "everywhere"
        )
