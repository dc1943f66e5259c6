"""The parent's side of the process that children are forked of: starts it, asks for children, and has them reaped."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.processes.child import Child, descriptors_of
from penstock.processes.descriptors import write_all
from penstock.processes.termination import MARK, new_mark
from penstock.processes.tether import Tether

SERVER = "server."
"""End of the mark of the process that workers are forked of: as long as that of a worker, which takes its place."""
_ANSWER_S = 60.0
"""Longest wait for an answer of a process that has imported all."""


class ForkedProcess:
    """A process that is a child of the one that it was forked of; used as `subprocess.Popen` is."""

    def __init__(self, parent: Importing, pid: int, args: Sequence[str], limit_s: float) -> None:
        self._parent, self.pid, self.args, self._limit_s = parent, pid, list(args), limit_s
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Has it reaped once it has ended, and returns its exit status; -SIGKILL if its parent is dead, and so is it.

        Only its own parent can reap it, which is not asked twice: a later one has no such child, or another's.
        """
        if self.returncode is None:
            try:
                limit_s = self._limit_s if timeout is None else min(timeout, self._limit_s)
                self.returncode = int(self._parent.ask({"reap": self.pid}, [], limit_s)["status"])
            except OSError:
                self.returncode = -signal.SIGKILL
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

    def fork(self, module: str, spawn_args: dict[str, Any], environment: dict[str, str]) -> ForkedProcess | None:
        """A new child that runs `module`; None if this process cannot be forked and says so.

        Raises:
            OSError: the system grants no process. ChildProcessError, ConnectionError: the server has died.
            TimeoutError: it does not answer.
        """
        up = self._started(environment)
        if up is None:
            return None
        fds, limit_s = descriptors_of(spawn_args), min(self._limit_s, _ANSWER_S)
        request = {"module": module, "spawn_args": spawn_args, "fds": fds, "environment": environment}
        said = os.memfd_create("penstock-fork", os.MFD_CLOEXEC)
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            write_all(said, json.dumps(request).encode())
            answer = up.ask({"reap": 0}, [said, 1, 2, here, *fds], limit_s)
        finally:
            os.close(said)
            os.close(here)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return ForkedProcess(up, answer["pid"], [module], limit_s)

    def close(self) -> None:
        """Ends the process; every child must have ended."""
        if self._up is not None:
            self._up.tether.close()
            self._up = None

    def _started(self, environment: dict[str, str]) -> Importing | None:
        """The process, which is started if there is none; None if it cannot be forked."""
        if self._up is not None and (not self._up.tether.holds or self._up.child.exited):
            self.close()  # the next child is forked of another one
        if self._up is None and self.usable:
            self._up = _taken(self._modules, environment) or Importing(self._modules, environment, self._mark)
            threads = self._up.answer(self._limit_s)["threads"]
            if threads > 1:
                self.usable = False
                self.close()
                warnings.warn(
                    f"each worker imports torch for itself, which takes longer and more memory: {threads} threads run "
                    f"in a process that has only imported {', '.join(self._modules)}, and a fork would have one of "
                    "them; see what starts threads at import, such as a sitecustomize module or a profiler",
                    stacklevel=2,
                )
        return self._up


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

    def ask(self, request: dict[str, int], fds: list[int], limit_s: float) -> dict[str, Any]:
        """The answer to a request, see `penstock.processes.fork_server`.

        Raises:
            ChildProcessError, ConnectionError: the process has died. TimeoutError: it did not answer, and is killed.
        """
        if not self.tether.holds:
            raise ChildProcessError(errno.ECHILD, "the process that workers are forked of has ended")
        try:
            socket.send_fds(self.link, [json.dumps(request).encode()], fds)
        except BaseException:
            self.tether.close()
            raise
        return self.answer(limit_s)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next answer; without one, also after Ctrl-C, the process ends: what came late would be the next one's."""
        try:
            poll = select.poll()
            poll.register(self.link, select.POLLIN)
            if not poll.poll(limit_s * 1e3):
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"the process that workers are forked of has not answered for {limit_s:g} s (start_timeout_s)",
                )
            data = self.link.recv(4096)
            if not data:
                self.child.wait(_ANSWER_S)
                how = self.child.death().text
                raise ChildProcessError(errno.ECHILD, f"the process that workers are forked of {how}")
            return json.loads(data)
        except BaseException:
            self.tether.close()
            raise


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
    with contextlib.suppress(ConfigError):  # the caller that needs the process tries again, and reports the error
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
