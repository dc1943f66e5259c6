"""The worker's side of a worker process: set-up, and answers to messages.

Messages come in a memfd from its own parent, the only thing that penstock ever unpickles; answers are read as plain
data.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core import trace
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, NativeEnvError, words_of
from penstock.core.wire import encode
from penstock.processes.descriptors import read_all, write_all
from penstock.processes.serialization import unship
from penstock.workers import control
from penstock.workers.control import Control, Event, Spin, fence, sleep_on
from penstock.workers.messages import SpawnArgs, WorkerSettings

_LOOK_AROUND_S = 2.0
"""Seconds between checks that the parent lives, in case the pipe fails."""


def initialize_worker(spawn_args: SpawnArgs, cpus: Sequence[int], seed: int) -> None:
    """Sets up a process that ignores Ctrl-C and uses one thread on its own CPUs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if cpus:
        os.sched_setaffinity(0, cpus)
    # For environments that draw from global generators: streams of their own, though not those of other layouts.
    random.seed(seed * 1_000_003 + spawn_args.index)
    np.random.seed((seed * 1_000_003 + spawn_args.index) % 2**32)


def run_process(kind: type[Host]) -> None:
    """Sets the process up and serves; an error is reported as text before the process ends."""
    spawn_args = SpawnArgs.read(sys.argv[1])
    try:
        start: WorkerSettings = _read_mailbox(spawn_args.mailbox)
        initialize_worker(spawn_args, start.cpus, start.seed)
        trace.enter(f"{kind.title} {spawn_args.index}")
        host = kind(spawn_args, start)
        host.respond(start.messages)
        host.serve()
    except BaseException as error:
        write_all(spawn_args.report, _pack({"error": describe(error)}))
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
        text, cause = str(error), error.__cause__
        text += f"\n{_stack(cause)}" if cause is not None and "Traceback" not in text else ""
        return {"kind": "exception", "text": text}
    return {"kind": "exception", "text": f"{words_of(error)}\n{_stack(error)}"}


def _stack(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class Host:
    """The common part of worker processes: block, events, messages and answers."""

    title = "sampler"
    """Its name in a trace."""

    def __init__(self, spawn_args: SpawnArgs, start: WorkerSettings) -> None:
        self.spawn_args = spawn_args
        shared = Control(spawn_args.control, spawn_args.workers)
        self.blocks, self.block, self.learner = shared.blocks, shared.blocks[spawn_args.index], shared.learner
        self.event, self.learner_event = Event(spawn_args.event), Event(spawn_args.learner_event)
        self.spin = Spin(control.SPIN_S, start.yields)
        self._number = 1  # of the command to start

    def serve(self) -> None:
        """Serves until told to quit."""
        raise NotImplementedError

    def sleep_until(self, called: Callable[[], bool]) -> None:
        """Spins for a while, then sleeps, until `called()`; ends the process if its parent is gone."""
        if not self.spin.until(called):
            while not called():
                sleep_on(self.event, self.block, control.SLEEPS, called, _LOOK_AROUND_S)
                if os.getppid() != self.spawn_args.parent:
                    os.killpg(0, signal.SIGKILL)

    def read(self, message: Any) -> Any:
        """Executes one message; returns its answer, which `penstock.core.wire` can send."""
        raise NotImplementedError

    def mailbox(self) -> list[Any]:
        """Returns the messages that wait."""
        return _read_mailbox(self.spawn_args.mailbox)

    def respond(self, messages: Sequence[Any]) -> None:
        """Executes messages and answers with a list, one item for each; the learner repeats their warnings."""
        with warnings.catch_warnings(record=True) as caught:
            answers = [self.read(message) for message in messages]
        self.answer(answers, caught)

    def answer(self, value: Any, caught: Sequence[warnings.WarningMessage] = ()) -> None:
        """Answers the messages of a command, which then is done."""
        said = [list(pair) for pair in dict.fromkeys((w.category.__name__, str(w.message)) for w in caught)]
        data = _pack({"answer": value, "warnings": said})
        os.ftruncate(self.spawn_args.report, 0)
        write_all(self.spawn_args.report, data)
        self.done()

    def taken(self) -> int:
        """The code of the command that waits, which `done` is about from now on."""
        self._number = self.block[control.COMMAND]
        return self.block[control.CODE]

    def done(self) -> None:
        """Says that the command is done, and not one that was given meanwhile, such as to quit after Ctrl-C."""
        self.block[control.DONE_COMMAND] = self._number
        fence()
        if self.learner[0]:
            self.learner_event.set()


def _pack(value: Any) -> bytes:
    data = encode(value)
    return len(data).to_bytes(8, "little") + data


def _read_mailbox(fd: int) -> Any:
    return unship(read_all(fd, os.fstat(fd).st_size))
