"""Workers that die as an episode ends, at every line between the environment's last step and the count of its row.

An end is in the record and counted, or neither: an evaluation would wait for ever for one that a dead worker took off
those that its slots have yet to play, and `Episodes` held one whose last rows were lost.
"""

from __future__ import annotations

import inspect
import mmap
import os
import signal
import sys
from types import FrameType
from typing import Any

import pytest

import penstock as ps
import penstock.workers.faults
from penstock.envs.make import EnvConfig
from penstock.envs.toy import EchoAgents, EchoTurns
from penstock.envs.toy.plumbing import SeedEcho
from penstock.testing.samplers import EchoAgent
from tests.envs.pools.plain_loop import seated
from tests.samplers.many import Rows, agents_of
from tests.slow import slow

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:.*replaced"),
]

T, B, LENGTH = 4, 2, 5
COUNTED = ("pools/simultaneous.py", "pools/turns.py", "pools/serial.py", "pools/slot_envs.py", "many/agent_envs.py",
           "many/turn_envs.py", "many/turn_columns.py", "workers/env_worker.py", "samplers/actor.py")  # fmt: skip
"""Files whose lines are counted."""


class Death:
    """Has a worker kill itself so many lines after the last step of an episode."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, 8)).cast("q")  # workers inherit it
        self._learner, self._counted = os.getpid(), -1

    @property
    def at(self) -> int:
        """Lines after the end at which a worker dies, in which it is set to 0: none does."""
        return self._words[0]

    @at.setter
    def at(self, lines: int) -> None:
        self._words[0] = lines

    def episode_is_over(self) -> None:
        """Called by an environment in the last step of an episode: lines are counted from here on."""
        if not self.at or os.getpid() == self._learner:
            return
        if self._counted < 0:
            sys.settrace(self._trace)
            frame = inspect.currentframe()
            while frame is not None:
                frame.f_trace = self._trace
                frame = frame.f_back
        self._counted = 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(COUNTED) or code.co_name.startswith("<"):  # a comprehension writes nothing
            return None
        if event == "line":
            self._counted += 1
            if self._counted == self.at:
                self.at = 0
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


DEATH = Death()
"""Of the test that runs."""


class OneEnds(SeedEcho):
    def step(self, action: Any) -> Any:
        result = super().step(action)
        if result[2] or result[3]:
            DEATH.episode_is_over()
        return result


class ParallelEnds(EchoAgents):
    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        if not self.agents:
            DEATH.episode_is_over()
        return result


class TurnsEnd(EchoTurns):
    def play(self, agent: str, action: Any) -> None:
        super().play(agent, action)
        if self.t >= self._length:
            DEATH.episode_is_over()


def _of_many(made: Any) -> EnvConfig:
    kwargs = {"agents": 2, "length": LENGTH, "steady": True}
    return seated(made, ("a", "b"), {"agent_0": "a", "agent_1": "b"}, kwargs=kwargs, info_keys=("echo",))


KINDS = {"one agent": EnvConfig(OneEnds), "parallel": _of_many(ParallelEnds), "turns": _of_many(TurnsEnd)}
SAMPLERS: dict[str, Any] = {
    "cpu": ps.CpuSampler(T, B, workers=1),
    "gpu": ps.GpuSampler(T, B, workers=1),
    "alternating": ps.AlternatingSampler(T, B, workers=1),
}
LINES = {"one agent": 40, "parallel": 260, "turns": 300}
"""From the last step of an episode to where its row counts, and some more."""
EACH = [(name, kind) for name in SAMPLERS for kind in KINDS]


@pytest.fixture(autouse=True)
def without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be replaced as often as it dies, and at once."""
    monkeypatch.setattr(penstock.workers.faults, "_FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(penstock.workers.faults, "_BUDGET", 1000)


@pytest.mark.parametrize(
    ("name", "kind", "stride"),
    [("cpu", "parallel", 13), ("gpu", "turns", 13), *slow(*((*x, 3) for x in EACH if x[1] != "one agent"))],
)
def test_an_episode_is_counted_with_all_of_its_rows_or_not_at_all(name: str, kind: str, stride: int) -> None:
    rows, k, lines = Rows(), 0, range(1, LINES[kind], stride)
    sampler = SAMPLERS[name].build(KINDS[kind], 3)
    try:
        sampler.initialize(agents_of(sampler))
        for DEATH.at in lines:
            until = k + 20
            while DEATH.at and k < until:
                batch, episodes = sampler.obtain_samples(k)
                rows.take(batch, episodes, k)
                k += 1
            assert not DEATH.at, "no worker died"
        for more in range(k, k + 6):
            batch, episodes = sampler.obtain_samples(more)
            rows.take(batch, episodes, more)
        assert sampler.metrics()["faults/signal"] == len(lines)
        assert rows.compare(KINDS[kind], 3, range(B), cut=len(lines)) > len(lines)
    finally:
        DEATH.at = 0
        sampler.shutdown()


@pytest.mark.parametrize(
    ("name", "kind", "stride"),
    [("cpu", "one agent", 7), ("gpu", "parallel", 31), ("cpu", "turns", 31), *slow(*((*x, 7) for x in EACH))],
)
def test_an_evaluation_has_all_of_its_episodes(name: str, kind: str, stride: int) -> None:
    lines = range(1, LINES[kind], stride)
    sampler = SAMPLERS[name].build(KINDS[kind], 3)
    try:
        sampler.initialize(EchoAgent(sampler.spec) if kind == "one agent" else agents_of(sampler))
        for DEATH.at in lines:
            asked = iter(range(10))
            found = sampler.evaluate_agent(1, 4, slots=2, give_up=lambda asked=asked: next(asked, None) is None)
            assert sorted(found.slot.tolist()) == [0, 0, 1, 1]
            assert not DEATH.at, "no worker died"
        assert sampler.metrics()["faults/signal"] == len(lines)
    finally:
        DEATH.at = 0
        sampler.shutdown()
