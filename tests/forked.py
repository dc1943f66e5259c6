"""Worker processes that are forked, for tests that start dozens and ask for bits: `import torch` takes 1.5 s in each."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import penstock.samplers.async_process
import penstock.workers.env_worker
from penstock.workers import process as child
from penstock.workers.checking import CheckingProcess
from penstock.workers.host import Host, run_process
from penstock.workers.tie import die_with_the_learner

MODULES: dict[str, type[Host]] = {
    "penstock.workers.env_worker": penstock.workers.env_worker.SamplingProcess,
    "penstock.samplers.async_process": penstock.samplers.async_process.AsyncHost,
    "penstock.workers.checking": CheckingProcess,
}


class Forked:
    """Stands for `subprocess.Popen`: a copy of this process that does what `python -m MODULE BOOT` would do."""

    def __init__(
        self, args: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], process_group: int, stdin: int
    ) -> None:
        self.args, self.returncode = args, None
        assert (process_group, stdin) == (0, subprocess.DEVNULL)
        self.pid = os.fork()
        if not self.pid:
            try:
                self._become(args, pass_fds, env)
            finally:
                os._exit(1)
        os.setpgid(self.pid, self.pid)  # here as well: whichever of the two comes first

    @staticmethod
    def _become(args: Sequence[str], pass_fds: Sequence[int], env: dict[str, str]) -> None:
        gc.freeze()  # nothing of the learner's is finalized here
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in (0, 1, 2, *pass_fds):
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(fd)
        os.environ.update(env)
        *_, module, boot = args
        given = json.loads(boot)
        die_with_the_learner(given["alive"], given["learner_pid"])
        sys.argv = [module, boot]
        run_process(MODULES[module])
        os._exit(0)

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
    """The module `subprocess` as samplers see it."""

    Popen, DEVNULL = Forked, subprocess.DEVNULL


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Workers begin as copies of this process. Those that start as users' do are in the other tests."""
    monkeypatch.setattr(child, "subprocess", _Subprocess)


OF_MULTIPROCESSING = ("sem.mp-", "psm_", "pym-")
"""Names that another test's vector environment may make meanwhile, and no sampler does."""


@pytest.fixture
def no_segment_left() -> Iterator[None]:
    """Nothing stays in shared memory."""
    before = os.listdir("/dev/shm")
    yield
    left = set(os.listdir("/dev/shm")) - set(before)
    assert not [name for name in left if not name.startswith(OF_MULTIPROCESSING)]
