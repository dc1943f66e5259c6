"""The parent's side of the process that children are forked of: starts it, asks for children, and has them reaped."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.processes.child import Child, descriptors_of
from penstock.processes.descriptors import write_all
from penstock.processes.killing import MARK, new_mark
from penstock.processes.tether import Tether

SERVER = "server."
"""End of the mark of the process that workers are forked of: as long as that of a worker, which takes its place."""
_ANSWER_S = 60.0
"""Longest wait for an answer of a process that has imported all."""


class ForkedProcess:
    """A process that is a child of the fork server; used as `subprocess.Popen` is."""

    def __init__(self, server: ForkServer, pid: int, args: Sequence[str]) -> None:
        self._server, self.pid, self.args = server, pid, list(args)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
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
                if not poll.poll(None if timeout is None else timeout * 1e3):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            finally:
                os.close(fd)
            self.returncode = self._server.reap(self.pid)
        return self.returncode


class ForkServer:
    """Starts children by forks of a process that has imported `modules`, once one is asked for.

    Args:
        mark: with which those of its children begin.
        modules: to import before the first fork; none of them may start a thread.
        start_timeout_s: longest wait for these imports; an answer afterwards takes a minute at most.
    """

    def __init__(self, mark: str, modules: Sequence[str], start_timeout_s: float) -> None:
        self._mark, self._modules = mark, list(modules)
        self._limit_s = start_timeout_s
        self._up: Importing | None = None
        self.usable = True
        """False where threads run after the imports: a fork has only one of them, and the locks of all."""

    @property
    def process(self) -> Child | None:
        """The process, if there is one."""
        return None if self._up is None else self._up.child

    def fork(self, module: str, boot: dict[str, Any], environment: dict[str, str]) -> ForkedProcess | None:
        """A new child that runs `module`; None if this process cannot be forked and says so.

        Raises:
            OSError: the system grants no process. ChildProcessError, ConnectionError: the server has died.
            TimeoutError: it does not answer.
        """
        try:
            return self._forked(module, boot, environment)
        except (ChildProcessError, ConnectionError):
            self.close()  # the next child is forked of another one
            raise

    def _forked(self, module: str, boot: dict[str, Any], environment: dict[str, str]) -> ForkedProcess | None:
        if not self._started(environment):
            return None
        fds = descriptors_of(boot)
        request = {"module": module, "boot": boot, "fds": fds, "environment": environment}
        said = os.memfd_create("penstock-fork", os.MFD_CLOEXEC)
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            write_all(said, json.dumps(request).encode())
            answer = self._ask({"reap": 0}, [said, 1, 2, here, *fds])
        finally:
            os.close(said)
            os.close(here)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return ForkedProcess(self, answer["pid"], [module])

    def reap(self, pid: int) -> int:
        """The exit status of a child that has ended, as of `Popen.returncode`; -SIGKILL if the server has died."""
        try:
            return self._ask({"reap": pid}, [])["status"]
        except OSError:
            return -signal.SIGKILL

    def close(self) -> None:
        """Ends the process; every child must have ended."""
        if self._up is not None:
            self._up.tether.close()
            self._up = None

    def _started(self, environment: dict[str, str]) -> bool:
        """Starts the process if there is none; True if it can be forked."""
        if self._up is not None and self._up.child.exited:
            self.close()
        if self._up is None and self.usable:
            self._up = _taken(self._modules, environment) or Importing(self._modules, environment, self._mark)
            threads = self._answer(self._limit_s)["threads"]
            if threads > 1:
                self.usable = False
                self.close()
                warnings.warn(
                    f"each worker imports torch for itself, which takes longer and more memory: {threads} threads run "
                    f"in a process that has only imported {', '.join(self._modules)}, and a fork would have one of "
                    "them; see what starts threads at import, such as a sitecustomize module or a profiler",
                    stacklevel=2,
                )
        return self.usable

    def _ask(self, request: dict[str, int], fds: list[int]) -> dict[str, Any]:
        if self._up is None:
            raise ChildProcessError(errno.ECHILD, "the process that workers are forked of has ended")
        socket.send_fds(self._up.link, [json.dumps(request).encode()], fds)
        return self._answer(min(self._limit_s, _ANSWER_S))

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._up is not None
        poll = select.poll()
        poll.register(self._up.link, select.POLLIN)
        if not poll.poll(limit_s * 1e3):
            self.close()
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"the process that workers are forked of has not answered for {limit_s:g} s (start_timeout_s)",
            )
        data = self._up.link.recv(4096)
        if not data:
            self._up.child.wait(_ANSWER_S)
            how = self._up.child.death().text
            self.close()
            raise ChildProcessError(errno.ECHILD, f"the process that workers are forked of {how}")
        return json.loads(data)


class Importing:
    """A process that imports modules, to be forked; it dies with this one by a tether of its own."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], mark: str) -> None:
        self.modules = list(modules)
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        children: list[Child] = []
        self.tether = Tether(self, _end, children, self.link)
        try:
            with theirs:
                self.child = Child(
                    "penstock.processes.fork_server",
                    "the process that workers are forked of",
                    self.tether,
                    {"link": theirs.fileno()},
                    {"modules": self.modules},
                    environment=environment,
                    mark=mark + SERVER,
                    cure="use fewer workers, or SerialSampler",
                )
        except BaseException:
            self.tether.close()
            raise
        children.append(self.child)


def _end(children: list[Child], link: socket.socket) -> None:
    link.close()
    for child in children:
        child.kill()
        child.close()


waiting: list[Importing] = []
"""The process that was started ahead and that nobody has asked for a child yet, if any."""


def start_ahead(modules: Sequence[str], environment: dict[str, str]) -> None:
    """Starts the process that workers are going to be forked of, so that it imports torch while this one does.

    The first `ForkServer` of the same modules and environment variables takes it; `end_ahead` ends one that nobody
    took.
    """
    if waiting or not modules or sys.platform != "linux":
        return
    with contextlib.suppress(ConfigError):  # whoever needs the process will try again, and say what is wrong
        waiting.append(Importing(modules, environment, new_mark()))


def end_ahead() -> None:
    """Ends the process that was started ahead, unless it has been taken."""
    while waiting:
        waiting.pop().tether.close()


def _taken(modules: list[str], environment: dict[str, str]) -> Importing | None:
    """The process that was started ahead, if it suits children of this environment; one that does not is ended."""
    if waiting and waiting[-1].tether.holds:
        own = waiting[-1].child.environment
        alike = len(own[MARK]) == len(environment[MARK]) and {**own, MARK: environment[MARK]} == environment
        if alike and waiting[-1].modules == modules and not waiting[-1].child.exited:
            return waiting.pop()
    end_ahead()
    return None
