from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import penstock as ps
from penstock.core.config import to_plain
from penstock.envs.check import check_env
from penstock.workers import env_check
from tests.forked import forked, launched, no_segment_left

__all__ = ["forked", "launched", "no_segment_left"]

torch.set_num_threads(1)

# The list of trusted runs; of the tests' own, in all processes that they start, and not the developer's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="penstock-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
os.environ.pop("PENSTOCK_TRUST", None)
really_apart = env_check._apart
env_check._apart = lambda config, parts, seed, settings: check_env(config, seed=seed)
"""The environments of tests are checked in the test's process, which saves 0.2 s of each run; see `apart`."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Of a job that a shell put in the background; every process that a test starts would inherit it and be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LIMIT_S = 200.0
"""No wait is long where nothing is wrong; on a busy machine this is not."""


def pytest_collection_finish() -> None:
    """Modules and tests outlive every collection of garbage, which need not look at them: 0.2 s a time."""
    gc.collect()
    gc.freeze()


class Child:
    """A forked process that trains or resumes."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self._zygote, self.pid, self._log = zygote, pid, log
        self.code: int | None = None

    def wait(self, timeout: float = LIMIT_S) -> int:
        """The exit code, negative for the signal that killed it."""
        if self.code is None:
            self.code = self._zygote.ask({"wait": self.pid, "timeout": timeout})
        assert self.code is not None, f"still running after {timeout} s:\n{self.output}"
        return self.code

    @property
    def running(self) -> bool:
        self.code = self.code if self.code is not None else self._zygote.ask({"wait": self.pid, "timeout": 0.001})
        return self.code is None

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and the proof that it was in time."""
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, f"it had ended by itself:\n{self.output}"

    def succeed(self) -> dict[str, Any]:
        assert self.wait() == 0, self.output
        return json.loads(self.output.splitlines()[-1])

    @property
    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


class Zygote:
    """Forks fresh processes; see zygote.py. Workers of a script and of a command line begin as users' do."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        script = str(Path(__file__).parent / "run" / "zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._children: list[Child] = []

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, **request: Any) -> Child:
        self._count += 1
        log = self._folder / f"{self._count}.log"
        self._children.append(child := Child(self, self.ask({"log": str(log), **request}), log))
        return child

    def script(self, path: Path, *args: str, cwd: Path | None = None, forked: bool = False) -> Child:
        return self.start(script=str(path), args=args, cwd=cwd and str(cwd), forked=forked)

    def train(self, exp: ps.Experiment, init: Path | None = None) -> Child:
        return self.start(train=to_plain(exp), init=init and str(init), forked=True)

    def resume(self, run: Path, changes: dict[str, Any] | None = None) -> Child:
        return self.start(resume=str(run), changes=changes, forked=True)

    def cli(self, *argv: str) -> Child:
        return self.start(argv=list(argv), forked=False)

    def close(self) -> None:
        for child in self._children:
            if child.code is None:
                child.send(signal.SIGKILL)
                child.wait()
        self._process.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    live = Zygote(tmp_path_factory.mktemp("logs"))
    yield live
    live.close()


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    def until(condition: Callable[[], Any], child: Child, timeout: float = LIMIT_S) -> None:
        deadline, looked = time.monotonic() + timeout, time.monotonic()
        while not condition():
            now = time.monotonic()
            assert now < deadline, f"waited {timeout} s\n{child.output}"
            if now - looked > 0.2:
                looked = now
                assert child.running or condition(), f"it ended too soon, with {child.code}\n{child.output}"
            time.sleep(0.002)

    return until


@pytest.fixture(scope="session")
def ended_by(until: Callable[..., None]) -> Callable[..., Child]:
    def ended_by(
        start: Callable[[], Child], when: Callable[[], Any], number: int = signal.SIGKILL, code: int = -signal.SIGKILL,
        pause_s: float = 0.0, young: list[psutil.Process] | None = None,
    ) -> Child:  # fmt: skip
        """A child that a signal ended so long after `when()`. One that was through before it is started once more.

        Args:
            start: begins anew, whatever an earlier one left. young: where to put its processes.
        """
        for _ in range(10):
            child = start()
            until(when, child)
            time.sleep(pause_s)
            if child.running:
                if young is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        young[:] = psutil.Process(child.pid).children(recursive=True)
                child.send(number)
            if child.wait() == code:
                return child
            assert child.code == 0, child.output
        raise AssertionError("ten of them were through before a signal could reach them")

    return ended_by


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def left_of() -> Callable[[list[psutil.Process]], list[psutil.Process]]:
    def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
        """Those that do not end, though they are given time."""
        left, deadline = processes, time.monotonic() + LIMIT_S / 2
        while left and time.monotonic() < deadline:
            left = [p for p in left if is_alive(p)]
            time.sleep(0.01)
        return left

    return left_of


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are checked in processes of their own, as users' are."""
    monkeypatch.setattr(env_check, "_apart", really_apart)


@pytest.fixture(autouse=True)
def _own_generator() -> Iterator[None]:
    """Modules that a test makes by itself get the same parameters whichever tests ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
