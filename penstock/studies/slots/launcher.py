"""Executes the runs of a study, each an ordinary `penstock train` process: one at a time in each slot."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.files import unshare
from penstock.core.machine import Machine, counted
from penstock.run.files.trust import VARIABLE
from penstock.run.signals import handling
from penstock.studies.slots.slots import STOPPED, Execution, Slots, local_slots
from penstock.studies.study import Study
from penstock.studies.trial import PROMPT, Run, has_checkpoint

_LOOK_S = 0.1


class Display(Protocol):
    """Shows the progress of a study; `StudyDisplay` is one."""

    def started(self, run: Run, slot: int) -> None: ...
    def ended(self, run: Run) -> None: ...
    def note(self, text: str) -> None: ...
    def refresh(self, running: Mapping[str, float]) -> None:
        """Called ten times a second with the seconds that each running run has taken so far."""
        ...


@dataclass
class _Executed:
    run: Run
    process: Execution
    started: float


class Launcher:
    """Executes the runs of a study: one at a time in each slot.

    Args:
        slots: where; machines stand for slots of this machine, made and ended with the work.
        trust: allow importing and calling code that resumed runs in its directory name.
    """

    def __init__(self, study: Study, slots: Slots | Sequence[Machine], display: Display, trust: bool = False) -> None:
        self._study, self._display, self._trust = study, display, trust
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
            if one is None and (run := self._study.ask()) is not None:
                self._slots[k] = self._start(run, k, where)

    def _start(self, run: Run, k: int, where: Slots) -> _Executed:
        run_dir, log = self._study.run_dir(run), self._study.log(run)
        if run.attempts:
            where.settle(run_dir)
        if run.attempts and run_dir.is_dir() and not has_checkpoint(run_dir):
            shutil.rmtree(run_dir)  # it died before its first checkpoint: `train` wants the directory empty
        command = self._study.command(run)
        run.status, run.code, run.attempts = "running", None, run.attempts + 1
        self._study.started(run)
        log.parent.mkdir(exist_ok=True)
        unshare(log)
        with open(log, "ab", buffering=0) as out:
            out.write(f"{PROMPT}{shlex.join(command)}\n".encode())
        process = where.start(k, command, log, self._trusted())
        self._display.started(run, k)
        return _Executed(run, process, time.monotonic())

    def _trusted(self) -> dict[str, str]:
        folder = str(self._study.folder.resolve())
        # Only if the user says so: a study is known by its settings, which a stranger may have typed as well.
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
            self._study.ended(run)
            self._display.ended(run)

    def _pass_signals_on(self) -> None:
        running = [one for one in self._slots if one is not None]
        if self._told < min(len(self._signals_seen), 2):
            self._told += 1
            name = signal.Signals(self._signals_seen[-1]).name
            if self._told == 1:
                self._display.note(
                    f"{name}: saves and ends {counted(len(running), 'run')}, begins no other; once more kills"
                )
            for one in running:
                one.process.terminate() if self._told == 1 else one.process.kill()
