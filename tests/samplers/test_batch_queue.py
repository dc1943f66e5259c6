"""The queue of batches that samplers collect ahead of their learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.wire import decode, encode
from penstock.samplers.episodes import Episodes
from penstock.samplers.trackers.batch_queue import BatchQueue

SPEC = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(4,)))


def queue(depth: int, policies: int = 2) -> BatchQueue:
    """One whose buffers hold a batch of each policy, the second of twice the columns."""
    out = BatchQueue(depth)
    out.attach([[allocate_batch(SPEC, BatchSpec(3, 5 * (p + 1))) for p in range(policies)] for _ in range(depth + 2)])
    return out


def fill(batch: SampleBatch, number: int, version: int) -> None:
    batch.reward[...], batch.version[...], batch.valid[...] = number, version, True


def ended(slot: int) -> Episodes:
    one = np.array([slot])
    return Episodes(one * 0.5, one + 2, one * 0.25, one, one >= 0)


@pytest.mark.parametrize("first", [0, 3])
def test_depth_and_one_are_released_at_first_and_then_one_each_time(first: int) -> None:
    ahead = queue(2)
    assert ahead.release(first, first) == range(first, first + 3)
    assert (ahead.first, ahead.next, ahead.released) == (first, first, first + 3)
    for itr in range(first, first + 4):
        assert [*ahead.release(itr, itr)] == ([] if itr == first else [itr + 2])
        assert ahead.versions[itr] == max(itr - 2, first)
        ahead.waiting[itr] = ended(itr)
        assert ahead.take().slot.tolist() == [itr]
        assert itr not in ahead.versions and not ahead.waiting


def test_without_depth_every_batch_is_released_when_it_is_wanted() -> None:
    ahead = queue(0)
    for itr in range(3):
        assert ahead.release(itr, itr) == range(itr, itr + 1)
        ahead.waiting[itr] = Episodes()
        ahead.take()
        assert ahead.released == ahead.next == itr + 1


@pytest.mark.parametrize("wrong", [4, 6, 0])
def test_another_batch_than_the_next_is_refused_and_changes_nothing(wrong: int) -> None:
    ahead = queue(1)
    ahead.release(4, 4)
    ahead.waiting[4] = Episodes()
    ahead.take()
    with pytest.raises(ConfigError, match=rf"obtain_samples\({wrong}\), but batch 5 is next; .*obtain_samples\(5\)"):
        ahead.release(wrong, wrong)
    assert (ahead.next, ahead.released, ahead.versions) == (5, 6, {5: 4})


def test_what_was_released_to_one_that_is_lost_is_released_again() -> None:
    ahead = queue(1)
    ahead.release(0, 7)
    ahead.forget()
    assert not ahead.versions
    assert ahead.release(0, 8) == range(2)
    assert ahead.versions == {0: 8, 1: 8}


def test_buffers_are_taken_in_turn() -> None:
    ahead = queue(1)
    assert ahead.buffers == 3
    assert ahead.buffer(1) is ahead.buffer(4) is not ahead.buffer(2)
    assert queue(0).buffers == 2 and BatchQueue(4).buffers == 0


def test_the_lag_is_that_of_the_batch_handed_out_last_and_stays_where_there_are_no_rows() -> None:
    ahead = queue(1)
    ahead.release(0, 0)
    for policy, batch in enumerate(ahead.buffer(0)):
        fill(batch, 0, 10 * policy)
    ahead.waiting = {0: Episodes(), 1: Episodes()}
    ahead.take()
    ahead.measure(12)
    mean = (12 * 15 + 2 * 30) / 45
    expected = {"sampler/lag": pytest.approx(mean), "sampler/lag_min": 2.0, "sampler/lag_max": 12.0}
    assert ahead.lag == expected
    ahead.take()
    ahead.measure(20)  # batch 1 has no valid row
    assert ahead.lag == expected


def collected(depth: int) -> BatchQueue:
    """After two batches were handed out, with `depth` that wait."""
    ahead = queue(depth)
    for itr in range(2):
        ahead.release(itr, itr)
        ahead.waiting[itr] = ended(itr)
        ahead.take()
    for itr in range(ahead.next, ahead.released):
        for batch in ahead.buffer(itr):
            fill(batch, itr, itr - depth)
        ahead.waiting[itr] = ended(itr)
    return ahead


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_state_has_numbers_and_copies_of_the_batches_that_wait(depth: int) -> None:
    one, other = collected(depth), queue(depth)
    state: dict[str, Any] = decode(encode(one.state_dict({"mine": 3}, np.arange(5))))
    assert state["inner"] == {"mine": 3} and state["opened"].tolist() == [0, 1, 2, 3, 4]
    assert [*state["waiting"]] == [str(itr) for itr in range(2, 2 + depth)]
    other.check(state)
    other.load_state_dict(state)
    assert (other.next, other.released) == (one.next, one.released) == (2, 2 + depth)
    for itr in range(2, 2 + depth):
        assert all((batch.reward == itr).all() and batch.valid.all() for batch in other.buffer(itr))
        assert other.release(itr, itr) == range(itr + depth, itr + depth + 1)
        assert other.take().slot.tolist() == [itr]


def test_the_copies_of_a_state_are_not_the_buffers() -> None:
    ahead = collected(1)
    state = ahead.state_dict(None, None)
    before = [x.copy() for x in state["waiting"]["2"]["rows"]]
    for batch in ahead.buffer(2):
        fill(batch, 99, 99)
    assert all(np.array_equal(x, y) for x, y in zip(state["waiting"]["2"]["rows"], before))


def test_states_of_other_depths_are_refused() -> None:
    state = collected(2).state_dict(None, None)
    with pytest.raises(CheckpointError, match=r"holds 2 batches ahead; this sampler has depth=1"):
        queue(1).check(state)
    with pytest.raises(CheckpointError, match=r"holds 0 batches ahead; this sampler has depth=3"):
        queue(3).check({"collected": True})
    queue(0).check({"collected": True})


def test_arrays_of_another_layout_are_refused() -> None:
    state = collected(1).state_dict(None, None)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        queue(1, policies=1).load_state_dict(state)
