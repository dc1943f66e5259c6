"""Whatever becomes of the learner, its workers and what they started are gone soon after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Child, Zygote

pytestmark = pytest.mark.slow

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
    "async-cpu": "ps.AsyncCpuSampler(ps.CpuSampler(T=16, B=4, workers=1))",
    "async-alternating": "ps.AsyncAlternatingSampler(ps.AlternatingSampler(T=16, B=4, workers=1))",
}
AS_USERS_DO = {"gpu", "alternating", "async-alternating"}
"""Kinds whose workers are no forks of the learner: env workers, which need no torch, and one process of samplers."""
LIMIT_S = 100.0
"""For a process to be gone, which on a busy machine waits for its turn; asleep for 1000 s, none ends by itself."""
SAMPLE = "for itr in range(10): sampler.obtain_samples(itr)"


def started(zygote: Zygote, until: Any, tmp_path: Path, kind: str, end: str = SAMPLE, says: str = "asleep") -> Child:
    """A learner that has just said so."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(sampler=SAMPLERS[kind], end=end))
    child = zygote.script(script, forked=kind not in AS_USERS_DO)
    until(lambda: says in child.output, child)
    return child


def offspring(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.usefixtures("no_segment_left")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_workers_and_their_children_die_with_a_learner_that_is_killed(
    kind: str, zygote: Zygote, until: Any, left_of: Any, tmp_path: Path
) -> None:
    child = started(zygote, until, tmp_path, kind)
    young = offspring(child.pid)
    assert len([p for p in young if "sleep" in p.name()]) >= 4
    child.kill()
    assert left_of(young) == []


@pytest.mark.parametrize("kind", ["cpu", "alternating"])
def test_an_interrupt_ends_it_with_nothing_left(
    kind: str, zygote: Zygote, until: Any, left_of: Any, tmp_path: Path
) -> None:
    child = started(zygote, until, tmp_path, kind)
    young = offspring(child.pid)
    child.send(signal.SIGINT)
    assert child.wait() in (1, 130, -signal.SIGINT)
    assert left_of(young) == []


@pytest.mark.parametrize("kind", ["cpu", "alternating", "async-cpu"])
def test_a_script_that_ends_without_shutdown_leaves_nothing(
    kind: str, zygote: Zygote, until: Any, left_of: Any, tmp_path: Path
) -> None:
    goes_on = tmp_path / "goes_on"
    end = f"print('ready', flush=True)\nimport os\nwhile not os.path.exists({str(goes_on)!r}): time.sleep(0.01)"
    child = started(zygote, until, tmp_path, kind, end, "ready")
    young = offspring(child.pid)
    assert young
    goes_on.touch()
    assert child.wait() == 0, child.output
    assert left_of(young) == []


def test_a_process_of_its_own_dies_as_a_forked_one_does(left_of: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(sampler=SAMPLERS["alternating"], end=SAMPLE))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("asleep")
            young = offspring(process.pid)
        finally:
            process.kill()
            process.wait(LIMIT_S)
    assert left_of(young) == []
