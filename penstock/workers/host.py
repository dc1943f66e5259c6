"""The worker's side of a worker process: set-up, death with its parent, and answers to messages.

Messages come in a memfd from its own parent, the only thing that penstock ever unpickles; answers are read as plain
data.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import random
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core import trace
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, NativeEnvError
from penstock.core.wire import encode
from penstock.workers import control
from penstock.workers.control import Bell, Control, Spin, fence, sleep_on
from penstock.workers.messages import Boot, Start

_F_SETSIG = 10
_LOOK_AROUND_S = 2.0
"""Seconds between checks that the parent lives, in case the pipe fails."""


def initialize_worker(boot: Boot, cpus: Sequence[int], seed: int) -> None:
    """Sets up a process that dies with its learner, ignores Ctrl-C, and uses one thread on its own CPUs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    crash = open(boot.crash, "wb", buffering=0, closefd=False)  # noqa: SIM115
    faulthandler.enable(crash, all_threads=True)
    faulthandler.register(signal.SIGUSR2, crash, all_threads=True)
    die_with_the_learner(boot.alive, boot.learner_pid)
    if cpus:
        os.sched_setaffinity(0, cpus)
    # For environments that draw from global generators: streams of their own, though not those of other layouts.
    random.seed(seed * 1_000_003 + boot.index)
    np.random.seed((seed * 1_000_003 + boot.index) % 2**32)


def die_with_the_learner(alive: int, learner_pid: int) -> None:
    """Has the kernel kill this process group as soon as nobody holds the other end of the pipe `alive`.

    The pipe is opened anew: signal settings belong to the open file, and a shared one would serve one worker only.
    """
    fd = os.open(f"/proc/self/fd/{alive}", os.O_RDONLY | os.O_NONBLOCK)
    os.close(alive)
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is always reported
    if poll.poll(0) or os.getppid() != learner_pid:
        os.killpg(0, signal.SIGKILL)


def run_process(kind: type[Host]) -> None:
    """Sets the process up and serves; an error is reported as text before the process ends.

    Its one argument is a `Boot` as JSON.
    """
    fields: dict[str, Any] = json.loads(sys.argv[1])
    fields["slabs"] = tuple(fields["slabs"])
    boot = Boot(**fields)
    try:
        start: Start = _read_mail(boot.mail)
        initialize_worker(boot, start.cpus, start.seed)
        trace.enter(f"{kind.title} {boot.index}")
        host = kind(boot, start)
        host.answer([host.read(message) for message in start.messages])
        host.serve()
    except BaseException as error:
        os.pwrite(boot.report, _pack({"error": describe(error)}), 0)
        os._exit(1)


def describe(error: BaseException) -> dict[str, str]:
    """The kind of fault and its text; `EnvWorkerError` and its like bring their traceback along."""
    if isinstance(error, NativeEnvError):
        return {"kind": "native", "text": str(error)}
    if isinstance(error, ConfigError):
        return {"kind": "config", "text": str(error)}
    if isinstance(error, EnvContractError):
        return {"kind": "contract", "text": str(error)}
    if isinstance(error, EnvWorkerError):
        return {"kind": "exception", "text": str(error)}
    text = "".join(traceback.format_exception(error))
    return {"kind": "exception", "text": f"{type(error).__name__}: {error}\n{text}"}


class Host:
    """The common part of worker processes: block, bells, messages and answers."""

    title = "sampler"
    """Its name in a trace."""

    def __init__(self, boot: Boot, start: Start) -> None:
        self.boot = boot
        shared = Control(boot.control, boot.workers)
        self.blocks, self.block, self.learner = shared.blocks, shared.blocks[boot.index], shared.learner
        self.bell, self.learner_bell = Bell(boot.bell), Bell(boot.learner_bell)
        self.spin = Spin(start.spin_s)

    def serve(self) -> None:
        """Serves until told to quit."""
        raise NotImplementedError

    def sleep_until(self, called: Callable[[], bool]) -> None:
        """Looks for a while, then sleeps, until `called()`; a process whose parent is gone ends itself."""
        if not self.spin.until(called):
            while not called():
                sleep_on(self.bell, self.block, control.SLEEPS, called, _LOOK_AROUND_S)
                if os.getppid() != self.boot.learner_pid:
                    os.killpg(0, signal.SIGKILL)

    def read(self, message: Any) -> Any:
        """Executes one message; returns its answer, which `penstock.core.wire` can send."""
        raise NotImplementedError

    def mail(self) -> list[Any]:
        """Returns the messages that wait."""
        return _read_mail(self.boot.mail)

    def answer(self, value: Any) -> None:
        """Answers messages with a list, one item for each."""
        data = _pack({"answer": value})
        os.ftruncate(self.boot.report, 0)
        os.pwrite(self.boot.report, data, 0)
        self.done()

    def done(self) -> None:
        """Says that the command is done."""
        self.block[control.DONE_COMMAND] = self.block[control.COMMAND]
        fence()
        if self.learner[0]:
            self.learner_bell.ring()


def _pack(value: Any) -> bytes:
    data = encode(value)
    return len(data).to_bytes(8, "little") + data


def _read_mail(fd: int) -> Any:
    import cloudpickle

    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    path_size = int.from_bytes(os.pread(fd, 8, 8), "little")
    if path_size:
        sys.path[:] = json.loads(os.pread(fd, path_size, 16))
    return cloudpickle.loads(os.pread(fd, size, 16 + path_size))
