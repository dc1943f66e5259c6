"""The state of a pool as data, its groups, and the members that a pool of one's own may leave out."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import EnvContractError
from penstock.core.wire import encode
from penstock.envs.pools.calls import CallRecord
from penstock.envs.pools.pool import PER_SLOT, EnvPool, EpisodeLog, Group, PoolState, slots_of


def a_state(B: int, at: int = 0) -> PoolState:
    """Every slot has values of its own."""
    numbers = range(at, at + B)
    return PoolState(
        episode=[10 + n for n in numbers], ended=[n % 2 == 0 for n in numbers], idle=[n % 3 == 0 for n in numbers],
        left=[None if n == 1 else 20 + n for n in numbers], began=[30 + n for n in numbers],
        snapshot=[{"n": n} for n in numbers], tick=7, restarts=2, faults={"signal": 1},
    )  # fmt: skip


def test_the_state_of_some_slots() -> None:
    part = a_state(5).of(slice(1, 3))
    assert part == PoolState(
        episode=[11, 12], ended=[False, True], idle=[False, False], left=[None, 22], began=[31, 32],
        snapshot=[{"n": 1}, {"n": 2}], tick=7,
    )  # fmt: skip


def test_a_state_that_is_split_and_joined_is_the_same() -> None:
    whole, slots = a_state(5), [slice(0, 2), slice(2, 5)]
    parts = whole.split(slots)
    assert parts == [replace(whole.of(at), restarts=2, faults=faults) for at, faults in zip(slots, ({"signal": 1}, {}))]
    assert PoolState.join(parts) == whole


def test_joined_states_sum_faults_and_count_steps_by_one_tick() -> None:
    one, other = a_state(2), replace(a_state(3, at=2), tick=5, restarts=4, faults={"signal": 2, "timeout": 1})
    joined = PoolState.join([one, other])
    assert joined.began == [30, 31, 34, 35, 36] and joined.tick == 7
    assert (joined.restarts, joined.faults) == (4, {"signal": 3, "timeout": 1})
    assert joined.episode == [10, 11, 12, 13, 14] and joined.snapshot == [{"n": n} for n in range(5)]
    assert one.faults == {"signal": 1}, "the parts stay"


def test_parts_put_back_are_the_whole() -> None:
    whole, other = a_state(5), a_state(5, at=100)
    for slots in (slice(3, 5), slice(0, 1), slice(1, 3)):
        other.put(slots, whole.of(slots))
    assert [getattr(other, name) for name in PER_SLOT] == [getattr(whole, name) for name in PER_SLOT]
    other.put(slice(1, 2), a_state(1, at=50))
    assert other.episode == [10, 60, 12, 13, 14]
    assert (other.tick, other.restarts, other.faults) == (7, 2, {"signal": 1}), "what is not by slot stays"


def test_every_list_is_by_slot_and_nothing_else_is() -> None:
    assert {f.name for f in fields(PoolState) if isinstance(getattr(a_state(2), f.name), list)} == {*PER_SLOT, "calls"}


def test_calls_are_by_slot_and_empty_where_no_slot_had_any() -> None:
    record = CallRecord("set", "level", encode(((3,), {})), False, 2, -1, False)
    whole = replace(a_state(4), calls=[[], [record], [], []])
    assert whole.of(slice(1, 3)).calls == [[record], []] and a_state(4).of(slice(1, 3)).calls == []
    parts = whole.split([slice(0, 1), slice(1, 4)])
    assert PoolState.join(parts) == whole and PoolState.join([a_state(1), parts[1]]).calls == [[], [record], [], []]
    assert PoolState.join([a_state(1), a_state(1)]).calls == []
    other = a_state(4)
    other.put(slice(2, 4), whole.of(slice(0, 2)))
    assert other.calls == [[], [], [], [record]]
    other.put(slice(3, 4), a_state(1))
    assert other.calls == [[], [], [], []]
    assert PoolState.from_plain(whole.to_plain()) == whole and "calls" not in a_state(2).to_plain()


def test_plain_data_and_back() -> None:
    state = a_state(3)
    plain = state.to_plain()
    assert {*plain} == {"episode", "ended", "idle", "left", "began", "snapshot", "tick", "restarts", "faults"}
    assert PoolState.from_plain(plain) == state
    assert PoolState.from_plain(PoolState().to_plain()) == PoolState()


def test_fields_that_earlier_versions_did_not_write_are_as_in_a_new_run() -> None:
    """0.1.0 wrote neither `restarts` nor `faults` for single environments, and only `restarts` for native ones."""
    plain = {name: value for name, value in a_state(2).to_plain().items() if name not in ("restarts", "faults")}
    state = PoolState.from_plain(plain)
    assert (state.restarts, state.faults, state.tick, state.episode) == (0, {}, 7, [10, 11])
    native = PoolState.from_plain({"restarts": 3})
    assert native == PoolState(restarts=3)
    native.faults["signal"] = 1
    assert PoolState().faults == {}, "two states share nothing"


def a_pool(*groups: tuple[int, slice]) -> Any:
    return SimpleNamespace(groups=tuple(Group(policy, slots) for policy, slots in groups))


def test_the_columns_of_each_policy() -> None:
    pool = a_pool((0, slice(0, 3)), (1, slice(0, 2)), (0, slice(3, 7)))
    assert slots_of(pool) == slots_of(pool, 0) == 7
    assert slots_of(pool, 1) == 2


class Least(EnvPool):
    """Only what has no default."""

    def __init__(self) -> None:
        self.groups = (Group(0, slice(0, 2)), Group(0, slice(2, 3)))


def test_what_a_pool_of_ones_own_need_not_write() -> None:
    pool, batches, states = Least(), [object()], {"h": 1}
    assert not pool.evaluation
    assert pool.place(batches, states) == (batches, states)  # pyright: ignore
    assert pool.evaluation_slots(16) == 16
    assert pool.warmup() == [([], [])] * 3
    assert pool.metrics() == {}
    with pytest.raises(EnvContractError, match=r"^slot 2: obs: got nan$"):
        pool.invalidate(2, 5, "slot 2: obs: got nan")


def test_episodes_that_ended_in_a_row_or_later_are_taken_out_of_the_log_of_some_environments() -> None:
    log = EpisodeLog.allocate(4, 3, 2)
    log.row[:], log.count[:] = [[0, 2, 4], [1, 3, 9], [4, 0, 0], [0, 2, 4]], [3, 2, 1, 3]  # what lies behind is old
    log.cut(slice(0, 3), 3)
    assert log.count.tolist() == [2, 1, 0, 3]
    log.cut(slice(3, 4), 0)
    assert log.count.tolist() == [2, 1, 0, 0]


def test_environments_whose_newest_episode_may_have_rows_that_are_not_valid_yet() -> None:
    log = EpisodeLog.allocate(4, 3, 2)
    log.count[:], log.marked[:] = [1, 2, 3, 0], [0, 2, 2, 1]
    assert [log.unmarked(slice(0, 4)), log.unmarked(slice(1, 3)), log.unmarked(slice(3, 4))] == [[0, 2], [2], []]
