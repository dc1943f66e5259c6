"""Environments of many agents in worker processes: the same batches wherever they step and act, and faults."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.envs.toy import EchoAgents, EchoTurns
from tests.samplers.many import Rows, agents_of, bits
from tests.samplers.test_many_agents import DEALT, THREE, echoes
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

B = 5
PLACED: dict[str, Any] = {
    "cpu-1": lambda T: ps.CpuSampler(T, B, workers=1),
    "cpu-3": lambda T: ps.CpuSampler(T, B, workers=3),
    "gpu-2": lambda T: ps.GpuSampler(T, B, workers=2),
    "alternating-2": lambda T: ps.AlternatingSampler(T, B, workers=2),
    "no-overlap-1": lambda T: ps.NoOverlapAlternatingSampler(T, B, workers=1),
    "async-serial": lambda T: ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=0),
    "async-gpu": lambda T: ps.AsyncGpuSampler(ps.GpuSampler(T, B, workers=2), depth=0),
    "gpu-3-of-3": lambda T: ps.GpuSampler(T, B, workers=1, groups=3),
}


def outcome(settings: Any, config: Any, batches: int, evaluate: bool) -> list[Any]:
    """Bits of batches, episodes and evaluations."""
    sampler = settings.build(config, 3, share=ps.Share(2))
    try:
        sampler.initialize(agents_of(sampler))
        found: list[Any] = []
        for k in range(batches):
            batch, episodes = sampler.obtain_samples(k)
            found.append((bits(batch), batch.env_steps, repr(episodes.to_plain())))
            if evaluate and k % 3 == 1:
                limit = 5 if k == 4 else 1_000
                found.append(repr(sampler.evaluate_agent(k, 5, deterministic=k % 2 == 0, max_steps=limit).to_plain()))
    finally:
        sampler.shutdown()
    return found


@pytest.mark.parametrize("names", [["cpu-1", "gpu-3-of-3"], *slow([*PLACED])], ids=["two", "all"])
@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_where_work_is_placed_changes_no_bit(kind: str, names: list[str]) -> None:
    config, T = echoes(kind, THREE), 6
    expected = outcome(ps.SerialSampler(T, B), config, 6, True)
    for name in names:
        found = outcome(PLACED[name](T), config, 6, True)
        for k, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert one == other, (name, k)


def _die(once: str) -> None:
    """Kills this process if a file is there, which it removes."""
    try:
        os.unlink(once)
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class DyingAgents(EchoAgents):
    def __init__(self, once: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._once = once

    def act(self, actions: Any) -> Any:
        if self.t == 4:
            _die(self._once)
        return super().act(actions)


class DyingTurns(EchoTurns):
    def __init__(self, once: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._once = once

    def play(self, agent: str, action: Any) -> None:
        if self.t == 4:
            _die(self._once)
        super().play(agent, action)


DYING = {"parallel": DyingAgents, "turns": DyingTurns}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "alternating"])
@pytest.mark.parametrize("kind", ["parallel", "turns"])
@pytest.mark.filterwarnings("ignore:worker")
def test_the_rows_before_a_death_are_kept_and_the_others_are_undisturbed(kind: str, name: str, tmp_path: Path) -> None:
    T, once = 5, tmp_path / "once"
    plain = echoes(kind, DEALT)
    config = replace(plain, env=DYING[kind], kwargs={**plain.kwargs, "once": str(once)})
    settings: Any = {"cpu": ps.CpuSampler, "alternating": ps.AlternatingSampler}[name](T, 4, workers=2)
    sampler, quiet = settings.build(config, 3), ps.SerialSampler(T, 4).build(plain, 3)
    try:
        for each in (sampler, quiet):
            each.initialize(agents_of(each))
        rows, deaths, disturbed = Rows(), 0, set[int]()
        for k in range(18):
            expected, _ = quiet.obtain_samples(k)
            if k in (3, 8, 13):
                once.touch()
            batch, episodes = sampler.obtain_samples(k)
            rows.take(batch, episodes, k)
            if k == 0:
                assert bits(batch) == bits(expected)
            for e in range(4):
                mine = {p: slice(e * n, e * n + n) for p, n in (("a", 2), ("b", 2))}
                same = all(
                    batch[p].valid[:, b].tobytes() == expected[p].valid[:, b].tobytes()
                    and batch[p].obs[:, b].tobytes() == expected[p].obs[:, b].tobytes()
                    for p, b in mine.items()
                )
                if not same:
                    disturbed.add(e)
            assert len(disturbed) <= (2 if k < 8 else 4), "environments of a worker that lives are disturbed"
        deaths = int(sampler.metrics()["faults/signal"])
        assert deaths == sampler.metrics()["faults/restarts"] == 3
        assert sampler.metrics()["faults/lost_steps"] > 0
        assert rows.compare(plain, 3, range(4), cut=deaths) > 100
    finally:
        sampler.shutdown()
        quiet.shutdown()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("parallel", "cpu-3"), ("turns", "alternating-2"), *slow(("parallel", "alternating-2"), ("turns", "cpu-3"))],
)
def test_a_resumed_run_goes_on_in_other_processes_bit_for_bit(kind: str, name: str) -> None:
    config = echoes(kind, THREE)
    whole, resumed = (settings.build(config, 2) for settings in (ps.SerialSampler(5, B), PLACED[name](5)))
    try:
        for each in (whole, resumed):
            each.initialize(agents_of(each))
        for k in range(7):
            whole.obtain_samples(k)
        resumed.load_state_dict(whole.state_dict())
        assert not resumed.cut_slots
        for k in range(7, 14):
            (one, episodes), (other, others) = whole.obtain_samples(k), resumed.obtain_samples(k)
            assert bits(one) == bits(other), k
            assert repr(episodes.to_plain()) == repr(others.to_plain())
        one, other = whole.state_dict(), resumed.state_dict()
        assert one["pool"]["episode"] == other["pool"]["episode"]
        whole.load_state_dict(other)
        assert bits(whole.obtain_samples(14)[0]) == bits(resumed.obtain_samples(14)[0])
    finally:
        whole.shutdown()
        resumed.shutdown()


@pytest.mark.parametrize(("kind", "depth", "before"), [("parallel", 1, 5), ("turns", 1, 5), ("turns", 2, 4)])
def test_an_asynchronous_run_is_resumed_with_its_waiting_batches(kind: str, depth: int, before: int) -> None:
    config, settings = echoes(kind, THREE), ps.AsyncSerialSampler(ps.SerialSampler(5, 3), depth=depth)
    whole, resumed = settings.build(config, 2), settings.build(config, 2)
    try:
        for each in (whole, resumed):
            each.initialize(agents_of(each))
        for k in range(before):
            whole.obtain_samples(k)
        resumed.load_state_dict(whole.state_dict())
        assert not resumed.cut_slots
        for k in range(before, before + 5):
            (one, episodes), (other, others) = whole.obtain_samples(k), resumed.obtain_samples(k)
            assert bits(one) == bits(other), k
            assert repr(episodes.to_plain()) == repr(others.to_plain())
    finally:
        whole.shutdown()
        resumed.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parallel", "turns"])
@pytest.mark.filterwarnings("ignore:worker")
def test_an_asynchronous_process_that_dies_goes_on_with_other_episodes(kind: str, tmp_path: Path) -> None:
    once, plain = tmp_path / "once", echoes(kind, DEALT)
    config = replace(plain, env=DYING[kind], kwargs={**plain.kwargs, "once": str(once)})
    sampler = ps.AsyncSerialSampler(ps.SerialSampler(6, 2), depth=0).build(config, 3)
    try:
        sampler.initialize(agents_of(sampler))
        rows = Rows()
        for k in range(12):
            if k == 4:
                once.touch()
            batch, episodes = sampler.obtain_samples(k)
            rows.take(batch, episodes, k)
        assert sampler.metrics()["faults/restarts"] == 1
        assert rows.compare(plain, 3, range(2), cut=40) > 50
    finally:
        sampler.shutdown()
