from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.tree import tree_leaves
from penstock.run.learners.shared_sampler import SharedSampler
from penstock.samplers.episodes import Episodes
from penstock.samplers.sampler import Divisible
from tests.learn.ranks import ThreadComm, bounds, on_ranks
from tests.samplers.many import agents_of
from tests.samplers.test_many_agents import THREE, echoes

pytestmark = pytest.mark.usefixtures("forked")

LSTM = ps.PPO(net=ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=4))
SAMPLERS: dict[str, Any] = {
    "serial": lambda B: ps.SerialSampler(T=8, B=B, max_decorrelation_steps=5),
    "async": lambda B: ps.AsyncSampler(ps.SerialSampler(T=8, B=B), depth=1),
    "rounds": lambda B: ps.RunnerSampler(B, ps.SerialSampler(T=8, B=1), backend="in-process"),
    "rounds ahead": lambda B: ps.RunnerSampler(B, ps.SerialSampler(T=8, B=1), backend="in-process", depth=2),
}


def started(settings: Any, slots: slice, total: int, env: Any = "CartPole-v1") -> Any:
    live = settings.build(env, 3, share=ps.Share(slots.start, total))
    live.initialize(LSTM.build(live.spec, seed=1).agent if env == "CartPole-v1" else agents_of(live))
    return live


def alike(one: Any, other: Any) -> bool:
    """Deep equality; lists and tuples are alike."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(x, other[name]) for name, x in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(alike(x, y) for x, y in zip(one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return one == other


def by_slot(state: Any) -> Any:
    """The state with episodes that wait in the order of their slots: samplers of shares do not know when each ended."""
    for kept in state.get("waiting", {}).values():
        order = np.argsort(kept["episodes"]["slot"], kind="stable")
        kept["episodes"] = Episodes(**kept["episodes"]).at(order).to_plain()
    return state


@pytest.mark.parametrize(
    ("kind", "batches"),
    [
        ("serial", 0),
        ("serial", 7),
        pytest.param("async", 0, marks=pytest.mark.slow),
        ("async", 7),
        ("rounds", 5),
        ("rounds ahead", 0),
        ("rounds ahead", 5),
    ],
)
def test_states_of_shares_are_that_of_one_sampler_and_back(kind: str, batches: int) -> None:
    slots = bounds((2, 1, 3))
    lives = [started(SAMPLERS[kind](6), slice(0, 6), 6)]
    lives += [started(SAMPLERS[kind](x.stop - x.start), x, 6) for x in slots]
    try:
        for itr in range(batches):
            for live in lives:
                live.obtain_samples(itr)
        whole, *parts = [by_slot(live.state_dict()) for live in lives]
        assert alike(by_slot(lives[1].join_states(parts)), whole)
        if batches:
            assert alike(lives[1].split_state(whole, slots), parts)
    finally:
        for live in lives:
            live.shutdown()


@pytest.mark.parametrize("turns", [False, True], ids=["parallel", "turns"])
@pytest.mark.parametrize("kind", ["serial", "async", "rounds ahead"])
def test_states_of_many_agents_are_divided_by_environments(kind: str, turns: bool) -> None:
    env, slots = echoes("turns" if turns else "parallel", THREE), bounds((2, 1))
    settings = SAMPLERS[kind] if kind != "serial" else lambda B: ps.SerialSampler(T=8, B=B)
    lives = [started(settings(3), slice(0, 3), 3, env)]
    lives += [started(settings(x.stop - x.start), x, 3, env) for x in slots]
    try:
        for itr in range(6):
            for live in lives:
                live.obtain_samples(itr)
        whole, *parts = [by_slot(live.state_dict()) for live in lives]
        for state in (
            (whole, *parts) if turns else ()
        ):  # ticks are those of each sampler, and no step is counted by them
            pool = state.get("inner", state)["pool"]
            pool["tick"], pool["began"] = 0, [0] * len(pool["began"])
        assert alike(by_slot(lives[2].join_states(parts)), whole)
        assert alike(lives[2].split_state(whole, slots), parts)
    finally:
        for live in lives:
            live.shutdown()


@pytest.mark.parametrize("kind", ["serial", "async", "rounds ahead"])
def test_a_sampler_goes_on_from_its_part(kind: str) -> None:
    slots = bounds((2, 4))
    whole = started(SAMPLERS[kind](6), slice(0, 6), 6)
    try:
        for itr in range(5):
            whole.obtain_samples(itr)
        state = whole.state_dict()
        following, _ = whole.obtain_samples(5)
        expected = [x.copy() for x in tree_leaves(following[:, 2:6])]
    finally:
        whole.shutdown()
    live = started(SAMPLERS[kind](4), slots[1], 6)
    try:
        live.load_state_dict(live.split_state(state, slots)[1])
        assert live.cut_slots == []
        batch, _ = live.obtain_samples(5)
        assert alike(tree_leaves(batch), expected)
    finally:
        live.shutdown()


def test_the_states_of_a_dataset(tmp_path: Path) -> None:
    from penstock.datasets.cutter import EpisodeCutter
    from penstock.datasets.writer import DatasetWriter

    source = started(ps.SerialSampler(T=64, B=4), slice(0, 4), 4)
    cutter = EpisodeCutter(4, [])
    with DatasetWriter(tmp_path / "data", source.spec, env="CartPole-v1") as writer:
        for itr in range(6):
            for episode in cutter.add(source.obtain_samples(itr)[0]):
                writer.append(episode)
    source.shutdown()
    slots = bounds((1, 3))
    settings = [ps.OfflineSampler(str(tmp_path / "data"), T=8, B=B) for B in (4, 1, 3)]
    lives = [started(x, at, 4) for x, at in zip(settings, [slice(0, 4), *slots])]
    try:
        for itr in range(4):
            for live in lives:
                live.obtain_samples(itr)
        whole, *parts = [live.state_dict() for live in lives]
        assert alike(lives[1].join_states(parts), whole)
        found = lives[1].split_state(whole, slots)
        assert alike([{**x, "steps": 0} for x in found], [{**x, "steps": 0} for x in parts])
        assert [x["steps"] for x in found] == [whole["steps"], 0]
    finally:
        for live in lives:
            live.shutdown()


def test_faults_are_counted_once() -> None:
    slots = bounds((1, 1))
    lives = [started(ps.SerialSampler(T=4, B=1), at, 2) for at in slots]
    try:
        for live in lives:
            live.obtain_samples(0)
        states = [live.state_dict() for live in lives]
        for n, state in enumerate(states):
            state["pool"]["faults"] = {"signal": n + 1}
            state["out_of_bounds"] = 10 * n
        whole = lives[0].join_states(states)
        assert whole["pool"]["faults"] == {"signal": 3}
        assert whole["out_of_bounds"] == 10
        back = lives[0].split_state(whole, slots)
        assert [x["pool"]["faults"] for x in back] == [{"signal": 3}, {}]
        assert [x["out_of_bounds"] for x in back] == [10, 0]
    finally:
        for live in lives:
            live.shutdown()


@pytest.mark.parametrize("kind", ["serial", "async"])
def test_other_numbers_of_slots_are_refused(kind: str) -> None:
    live = started(SAMPLERS[kind](2), slice(0, 2), 2)
    try:
        live.obtain_samples(0)
        state = live.state_dict()
        with pytest.raises(ps.CheckpointError, match=r"holds 2 slots; this run has sampler\.B=3 over all learners"):
            live.split_state(state, bounds((1, 2)))
    finally:
        live.shutdown()


def test_other_numbers_of_batches_ahead_are_refused() -> None:
    one = started(SAMPLERS["rounds ahead"](2), slice(0, 2), 2)
    other = started(SAMPLERS["async"](1), slice(0, 1), 2)
    try:
        one.obtain_samples(0)
        with pytest.raises(ps.CheckpointError, match="holds 2 batches ahead; this sampler has depth=1"):
            other.split_state(one.state_dict(), bounds((1, 1)))
    finally:
        one.shutdown()
        other.shutdown()


class Whole:
    """A sampler of a user's own that does not divide its state."""

    spec = batch_spec = None
    cut_slots = ()

    def __init__(self, rank: int) -> None:
        self.state = {"mine": rank}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_states_that_cannot_be_divided_are_kept_by_rank() -> None:
    def shared(comm: ThreadComm) -> Any:
        own: Any = Whole(comm.rank)
        return SharedSampler(own, comm, bounds([1] * comm.size))

    def work(comm: ThreadComm) -> Any:
        sampler = shared(comm)
        state = sampler.state_dict()
        sampler.inner.state = {}
        sampler.load_state_dict(state)
        return state, sampler.inner.state

    assert not isinstance(Whole(0), Divisible)
    (state, one), (same, other) = on_ranks(2, work)
    assert state == same == {"by_rank": [{"mine": 0}, {"mine": 1}]}
    assert (one, other) == ({"mine": 0}, {"mine": 1})
    with pytest.raises(ps.CheckpointError, match=r"samplers of 2 learners.*run\.learners=3: go on with as many"):
        on_ranks(3, lambda comm: shared(comm).load_state_dict(state))
