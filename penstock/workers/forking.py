"""The learner's side of the process that workers are forked of: starts it, asks for workers, and has them reaped."""

from __future__ import annotations

import atexit
import errno
import functools
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
from typing import Any, NamedTuple

from penstock.workers.descriptors import write_all
from penstock.workers.killing import MARK, kill_group, new_mark
from penstock.workers.messages import Boot
from penstock.workers.python import module_command

ACTING = ("penstock.workers.env_worker", "penstock.samplers.actor", "penstock.agents.actor_critic")
"""What workers that act import, once for all of them; none of it starts a thread."""
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
        self._own_end: int | None = None
        """Of a process that was started ahead, which has a pipe of its own: the end that only the learner holds."""
        self.usable = True
        """False where threads run after the imports: a fork has only one of them, and the locks of all."""

    def fork(self, module: str, boot: Boot, environment: dict[str, str]) -> ForkedProcess | None:
        """A new worker that runs `module`; None if this process cannot be forked and says so.

        Raises:
            OSError: the system grants no process, or the server answers no more, or has died twice.
        """
        try:
            return self._forked(module, boot, environment)
        except OSError as error:
            if error.errno not in (errno.ECHILD, errno.EPIPE, errno.ECONNRESET):
                raise
        self.close()  # it died with a worker, or a moment later: once more, of another one
        return self._forked(module, boot, environment)

    def _forked(self, module: str, boot: Boot, environment: dict[str, str]) -> ForkedProcess | None:
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
        if self._own_end is not None:
            os.close(self._own_end)
            self._own_end = None

    def forget(self) -> None:
        """Lets go of the process in a fork of this one."""
        if self._link is not None:
            self._link.close()
        if self._own_end is not None:
            os.close(self._own_end)

    def _up(self, environment: dict[str, str]) -> bool:
        """Starts the process if there is none; True if it can be forked."""
        if self.process is not None and self.process.poll() is not None:
            self.close()
        if self.process is None and self.usable:
            self._start(environment)
        return self.usable

    def _start(self, environment: dict[str, str]) -> None:
        found = _taken(self._modules, environment)
        if found is None:
            marks = os.environ.get(MARK, "") + self._mark + SERVER
            self.process, self._link = started(self._alive, self._modules, {**environment, MARK: marks})
        else:
            self.process, self._link, self._own_end = found.process, found.link, found.end
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


class Ahead(NamedTuple):
    """A process that nobody has asked for a worker yet."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    end: int
    modules: list[str]
    environment: dict[str, str]


waiting: list[Ahead] = []
"""The one that waits, if any."""


def start_ahead(modules: Sequence[str], environment: dict[str, str]) -> None:
    """Starts the process that workers are going to be forked of, so that it imports torch while this one does.

    The first `ForkServer` of the same modules and environment variables takes it; `end_ahead` ends one that nobody
    took.
    """
    if waiting or not modules or sys.platform != "linux":
        return
    _watch_exit_and_forks()
    marked = {**environment, MARK: os.environ.get(MARK, "") + new_mark() + SERVER}
    alive, end = os.pipe2(os.O_CLOEXEC)
    try:
        process, link = started(alive, list(modules), marked)
    except OSError:  # whoever needs the process will try again, and say what is wrong
        os.close(end)
    else:
        waiting.append(Ahead(process, link, end, list(modules), marked))
    finally:
        os.close(alive)


def end_ahead() -> None:
    """Ends the process that was started ahead, unless it has been taken."""
    while waiting:
        one = waiting.pop()
        one.link.close()
        kill_group(one.process.pid)
        one.process.wait(timeout=_ANSWER_S)
        os.close(one.end)


def _taken(modules: list[str], environment: dict[str, str]) -> Ahead | None:
    """The process that was started ahead, if it suits workers of this environment; one that does not is ended."""
    if waiting:
        one = waiting[-1]
        others = {**one.environment, MARK: environment[MARK]}
        alike = len(one.environment[MARK]) == len(environment[MARK]) and others == environment
        if alike and one.modules == modules and one.process.poll() is None:
            return waiting.pop()
        end_ahead()
    return None


def started(
    alive: int, modules: list[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new process that begins to import, and the socket to talk with it."""
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    boot = {"alive": alive, "learner_pid": os.getpid(), "link": theirs.fileno(), "modules": modules}
    try:
        with theirs:
            process = subprocess.Popen(
                module_command("penstock.workers.tie", "penstock.workers.fork_server", json.dumps(boot)),
                pass_fds=[alive, theirs.fileno()],
                process_group=0,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
    except OSError:
        link.close()
        raise
    return process, link


@functools.cache
def _watch_exit_and_forks() -> None:
    def forget() -> None:
        while waiting:
            one = waiting.pop()
            one.link.close()
            os.close(one.end)

    os.register_at_fork(after_in_child=forget)
    atexit.register(end_ahead)
