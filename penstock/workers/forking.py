"""The learner's side of the process that workers are forked of: starts it, asks for workers, and has them reaped."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.workers.descriptors import write_all
from penstock.workers.killing import MARK, kill_group
from penstock.workers.messages import Boot

SERVER = "server."
"""End of the mark of the process that workers are forked of: as long as that of a worker, which takes its place."""
_ANSWER_S = 60.0
"""Longest wait for an answer of a process that has imported all."""


class ForkedProcess:
    """A worker that is a child of the fork server; used as `subprocess.Popen` is."""

    def __init__(self, server: ForkServer, pid: int, args: Sequence[str]) -> None:
        self._server, self.pid, self.args = server, pid, list(args)
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Waits for its end, has it reaped, and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            try:
                fd = os.pidfd_open(self.pid)
            except ProcessLookupError:  # the server is dead, and so is all that it has forked
                self.returncode = -signal.SIGKILL
                return self.returncode
            try:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                if not poll.poll(timeout * 1e3):
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(fd)
            self.returncode = self._server.reap(self.pid)
        return self.returncode


class ForkServer:
    """Starts workers by forks of a process that has imported `modules`, once one is asked for.

    Args:
        alive: read end of the pipe whose other end only the learner holds. mark: of the supervisor.
        modules: to import before the first fork; none of them may start a thread.
        start_timeout_s: longest wait for these imports, if that is more than a minute.
    """

    def __init__(self, alive: int, mark: str, modules: Sequence[str], start_timeout_s: float) -> None:
        self._alive, self._mark, self._modules = alive, mark, list(modules)
        self._limit_s = max(start_timeout_s, _ANSWER_S)
        self.process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self.usable = True
        """False where threads run after the imports: a fork has only one of them, and the locks of all."""

    def fork(self, module: str, boot: Boot, environment: dict[str, str]) -> ForkedProcess | None:
        """A new worker that runs `module`; None if this process cannot be forked and says so.

        Raises:
            OSError: the system grants no process, or the server has died or answers no more.
        """
        if not self._up(environment):
            return None
        fds = list(dict.fromkeys(boot.fds()))
        request = {"module": module, "boot": asdict(boot), "fds": fds, "environment": environment}
        said = os.memfd_create("penstock-fork", os.MFD_CLOEXEC)
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            write_all(said, json.dumps(request).encode())
            answer = self._ask({"reap": 0}, [said, 1, 2, here, *fds], _ANSWER_S)
        finally:
            os.close(said)
            os.close(here)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return ForkedProcess(self, answer["pid"], [module])

    def reap(self, pid: int) -> int:
        """The exit status of a worker that has ended, as of `Popen.returncode`; -SIGKILL if the server has died."""
        try:
            return self._ask({"reap": pid}, [], _ANSWER_S)["status"]
        except OSError:
            return -signal.SIGKILL

    def close(self) -> None:
        """Ends the process; every worker must have ended."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self.process is not None:
            kill_group(self.process.pid)
            self.process.wait(timeout=_ANSWER_S)
            self.process = None

    def forget(self) -> None:
        """Lets go of the process in a fork of this one."""
        if self._link is not None:
            self._link.close()

    def _up(self, environment: dict[str, str]) -> bool:
        """Starts the process if there is none; True if it can be forked."""
        if self.process is not None and self.process.poll() is not None:
            self.close()
        if self.process is None and self.usable:
            self._start(environment)
        return self.usable

    def _start(self, environment: dict[str, str]) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boot = {"alive": self._alive, "learner_pid": os.getpid(), "link": theirs.fileno(), "modules": self._modules}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.workers.tie", "penstock.workers.fork_server", json.dumps(boot)],
                pass_fds=[self._alive, theirs.fileno()],
                process_group=0,
                stdin=subprocess.DEVNULL,
                env={**environment, MARK: os.environ.get(MARK, "") + self._mark + SERVER},
            )
        threads = self._answer(self._limit_s)["threads"]
        if threads > 1:
            self.usable = False
            self.close()
            warnings.warn(
                f"each worker imports torch for itself, which takes longer and more memory: {threads} threads run in a "
                f"process that has only imported {', '.join(self._modules)}, and a fork would have one of them; see "
                "what starts threads at import, such as a sitecustomize module or a profiler",
                stacklevel=2,
            )

    def _ask(self, request: dict[str, int], fds: list[int], limit_s: float) -> dict[str, Any]:
        if self._link is None:
            raise OSError(errno.ECHILD, "the process that workers are forked of has ended")
        socket.send_fds(self._link, [json.dumps(request).encode()], fds)
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._link is not None
        deadline = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        if not poll.poll((deadline - time.monotonic()) * 1e3):
            self.close()
            raise OSError(errno.ETIMEDOUT, f"the process that workers are forked of has not answered for {limit_s:g} s")
        data = self._link.recv(4096)
        if not data:
            assert self.process is not None
            status = self.process.wait(timeout=_ANSWER_S)
            self.close()
            raise OSError(errno.ECHILD, f"the process that workers are forked of has ended with status {status}")
        return json.loads(data)
