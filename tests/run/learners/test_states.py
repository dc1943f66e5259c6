from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.tree import tree_leaves
from penstock.run.learners.states import joined, part
from tests.learn.ranks import bounds

pytestmark = pytest.mark.usefixtures("forked")

LSTM = ps.PPO(net=ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=4))
SAMPLERS: dict[str, Any] = {
    "serial": lambda B: ps.SerialSampler(T=8, B=B, max_decorrelation_steps=5),
    "async": lambda B: ps.AsyncSampler(ps.SerialSampler(T=8, B=B), depth=1),
}


def started(settings: Any, slots: slice, total: int) -> Any:
    live = settings.build("CartPole-v1", 3, first_slot=slots.start, total_slots=total)
    live.initialize(LSTM.build(live.spec, seed=1).agent)
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
        columns = {name: x[order] for name, x in kept["episodes"].pop("columns").items()}
        kept["episodes"] = {name: x[order] for name, x in kept["episodes"].items()} | {"columns": columns}
    return state


@pytest.mark.parametrize(
    ("kind", "batches"), [("serial", 0), ("serial", 7), pytest.param("async", 0, marks=pytest.mark.slow), ("async", 7)]
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
        blank = lives[1].blank_batch()
        assert alike(by_slot(joined(parts, slots, blank)), whole)
        for rank, own in enumerate(parts if batches else []):
            assert alike(part(whole, rank, slots, blank), own)
    finally:
        for live in lives:
            live.shutdown()


@pytest.mark.parametrize("kind", ["serial", "async"])
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
        live.load_state_dict(part(state, 1, slots, live.blank_batch()))
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
        blank = lives[1].blank_batch()
        assert alike(joined(parts, slots, blank), whole)
        for rank, own in enumerate(parts):
            found = part(whole, rank, slots, blank)
            assert alike({**found, "steps": 0}, {**own, "steps": 0})
            assert found["steps"] == (whole["steps"] if rank == 0 else 0)
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
        blank = lives[0].blank_batch()
        whole = joined(states, slots, blank)
        assert whole["pool"]["faults"] == {"signal": 3}
        assert whole["out_of_bounds"] == 10
        back = [part(whole, rank, slots, blank) for rank in range(2)]
        assert [x["pool"]["faults"] for x in back] == [{"signal": 3}, {}]
        assert [x["out_of_bounds"] for x in back] == [10, 0]
    finally:
        for live in lives:
            live.shutdown()


def test_other_numbers_of_slots_and_unknown_forms_are_refused() -> None:
    live = started(ps.SerialSampler(T=4, B=2), slice(0, 2), 2)
    try:
        live.obtain_samples(0)
        state, blank = live.state_dict(), live.blank_batch()
    finally:
        live.shutdown()
    with pytest.raises(ps.CheckpointError, match=r"holds 2 slots; this run has sampler\.B=3 over all learners"):
        part(state, 0, bounds((1, 2)), blank)
    own = joined([{"mine": 1}, {"mine": 2}], bounds((1, 1)), blank)
    assert part(own, 1, bounds((1, 1)), blank) == {"mine": 2}
    with pytest.raises(ps.CheckpointError, match=r"samplers of 2 learners.*run\.learners=3: go on with as many"):
        part(own, 0, bounds((1, 1, 1)), blank)
