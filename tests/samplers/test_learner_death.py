from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import subprocess, time
import gymnasium as gym
import penstock as ps

class Sleeps(gym.Wrapper):  # of this script, which has no main guard
    def __init__(self, env):
        super().__init__(env)
        self.child = subprocess.Popen(["sleep", "1000"])
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 20:
            print("asleep", flush=True)
            time.sleep(1000)
        return super().step(action)

sampler = {sampler}.build(lambda: Sleeps(gym.make("CartPole-v1")), 0)
sampler.initialize(ps.PPO().build(sampler.spec).agent)
{end}
"""
SAMPLERS = {
    "cpu": "ps.CpuSampler(T=16, B=4, workers=2)",
    "gpu": "ps.GpuSampler(T=16, B=4, workers=2)",
    "alternating": "ps.AlternatingSampler(T=16, B=4, workers=2)",
    "no-overlap": "ps.NoOverlapAlternatingSampler(T=16, B=4, workers=2)",
    "async-serial": "ps.AsyncSerialSampler(ps.SerialSampler(T=16, B=4))",
    "async-cpu": "ps.AsyncCpuSampler(ps.CpuSampler(T=16, B=4, workers=2))",
    "async-alternating": "ps.AsyncAlternatingSampler(ps.AlternatingSampler(T=16, B=4, workers=2))",
}
SOON_S = 5.0
"""For processes to be gone, which on a busy machine wait for their turn; asleep for 1000 s, none ends by itself."""
SAMPLE = "for itr in range(10): sampler.obtain_samples(itr)"


def started(tmp_path: Path, kind: str, end: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(sampler=SAMPLERS[kind], end=end))
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def offspring(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that are left after so many seconds."""
    deadline = time.monotonic() + within_s
    left = processes
    while left and time.monotonic() < deadline:
        left = [p for p in left if is_alive(p)]
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("kind", SAMPLERS)
def test_workers_and_their_children_die_with_a_learner_that_is_killed(kind: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    process = started(tmp_path, kind, SAMPLE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("asleep")
        young = offspring(process.pid)
        assert len([p for p in young if "sleep" in p.name()]) >= 4
        process.send_signal(signal.SIGKILL)
        process.wait(5)
        assert gone(young, SOON_S) == []
        assert set(os.listdir("/dev/shm")) == before
    finally:
        process.kill()
        process.wait(5)


@pytest.mark.parametrize("kind", ["cpu", "alternating", "async-cpu"])
def test_a_script_that_ends_without_shutdown_leaves_nothing(kind: str, tmp_path: Path) -> None:
    end = "print(open('/proc/self/stat').read().split()[0], flush=True)\ntime.sleep(0.3)"
    process = started(tmp_path, kind, end)
    assert process.stdout is not None
    process.stdout.readline()
    young = offspring(process.pid)
    assert young
    assert process.wait(20) == 0
    assert gone(young, SOON_S) == []


@pytest.mark.parametrize("kind", ["cpu", "alternating"])
def test_an_interrupt_ends_it_with_nothing_left(kind: str, tmp_path: Path) -> None:
    process = started(tmp_path, kind, SAMPLE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("asleep")
    young = offspring(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) in (1, 130, -signal.SIGINT)
    assert gone(young, SOON_S) == []
