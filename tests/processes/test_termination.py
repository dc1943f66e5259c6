"""Workers are ended by force with all that their environments started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import psutil
import pytest

import penstock as ps
from penstock.core.errors import EnvWorkerError
from penstock.processes import termination
from penstock.processes.termination import MARK, kill_group, kill_marked, new_mark
from penstock.testing.samplers import EchoAgent

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Kills by number, of which each finds nobody."""
    found: list[tuple[str, int, int]] = []

    def gone(name: str) -> Any:
        def kill(pid: int, number: int) -> None:
            found.append((name, pid, number))
            raise ProcessLookupError

        return kill

    monkeypatch.setattr(termination, "os", SimpleNamespace(kill=gone("kill"), killpg=gone("killpg")))
    return found


def test_a_group_that_is_gone_is_left_alone(killed: list[tuple[str, int, int]]) -> None:
    kill_group(77)
    assert killed == [("kill", 77, signal.SIGKILL)]


def test_the_number_of_a_child_that_another_has_reaped_is_nobodys_to_kill(killed: list[tuple[str, int, int]]) -> None:
    child = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(child.pid)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    kill_group(child.pid, pidfd)
    assert killed.pop() == ("killpg", child.pid, signal.SIGKILL)  # not reaped yet: its group may live
    child.wait(100)
    kill_group(child.pid, pidfd)
    assert killed == []
    os.close(pidfd)


def test_the_marked_are_found_in_any_session_and_nobody_else() -> None:
    mark, other = new_mark(), new_mark()
    assert mark != other
    ours, theirs = (
        subprocess.Popen(["sleep", "1000"], start_new_session=True, env={**os.environ, MARK: f"{new_mark()}{m}"})
        for m in (mark, other)
    )
    try:
        until_seen = time.monotonic() + 100  # a process shows its environment a moment after it has begun
        while not Path(f"/proc/{ours.pid}/environ").read_bytes() and time.monotonic() < until_seen:
            time.sleep(0.001)
        kill_marked(mark)
        assert ours.wait(100) == -signal.SIGKILL
        assert theirs.poll() is None
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait(100)


class Leaves(gym.Wrapper[Any, Any, Any, Any]):
    """Starts a process in a session of its own, leaves its own process group, and hangs in its 5th step."""

    def __init__(self, folder: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.steps = 0
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (Path(folder) / str(child.pid)).touch()
        os.setpgid(0, os.getpgid(os.getppid()))

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 5:
            time.sleep(1000)
        return super().step(action)


@pytest.mark.slow
def test_an_environment_that_leaves_its_group_is_killed_and_so_is_what_it_started(
    forked: Any, left_of: Any, tmp_path: Path
) -> None:
    settings = ps.CpuSampler(T=16, B=1, workers=1, step_timeout_s=1.0, fault_policy="raise")
    sampler = settings.build(ps.EnvConfig(Leaves, {"folder": str(tmp_path)}))
    sampler.initialize(EchoAgent(sampler.spec))
    young = [psutil.Process(int(path.name)) for path in tmp_path.iterdir()]
    began = time.monotonic()
    with pytest.raises(EnvWorkerError, match="no progress for 1 s"):
        sampler.obtain_samples(0)
    sampler.shutdown()
    assert time.monotonic() - began < 30, "it was waited for"
    assert len(young) == 1
    assert left_of(young) == []


FORKS = """
import os, sys, time
import gymnasium as gym
import penstock as ps
from penstock.testing.samplers import EchoAgent

class Sleeps(gym.Wrapper):
    def step(self, action):
        print("asleep", flush=True)
        time.sleep(1000)  # where no look at the parent ends it

sampler = ps.GpuSampler(T=16, B=1, workers=1).build(lambda: Sleeps(gym.make("CartPole-v1")), 0)
sampler.initialize(EchoAgent(sampler.spec))
if os.fork() == 0:
    sampler.shutdown()  # not its own
    sys.stdin.read()
    os._exit(0)
sampler.obtain_samples(0)
"""


@pytest.mark.slow
def test_workers_die_with_a_learner_that_has_forked(left_of: Any) -> None:
    argv = [sys.executable, "-c", FORKS]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as learner:
        try:
            assert learner.stdout is not None
            assert learner.stdout.readline() == "asleep\n"
            young = psutil.Process(learner.pid).children(recursive=True)
            workers = [p for p in young if "penstock.processes.tie" in p.cmdline()]
            assert len(workers) == 1
            assert len(young) == 2
        finally:
            learner.kill()
            learner.wait(100)
        assert left_of(workers) == []
        assert learner.stdin is not None
        learner.stdin.close()


STARTS = """
import time
import penstock as ps

class Slow:
    def __reduce__(self):
        return time.sleep, (1000,)

def make(slow=Slow()):
    pass

print("ready", flush=True)
ps.CpuSampler(T=16, B=2, workers=2).build(make, 0)
"""


@pytest.mark.slow
def test_workers_that_still_unpickle_die_with_the_learner(left_of: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as learner:
        try:
            young: list[psutil.Process] = []
            deadline = time.monotonic() + 100
            while len([p for p in young if p.num_threads() and _imported(p)]) < 3 and time.monotonic() < deadline:
                young = psutil.Process(learner.pid).children(recursive=True)
                time.sleep(0.02)
            assert len(young) == 3  # the process that has imported torch, and its two forks
        finally:
            learner.kill()
            learner.wait(100)
        assert left_of(young) == []


def _imported(process: psutil.Process) -> bool:
    """numpy is there, so the process is past the tie and its imports have begun."""
    try:
        return "numpy" in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False
