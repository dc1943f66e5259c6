"""Environments of many agents whose workers are killed at random: no row lost without being counted, none twice."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.core.batch import poison
from penstock.core.tree import tree_leaves
from penstock.testing.pools import echo_config
from penstock.testing.samplers import EchoAgent
from penstock.workers import faults
from tests.samplers.many import Rows, agents_of, bits
from tests.samplers.test_many_agents import DEALT, IDLE, ONE, THREE, echoes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:.*replaced"),
]

B = 4
KILLED: dict[str, Any] = {
    "cpu": lambda T: ps.CpuSampler(T, B, workers=2),
    "gpu": lambda T: ps.GpuSampler(T, B, workers=2),
    "alternating": lambda T: ps.AlternatingSampler(T, B, workers=2),
    "no-overlap": lambda T: ps.NoOverlapAlternatingSampler(T, B, workers=2),
    "async-serial": lambda T: ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1),
    "async-cpu": lambda T: ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2), depth=1),
    "async-gpu": lambda T: ps.AsyncGpuSampler(ps.GpuSampler(T, B, workers=2), depth=0),
    "async-alternating": lambda T: ps.AsyncAlternatingSampler(ps.AlternatingSampler(T, B, workers=2), depth=2),
}


class Killer(threading.Thread):
    """Kills processes that this one has started, one after the other, each after a random pause."""

    def __init__(self, rng: random.Random, kills: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self._rng, self._kills, self._pause_s = rng, kills, pause_s
        self._mine = {p.pid for p in psutil.Process().children(recursive=True)}
        self.pids: list[int] = []

    def run(self) -> None:
        for _ in range(self._kills):
            time.sleep(2 * self._pause_s * self._rng.random())
            there = sorted(p.pid for p in psutil.Process().children(recursive=True) if p.pid not in self._mine)
            if there:
                self.pids.append(self._rng.choice(there))
                with suppress(ProcessLookupError):
                    os.kill(self.pids[-1], signal.SIGKILL)


def play_under_kills(name: str, kind: str, who: Any, T: int, seed: int, kills: int, pause_s: float) -> None:
    """Raises AssertionError unless rows and episodes are those of plain loops, while workers are killed at random."""
    settings, config = KILLED[name](T), echoes(kind, who)
    rng, rows = random.Random(f"{name} {kind} {seed}"), Rows(getattr(settings, "depth", 0))
    killer = Killer(rng, kills, pause_s)
    sampler = settings.build(config, seed)
    try:
        sampler.initialize(agents_of(sampler))
        k = after = 0
        killer.start()
        while killer.is_alive() or after < 6:
            batch, episodes = sampler.obtain_samples(k)
            rows.take(batch, episodes, k)
            for out in batch.values():
                assert not any((x == -4242).any() for x in tree_leaves((out.obs, out.prev_reward)))
                if T > 1:
                    poison(out[: T - 1])
            if rng.random() < 0.05:
                assert len(sampler.evaluate_agent(k, 3)) == 3
            k, after = k + 1, after + (not killer.is_alive())
        killer.join()
        deaths = sampler.metrics().get("faults/restarts", 0.0)
        assert killer.pids
        assert 0 < deaths <= len(killer.pids)
        # With a process of an AsyncSampler those go that began in the batch that is lost, or in workers that died in it.
        cut = kills * (T * 6 + 2) if name.startswith("async") else kills
        assert rows.compare(config, seed, range(B), cut=cut) > 10
    finally:
        killer.join()
        sampler.shutdown()


@pytest.mark.parametrize(("name", "kind", "T"), [("cpu", "turns", 2), ("alternating", "parallel", 5)])
def test_rows_are_a_plain_loops_under_random_kills(
    name: str, kind: str, T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_FIRST_DELAY_S", 0.0)
    play_under_kills(name, kind, DEALT, T, 7, kills=2, pause_s=0.1)


@pytest.mark.parametrize("T", [1, 2, 5, 16])
@pytest.mark.parametrize("kind", ["parallel", "turns"])
@pytest.mark.parametrize("name", KILLED)
def test_every_sampler_under_random_kills(name: str, kind: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_FIRST_DELAY_S", 0.0)
    for seed, who in enumerate([ONE, IDLE, THREE, DEALT]):
        play_under_kills(name, kind, who, T, seed, kills=4, pause_s=0.3)


@pytest.mark.parametrize("name", ["cpu", "alternating"])
def test_a_worker_that_dies_between_batches_takes_no_turn_with_it(name: str) -> None:
    """Its columns end in open turns, whose observations stand in the row with which the next batch begins."""
    config, rows = echoes("turns", DEALT), Rows()
    sampler = KILLED[name](3).build(config, 3)
    try:
        sampler.initialize(agents_of(sampler))
        for k in range(10):
            rows.take(*sampler.obtain_samples(k), k)
            if k in (2, 5):
                os.kill(sampler.pool._workers.workers[k % 2].child.pid, signal.SIGKILL)
        assert sampler.metrics()["faults/restarts"] == 2
        assert "faults/lost_steps" not in sampler.metrics()
        assert rows.compare(config, 3, range(B), cut=2) > 60
    finally:
        sampler.shutdown()


@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_a_batch_that_waits_outlives_the_process_that_collected_it(kind: str) -> None:
    config = echoes(kind, THREE)
    sampler = ps.AsyncSerialSampler(ps.SerialSampler(4, 2), depth=2).build(config, 3)
    quiet = ps.AsyncSerialSampler(ps.SerialSampler(4, 2), depth=2).build(config, 3)
    try:
        for each in (sampler, quiet):
            each.initialize(agents_of(each))
        rows = Rows(depth=2)
        for k in range(12):
            if k in (3, 4, 8):
                sampler._workers.wait(lambda k=k: sampler._ready(k + 1))
                process: Any = sampler._workers.workers[0].child
                os.kill(process.pid, signal.SIGKILL)
                process.wait(60.0)
                sampler._workers.settle()
            batch, episodes = sampler.obtain_samples(k)
            rows.take(batch, episodes, k)
            if k < 5:  # batches 3 and 4 were waiting when the process that had collected them died
                expected, others = quiet.obtain_samples(k)
                assert bits(batch) == bits(expected)
                assert repr(episodes.to_plain()) == repr(others.to_plain())
        assert sampler.metrics()["faults/restarts"] == 3
        assert rows.compare(config, 3, range(2), cut=3 * (4 * 6 + 2)) > 40
    finally:
        sampler.shutdown()
        quiet.shutdown()


@pytest.mark.parametrize("kind", ["one agent", "parallel", "turns"])
def test_a_worker_that_dies_as_an_evaluation_begins_plays_its_share(kind: str) -> None:
    """The one in its place is told the episodes again: an evaluation waited for ever for those of the dead."""
    config = echo_config() if kind == "one agent" else echoes(kind, DEALT)
    sampler = ps.CpuSampler(2, 4, workers=2).build(config, 3)
    try:
        sampler.initialize(EchoAgent(sampler.spec) if kind == "one agent" else agents_of(sampler))
        sampler.obtain_samples(0)
        expected = repr(sampler.evaluate_agent(1, 6).to_plain())
        pid = sampler.pool._workers.workers[1].child.pid
        os.kill(pid, signal.SIGSTOP)  # it dies of the call that opens the evaluation
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        found = sampler.evaluate_agent(1, 6)
        killer.join()
        assert repr(found.to_plain()) == expected
        assert sampler.metrics()["faults/restarts"] == 1
    finally:
        sampler.shutdown()
