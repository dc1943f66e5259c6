"""Workers that die again and again, and then the process that owns them: no episode is played twice.

Only the pool's episode table counts the episodes that such deaths have cut, and those that were begun before any row.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.actors.backend import RunnerError
from penstock.core.batch import batches_of
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import TABLE_WORDS
from penstock.envs.toy import EchoAgents, EchoTurns
from penstock.envs.toy.plumbing import SeedEcho
from penstock.samplers.runners.settings import RunnerSampler
from penstock.testing.samplers import EchoAgent
from penstock.workers import faults
from tests.envs.pools.plain_loop import seated
from tests.samplers.many import Rows, agents_of
from tests.slow import slow

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:.*replaced"),
]

B, SEED = 2, 3


def strike(armed: str, method: str) -> None:
    """Kills this process if it is armed for a method, and disarms it."""
    try:
        os.unlink(armed + method)
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Armed:
    """Kills its process in `reset` or `step`, as it is told by a file."""

    def __init__(self, armed: str) -> None:
        super().__init__()
        self._armed = armed

    def reset(self, **kwargs: Any) -> Any:
        strike(self._armed, "reset")
        return super().reset(**kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, action: Any) -> Any:
        strike(self._armed, "step")
        return super().step(action)  # pyright: ignore[reportAttributeAccessIssue]


class One(Armed, SeedEcho): ...


class AtOnce(Armed, EchoAgents): ...


class InTurn(Armed, EchoTurns): ...


def config_of(kind: str, armed: Path) -> EnvConfig:
    kwargs = {"armed": str(armed)}
    if kind == "one":
        return EnvConfig(One, kwargs, info_keys=("echo",))
    return seated(AtOnce if kind == "parallel" else InTurn, kwargs=kwargs, info_keys=("echo",))


class Opened:
    """Takes down which episode opens in each slot, for each of its agents."""

    def __init__(self) -> None:
        self.opened: dict[tuple[int, int], list[int]] = defaultdict(list)

    def take(self, batch: Any, episodes: Any, k: int) -> None:
        for out in batches_of(batch).values():
            seats = out.spec.B // B
            for t, b in np.argwhere(out.first[:-1] & out.valid).tolist():
                obs = out.obs[t, b]
                agent, episode = obs[:2] if batch is not out else (0, SeedEcho.place_of(obs)[0])
                self.opened[b // seats, int(agent)].append(int(episode))

    def compare(self, config: EnvConfig, seed: int, slots: range, cut: int) -> None:
        for where, episodes in self.opened.items():
            assert len(episodes) > 2
            assert len(set(episodes)) == len(episodes), f"slot and agent {where} began {episodes}"
        assert {slot for slot, _ in self.opened} == set(slots)


SETTINGS: dict[str, Any] = {
    "cpu": lambda T: ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=1), depth=1),
    "gpu": lambda T: ps.AsyncGpuSampler(ps.GpuSampler(T, B, workers=1), depth=0),
    "alternating": lambda T: ps.AsyncAlternatingSampler(ps.AlternatingSampler(T, B, workers=1), depth=2),
    "runner": lambda T: RunnerSampler(1, ps.CpuSampler(T, B, workers=1), "in-process", depth=1),
}


@pytest.mark.parametrize("T", [1, *slow(2)])
@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("kind", ["one", "parallel", "turns"])
@pytest.mark.parametrize("name", ["cpu", *slow("gpu", "alternating", "runner")])
def test_a_process_that_dies_after_its_workers_plays_no_episode_twice(
    name: str, kind: str, method: str, T: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(faults, "_FIRST_DELAY_S", 0.0)
    armed, config = tmp_path / "armed-", config_of(kind, tmp_path / "armed-")
    settings = SETTINGS[name](T)
    seen: Any = Opened() if kind == "one" else Rows(settings.depth)
    sampler = settings.build(config, SEED)
    try:
        sampler.initialize(EchoAgent(sampler.spec) if kind == "one" else agents_of(sampler))
        k = 0

        def collect(batches: int) -> None:
            nonlocal k
            for _ in range(batches):
                seen.take(*sampler.obtain_samples(k), k)
                k += 1

        collect(6)
        for _ in range(4):
            marker = Path(f"{armed}{method}")
            marker.touch()
            while marker.exists():
                collect(1)
            collect(3)
        assert sampler.metrics()["faults/restarts"] == 4
        if name == "runner":
            sampler.runners.lost(0, RunnerError("signal", "killed"))
        else:
            os.kill(sampler._workers.workers[0].child.pid, signal.SIGKILL)
        collect(40)
        seen.compare(config, SEED, range(B), cut=60)
    finally:
        sampler.shutdown()


@dataclass(frozen=True)
class Tableless(ps.SerialSampler):
    """Its pool keeps its episode table to itself, as one of a user's own has none."""

    def build(self, *args: Any, shared: Any = None, **kwargs: Any) -> Any:
        own: Any = SimpleNamespace(memory_fd=shared.memory_fd, activity=shared.activity)
        own.episode_table = lambda B, evaluation=False: np.zeros((B, TABLE_WORDS), np.int64)
        return super().build(*args, shared=own, **kwargs)


@pytest.mark.parametrize("T", [1, *slow(2)])
@pytest.mark.parametrize("kind", ["one", "parallel", "turns"])
@pytest.mark.parametrize("inner", [ps.SerialSampler, Tableless])
def test_a_process_that_dies_with_many_batches_waiting_plays_no_episode_twice(
    inner: Any, kind: str, T: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Random steps before the first batch have begun more episodes than it has rows; the batches ahead begin others."""
    monkeypatch.setattr(faults, "_FIRST_DELAY_S", 0.0)
    config, seen = config_of(kind, tmp_path / "never"), Opened()
    settings = inner(T, B, max_decorrelation_steps=0 if kind == "turns" or inner is Tableless else 150)
    sampler = ps.AsyncSerialSampler(settings, depth=12).build(config, SEED)
    try:
        sampler.initialize(EchoAgent(sampler.spec) if kind == "one" else agents_of(sampler))
        for k in range(60):
            seen.take(*sampler.obtain_samples(k), k)
            if k in (20, 21):
                sampler._workers.wait(lambda k=k: sampler._ready(k + 12))
                os.kill(sampler._workers.workers[0].child.pid, signal.SIGKILL)
        seen.compare(config, SEED, range(B), 0)
        assert sampler.metrics()["faults/restarts"] == 2
    finally:
        sampler.shutdown()
