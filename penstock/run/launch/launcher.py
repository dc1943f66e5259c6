"""Executes a queue of runs, each an ordinary `penstock train` in a process of its own: one at a time in each slot."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.core.files import unshare
from penstock.core.machine import Machine
from penstock.run.files.trust import VARIABLE
from penstock.run.launch.slots import STOPPED, Execution, Slots, local_slots
from penstock.run.launch.sweep import PROMPT, Queue, Run, has_checkpoint
from penstock.run.signals import handling

_LOOK_S = 0.1


class Display(Protocol):
    """Shows the progress of a queue; `LaunchDisplay` is one."""

    def started(self, run: Run, slot: int) -> None: ...
    def ended(self, run: Run) -> None: ...
    def note(self, text: str) -> None: ...
    def refresh(self, running: Mapping[str, float]) -> None:
        """Called ten times a second with the seconds that each running run has taken so far."""
        ...


class Work(Protocol):
    """Runs to execute, one after the other, and where they keep what they do."""

    @property
    def folder(self) -> Path:
        """The directory of all runs."""
        ...

    def take(self) -> Run | None:
        """The run to begin or go on with next; None if there is none, at least until another has ended."""
        ...

    def run_dir(self, run: Run) -> Path: ...
    def log(self, run: Run) -> Path: ...
    def command(self, run: Run) -> list[str]:
        """Arguments of `penstock`."""
        ...

    def started(self, run: Run) -> None:
        """Keeps that a run is about to start: a launcher killed in between must know that it may have."""
        ...

    def ended(self, run: Run) -> None:
        """Keeps how a run ended, which its status and code say."""
        ...


class Listed:
    """Work on some runs of a sweep, in their order."""

    def __init__(self, queue: Queue, todo: Sequence[Run]) -> None:
        self._queue, self._todo = queue, list(todo)
        self.folder = queue.folder
        self.run_dir, self.log, self.command = queue.run_dir, queue.log, queue.command

    def take(self) -> Run | None:
        """The next run of the list."""
        return self._todo.pop(0) if self._todo else None

    def started(self, run: Run) -> None:
        """Writes launch.json."""
        self._queue.save()

    def ended(self, run: Run) -> None:
        """Writes launch.json."""
        self._queue.save()


@dataclass
class _Executed:
    run: Run
    process: Execution
    started: float


class Launcher:
    """Executes runs: one at a time in each slot.

    Args:
        slots: where; machines stand for slots of this machine, made and ended with the work.
        trust: runs in its directory that are resumed may be a stranger's, whose code is imported and called.
    """

    def __init__(self, work: Work, slots: Slots | Sequence[Machine], display: Display, trust: bool = False) -> None:
        self._work, self._display, self._trust = work, display, trust
        self._slots: list[_Executed | None] = [None] * len(slots)
        self._where = slots
        self._signals_seen: list[int] = []
        self._told = 0

    def work(self) -> int | None:
        """Executes all runs; returns None when all have ended, or the signal that stopped the launcher.

        The first Ctrl-C, SIGTERM or hang-up has every run write a checkpoint and end; the second kills them.
        """
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        with contextlib.ExitStack() as stack:
            stack.enter_context(handling(numbers, self._signals_seen.append))
            where = self._where
            if isinstance(where, Sequence):
                where = local_slots(where)
                stack.callback(where.close)
            try:
                while True:
                    self._pass_signals_on()
                    self._collect()
                    if not self._signals_seen:
                        self._fill(where)
                    running = [one for one in self._slots if one is not None]
                    self._display.refresh({one.run.name: time.monotonic() - one.started for one in running})
                    if not running:
                        return self._signals_seen[0] if self._signals_seen else None
                    time.sleep(_LOOK_S)
            finally:
                for one in self._slots:
                    if one is not None:
                        one.process.end()

    def _fill(self, where: Slots) -> None:
        for k, one in enumerate(self._slots):
            if one is None and (run := self._work.take()) is not None:
                self._slots[k] = self._start(run, k, where)

    def _start(self, run: Run, k: int, where: Slots) -> _Executed:
        run_dir, log = self._work.run_dir(run), self._work.log(run)
        if run.attempts:
            where.settle(run_dir)
        if run.attempts and run_dir.is_dir() and not has_checkpoint(run_dir):
            shutil.rmtree(run_dir)  # it died before its first checkpoint: `train` wants the directory empty
        command = self._work.command(run)
        run.status, run.code, run.attempts = "running", None, run.attempts + 1
        self._work.started(run)
        log.parent.mkdir(exist_ok=True)
        unshare(log)
        with open(log, "ab", buffering=0) as out:
            out.write(f"{PROMPT}{shlex.join(command)}\n".encode())
        process = where.start(k, command, log, self._trusted())
        self._display.started(run, k)
        return _Executed(run, process, time.monotonic())

    def _trusted(self) -> dict[str, str]:
        folder = str(self._work.folder.resolve())
        # Only if the user says so: a sweep is known by its commands, which a stranger may have typed as well.
        if self._trust and os.pathsep not in folder:
            return {VARIABLE: os.pathsep.join(filter(None, [os.environ.get(VARIABLE), folder]))}
        return {}

    def _collect(self) -> None:
        for k, one in enumerate(self._slots):
            code = None if one is None else one.process.code()
            if one is None or code is None:
                continue
            self._slots[k] = None
            run, killed = one.run, self._told > 1 and code == -signal.SIGKILL
            run.status = "finished" if code == 0 else "stopped" if code in STOPPED or killed else "failed"
            run.code, run.seconds = code, run.seconds + time.monotonic() - one.started
            self._work.ended(run)
            self._display.ended(run)

    def _pass_signals_on(self) -> None:
        running = [one for one in self._slots if one is not None]
        if self._told < min(len(self._signals_seen), 2):
            self._told += 1
            name = signal.Signals(self._signals_seen[-1]).name
            if self._told == 1:
                self._display.note(f"{name}: {len(running)} runs save and end, no other begins; once more kills them")
            for one in running:
                one.process.terminate() if self._told == 1 else one.process.kill()
