"""Start-up of slots by hand: random steps before the first batch, snapshots, and replays that fail."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import allocate_batch
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import BatchSpec
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import OpenEpisode
from penstock.envs.pools.serial import SerialPool
from penstock.envs.pools.settings import PoolSettings
from penstock.envs.pools.slot_envs import offers_state
from penstock.envs.pools.slot_start import random_steps, replay
from penstock.envs.toy import Counter, Echo


class Bare:
    """An environment with half of what a snapshot needs."""

    get_state = dict


def a_pool(env: Any, B: int = 2, episodes: Any = None, seed: int = 3) -> tuple[SerialPool, Any]:
    """With its first batch bound, in which every slot has been reset."""
    pool = SerialPool(EnvConfig(env), seed, slice(0, B), PoolSettings(episodes=episodes))
    out = allocate_batch(pool.spec, BatchSpec(4, B), {}, None, pool.info_keys)
    out.valid[...] = True
    pool.bind([out])
    return pool, out


def step(pool: SerialPool, out: Any, rows: range, action: int = 1) -> None:
    for row in rows:
        out.action[row] = action
        pool.send(0, row)
        pool.recv()


def test_a_state_needs_both_methods_of_the_outermost_wrapper() -> None:
    assert offers_state(Echo())
    assert not offers_state(Counter())
    assert not offers_state(Bare())


def test_a_snapshot_has_every_slot_and_the_state_of_its_environment() -> None:
    pool, out = a_pool(Echo, episodes=[5, 0])
    step(pool, out, range(3))
    state = pool.get_state()
    assert state.episode == [0, -1]
    assert state.idle == [False, True]
    assert state.left == pool.host.left
    assert state.tick == pool.host.tick == 3
    assert state.snapshot[0] == {"episode": 0, "t": 3}
    for name in ("episode", "over", "idle", "left", "began"):
        mine = state.ended if name == "over" else getattr(state, name)
        assert mine is not getattr(pool.host, name), "a view would go on with the pool"
    unlimited, _ = a_pool(Counter)
    assert unlimited.host.left == [math.inf] * 2
    assert unlimited.get_state().left == [None] * 2, "JSON knows no infinity"
    assert unlimited.get_state().snapshot == [None] * 2


@pytest.mark.parametrize("env", [Echo, Counter])
def test_what_was_snapped_is_restored_by_state_or_by_replay(env: Any) -> None:
    pool, out = a_pool(lambda: Echo() if env is Echo else Counter(terminate_at=9))
    step(pool, out, range(4))
    state = pool.get_state()
    other, again = a_pool(lambda: Echo() if env is Echo else Counter(terminate_at=9))
    again.obs[-1] = out.obs[-1]
    actions = [OpenEpisode(np.ones(4, np.int64))] * 2
    assert other.set_state(state, [again], [None, None] if env is Echo else actions) == []
    one, two = pool.host, other.host
    assert (two.tick, two.episode, two.began, two.left) == (4, one.episode, one.began, one.left)
    for each, batch in ((pool, out), (other, again)):
        each.bind([batch])
        step(each, batch, range(2))
    assert again.obs[:3].tolist() == out.obs[:3].tolist()


@pytest.mark.parametrize(
    "actions",
    [None, np.ones(3, np.int64), np.ones(5, np.int64), np.ones(9, np.int64)],
    ids=["not kept", "too few", "too many", "past the end"],
)
def test_a_slot_that_cannot_be_replayed_is_lost_and_the_others_are_not(actions: Any) -> None:
    pool, out = a_pool(lambda: Counter(terminate_at=9))
    step(pool, out, range(4))
    state = pool.get_state()
    other, _ = a_pool(lambda: Counter(terminate_at=9))
    episode = None if actions is None else OpenEpisode(actions)
    assert other.set_state(state, [out], [OpenEpisode(np.ones(4, np.int64)), episode]) == [1]
    assert other.host.over == [False, True], "it resets into its next episode"
    assert other.host.episode == state.episode


def test_a_slot_that_waits_for_its_reset_needs_no_replay() -> None:
    pool, out = a_pool(lambda: Counter(terminate_at=4))
    step(pool, out, range(4))
    state = pool.get_state()
    assert state.ended == [True] * 2
    other, _ = a_pool(lambda: Counter(terminate_at=4))
    assert other.set_state(state, [out], [None, None]) == []
    assert other.host.over == [True] * 2


def test_an_environment_that_fails_in_a_replay_is_lost() -> None:
    pool, out = a_pool(lambda: Counter(terminate_at=9))
    target = np.full_like(out.obs[0, 0], 2)
    assert replay(pool, 0, OpenEpisode(np.ones(2, np.int64)), target)
    assert not replay(pool, 0, OpenEpisode(np.ones(2, np.int64)), target + 1)
    assert replay(pool, 0, OpenEpisode(np.ones(8, np.int64)), target + 6)
    assert not replay(pool, 0, OpenEpisode(np.ones(9, np.int64)), target + 7), (
        "its episode has ended there, the record's had not"
    )

    def fails(b: int, action: Any) -> Any:
        raise IndexError("no such joint")

    pool.step_checked = fails  # type: ignore
    assert not replay(pool, 0, OpenEpisode(np.ones(2, np.int64)), target)


@pytest.mark.parametrize("slot", [0, 7])
def test_random_steps_are_as_many_as_the_noise_of_the_slot_says_and_cross_ends(slot: int) -> None:
    """Counter's reward is the step before, its observation the steps since the reset; each end costs one step."""
    limit = 20
    u = uniform(3, Purpose.DECORRELATE, 0, slice(slot, slot + 1), limit + 1, 1)[:, 0]
    steps = 1 + int(u[0, 0] * limit)
    pool, out = a_pool(lambda: Counter(terminate_at=4))
    actions, rewards = random_steps(pool, out, 1, 3, slot, limit)
    open_for = steps % 5  # four steps and a reset
    assert rewards == [float(t) for t in range(open_for)]
    drawn = [int(x >= 0.5) for x in u[1 : 1 + steps, 0]]
    assert [int(a) for a in actions] == drawn[steps - open_for :]
    assert out.obs[0, 1].item() == open_for
    assert out.obs[0, 0].item() == 0, "the other slot stays where it was"
    assert out.first[0, 1] == (open_for == 0)
    if open_for:
        assert out.prev_action[0, 1] == drawn[-1]
        assert out.prev_reward[0, 1] == open_for - 1
