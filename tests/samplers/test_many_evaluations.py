"""Evaluations of many agents with any number of slots and episodes, and env steps counted from the rows at hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.envs.toy import EchoAgents, EchoTurns
from penstock.samplers.live import LiveSampler

PPO = ps.PPO(net=ps.Net(hidden=(4,)))
TWO = ps.Policies({"a": PPO, "b": PPO}, {"agent_0": "a", "agent_1": "b", "agent_2": "b"})
ENVS = {"parallel": lambda: EchoAgents(3, 6), "turns": lambda: EchoTurns(3, 6)}
SLOTS, EPISODES = range(1, 14), range(1, 21)
OTHERS: dict[str, Callable[[int], Any]] = {
    "cpu": lambda B: ps.CpuSampler(T=4, B=B, workers=min(B, 2)),
    "gpu": lambda B: ps.GpuSampler(T=4, B=B, workers=min(B, 2)),
    "alternating": lambda B: ps.AlternatingSampler(T=4, B=max(B, 2), workers=min(B, 2)),
    "runners": lambda B: ps.RunnerSampler(runners=2, inner=ps.SerialSampler(T=4, B=B), backend="in-process"),
    "async": lambda B: ps.AsyncSampler(inner=ps.SerialSampler(T=4, B=B), depth=1),
}


def slow_steps(batch: Any, turns: bool, environments: int) -> int:
    """Steps of environments: rows in which some agent acted, one environment after the other; of turns every move."""
    if turns:
        return sum(int(part.valid[t, b]) for part in batch.values() for t in range(4) for b in range(part.spec.B))
    acted = np.zeros((4, environments), bool)
    for part in batch.values():
        seats = part.spec.B // environments
        for t, b in np.argwhere(part.valid):
            acted[t, b // seats] = True
    return int(acted.sum())


def check(settings: Any, kind: str, numbers: Any) -> None:
    """Batches and evaluations of a sampler, with each of some numbers of episodes and slots."""
    live = settings.build(TWO.seat(ENVS[kind]), seed=0)
    try:
        policies = TWO.build(live.specs)
        live.initialize(policies.agents)
        for itr in range(3):
            batch, _ = live.obtain_samples(itr)
            assert batch.environments == (None if kind == "turns" else live.batch_spec.B)
            assert batch.env_steps == slow_steps(batch, kind == "turns", live.batch_spec.B) > 0
        for episodes, slots in numbers:
            found = live.evaluate_agent(2, episodes=episodes, slots=slots)
            assert len(found) == episodes and found.parts is not None
            assert found.parts.policy.shape == (episodes, 3) and (found.length >= 1).all()
    finally:
        live.shutdown()


@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("B", SLOTS)
def test_any_number_of_slots_and_episodes(B: int, kind: str) -> None:
    """A diagonal through the square of slots and episodes; all of it is slow."""
    check(ps.SerialSampler(T=4, B=B), kind, [(1 + (7 * B) % 20, B), (20 - B, 16)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("B", SLOTS)
def test_every_number_of_slots_and_episodes(B: int, kind: str) -> None:
    check(ps.SerialSampler(T=4, B=B), kind, itertools.product(EPISODES, (B, 16)))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("name", OTHERS)
def test_every_number_in_other_samplers(name: str, kind: str) -> None:
    for B in SLOTS:
        check(OTHERS[name](B), kind, [(episodes, 16) for episodes in (1, 2, B, 19, 20)])


@pytest.mark.parametrize("kind", ENVS)
def test_an_evaluations_batch_is_counted_by_its_own_slots(kind: str) -> None:
    """The batch knows its environments; the settings of the training sampler do not."""
    live: LiveSampler = ps.SerialSampler(T=4, B=6).build(TWO.seat(ENVS[kind]), seed=0)
    live.initialize(TWO.build(live.specs).agents)
    installed: Any = live._installed  # pyright: ignore[reportPrivateUsage]
    for environments in (1, 2, 3, 4, 5, 9, 12):  # of which some fit the batch of 6 and some do not
        parts = [batch[:, :0] for batch in installed.allocate()]
        rng = np.random.default_rng(environments)
        for p, seats in enumerate(installed.seating.seats):
            valid = rng.random((4, environments * seats)) < 0.4
            parts[p] = type(parts[p])(**{**vars(parts[p]), "valid": valid})
        batch = installed.together(parts)
        assert batch.environments == (None if kind == "turns" else environments)
        assert batch.env_steps == slow_steps(batch, kind == "turns", environments)
    live.shutdown()
