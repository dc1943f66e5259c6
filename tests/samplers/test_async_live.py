"""The live side of an asynchronous sampler: its waiting batches, and its process tree when that dies or fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import EnvWorkerError
from penstock.envs.make import EnvConfig
from penstock.envs.toy import SeedEcho
from penstock.testing.pools import echo_config
from penstock.testing.records import RecordCheck
from penstock.testing.samplers import EchoAgent, check_resume
from tests.workers.crashing import LIMIT_S, SEED, SLOT, B, T, crash, leaves_nothing, saves_time

__all__ = ["leaves_nothing", "saves_time"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:.*(replaced|dropped)")]


@pytest.mark.usefixtures("forked")
def test_resumes_exactly_with_waiting_batches() -> None:
    check_resume(ps.AsyncSerialSampler(ps.SerialSampler(7, 6), depth=1).build, before=2, after=2)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_async_tree_is_started_anew(tmp_path: Path) -> None:
    settings = ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1, start_timeout_s=LIMIT_S)
    sampler = settings.build(echo_config(), SEED)
    check = RecordCheck(B, seed=None, acted=True, faults=True)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        for itr in range(12):
            if itr in (4, 8):
                os.kill(sampler._workers.workers[0].child.pid, 9)
            check.add(sampler.obtain_samples(itr)[0])
        assert sampler.metrics()["faults/restarts"] == 2
        assert len(sampler.evaluate_agent(3, 5)) == 5
    finally:
        sampler.shutdown()


class DiesOnce(SeedEcho):
    """Kills its process in its fourth step if a file is there, which it removes."""

    def __init__(self, once: str) -> None:
        super().__init__()
        self._once, self._steps = Path(once), 0

    def act(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 4 and self._once.exists():
            self._once.unlink()
            os.kill(os.getpid(), 9)
        return super().act(action)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("first", [0, 3])
def test_a_process_that_dies_in_its_first_batch_begins_anew_whatever_its_number(tmp_path: Path, first: int) -> None:
    once = tmp_path / "once"
    once.touch()
    settings = ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1, start_timeout_s=LIMIT_S)
    sampler = settings.build(EnvConfig(DiesOnce, kwargs={"once": str(once)}), SEED)
    check = RecordCheck(B, seed=None, acted=True, faults=True)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        batch = sampler.obtain_samples(first)[0]
        assert batch.first[0].all() and not batch.prev_reward[0].any()
        check.add(batch)
        check.add(sampler.obtain_samples(first + 1)[0])
        assert sampler.metrics()["faults/restarts"] == 1
    finally:
        sampler.shutdown()


@pytest.mark.usefixtures("forked")
def test_async_errors_name_the_slot() -> None:
    sampler = ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=1), depth=1).build(crash("raise"), SEED)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        with pytest.raises(EnvWorkerError, match=rf"slot {SLOT} of .*the arm fell off"):
            for itr in range(12):
                sampler.obtain_samples(itr)
    finally:
        sampler.shutdown()
