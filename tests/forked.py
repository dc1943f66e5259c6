"""Child processes that are forked, for tests that start dozens and ask for bits: `import torch` takes 1.5 s in each."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import psutil
import pytest

import penstock.samplers.async_process
import penstock.workers.env_worker
from penstock.actors import runner_process
from penstock.processes import child
from penstock.processes.tie import settle
from penstock.samplers import cpu
from penstock.studies.slots import slot_process
from penstock.workers.env_check import CheckingProcess
from penstock.workers.host import run_process

MAINS: dict[str, Callable[[], None]] = {
    "penstock.workers.env_worker": partial(run_process, penstock.workers.env_worker.SamplingProcess),
    "penstock.samplers.async_process": partial(run_process, penstock.samplers.async_process.AsyncHost),
    "penstock.workers.env_check": partial(run_process, CheckingProcess),
    "penstock.actors.runner_process": runner_process.main,
    "penstock.studies.slots.slot_process": slot_process.main,
}


class Forked:
    """Stands for `subprocess.Popen`: a copy of this process that does what `python -m MODULE SPAWN_ARGS` would do."""

    started: ClassVar[list[Forked]] = []

    def __init__(
        self, args: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], process_group: int, stdin: int,
        stdout: int | None = None, stderr: int | None = None, start_new_session: bool = False,
    ) -> None:  # fmt: skip
        self.args, self.returncode = args, None
        assert (process_group, stdin, start_new_session) == (0, subprocess.DEVNULL, False)
        self.pid = os.fork()
        if not self.pid:
            try:
                self._become(pass_fds, env, 1 if stdout is None else stdout, 2 if stderr is None else stderr)
                os._exit(self._main(args))
            finally:
                os._exit(1)
        os.setpgid(self.pid, self.pid)  # here as well: whichever of the two comes first
        self.started.append(self)

    @staticmethod
    def _become(pass_fds: Sequence[int], env: dict[str, str], stdout: int, stderr: int) -> None:
        gc.freeze()  # nothing of the learner's is finalized here
        faulthandler.disable()  # pytest's; the worker has its own
        for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
            signal.signal(number, signal.SIG_DFL)  # Ray, once it was loaded here, turns them into another
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in (0, 1, 2, *pass_fds):
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(fd)
        os.environ.update(env)

    @staticmethod
    def _main(args: Sequence[str]) -> int:
        module, spawn_args, *_ = args[args.index("penstock.processes.tie") + 1 :]
        settle(json.loads(spawn_args))
        sys.argv = [module, spawn_args]
        try:
            MAINS[module]()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else ended.code is not None
        return 0

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            else:
                time.sleep(0.001)
        return self.returncode


class _Subprocess:
    """The module `subprocess` as those see it that start workers, runners and ranks."""

    Popen, DEVNULL, TimeoutExpired = Forked, subprocess.DEVNULL, subprocess.TimeoutExpired


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers, runners and ranks begin as copies of this process. Those that start as users' do are in other tests."""
    monkeypatch.setattr(cpu, "ACTING", ())
    monkeypatch.setattr(child, "subprocess", _Subprocess)
    yield
    Forked.started.clear()


@pytest.fixture
def launched(forked: None) -> None:
    """So do the slots of a launcher or a search, and their runs. The others are those of test_launcher.py."""
    importlib.import_module("torch._dynamo")  # which torch's own optimizers import; 1 s, once for all of them


def fork_from_here_on() -> None:
    """As the fixture, for the rest of this process's life."""
    cpu.ACTING = ()
    child.subprocess = _Subprocess  # pyright: ignore


def forks_of(name: str) -> list[psutil.Process]:
    """Processes that were forked to run the module of this name, or are called `NAME 1`, and have not ended."""
    found = [
        x.pid
        for x in Forked.started
        if any(a == name or a.rstrip("0123456789") == f"{name} " for a in x.args) and x.returncode is None
    ]
    return [x for x in psutil.Process().children() if x.pid in found]


OF_MULTIPROCESSING = ("sem.mp-", "psm_", "pym-")
"""Names that another test's vector environment may make meanwhile, and no sampler does."""


@pytest.fixture
def no_segment_left() -> Iterator[None]:
    """Nothing stays in shared memory."""
    before = os.listdir("/dev/shm")
    yield
    left = set(os.listdir("/dev/shm")) - set(before)
    assert not [name for name in left if not name.startswith(OF_MULTIPROCESSING)]
