"""What the storage refuses, how much it takes, and that a gap, a fault or a file changes nothing of what is shown."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import penstock as ps
from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs.make import EnvConfig
from penstock.envs.toy import PixelCatch
from penstock.replay import room
from penstock.replay.columns import FrameColumn, ring_slices
from penstock.replay.replay import Replay, ReplaySettings
from penstock.replay.storage import Storage
from penstock.replay.view import Sequences, Transitions
from penstock.samplers.serial import SerialSampler
from tests.replay.oracle import INFO, SPEC, STATE, random_batches

ATARI = EnvSpec(LeafSpec("box", (4, 84, 84), "uint8", 0.0, 255.0), LeafSpec("discrete", (), "int64", sizes=(6,)))


def one(**others: Any) -> SampleBatch:
    """A random batch of 4 rows of 3 slots."""
    return next(random_batches(0, 4, 3, 1, **others))[0]


def stored(capacity: int, **others: Any) -> Replay:
    return Replay(SPEC, ReplaySettings(capacity=capacity, **others), Transitions())


@pytest.mark.parametrize("index", ["uniform", "prioritized"])
def test_a_million_atari_transitions_fit_into_7_3_gb(index: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "free_memory", lambda: 10**11)
    replay = Replay(ATARI, ReplaySettings(deduplicate_frames=True, index=index), Transitions(3))
    replay.prepare(4, 8)  # pages that are never written cost nothing
    assert 7.05e9 < replay.bytes < 7.1e9
    assert "replay of 1,000,0" in replay.describe() and " GB in memory, " in replay.describe()


def test_bytes_are_those_of_the_arrays_and_none_is_float64():
    storage = Storage(SPEC, 20, 3, info={"['deep']['x']": INFO["deep"]["x"]}, state=STATE, state_every=4, episodes=True)
    assert storage.bytes == sum(x.nbytes for x in storage.arrays.values())
    assert {x.dtype for x in storage.arrays.values()} <= {
        np.dtype(x) for x in (np.float32, np.uint8, np.int64, np.bool_)
    }
    assert storage.arrays["obs['v']"].dtype == storage.arrays["state['c']"].dtype == np.float32


def test_what_does_not_fit_is_refused_with_a_capacity_that_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "free_memory", lambda: 1_000_000)
    with pytest.raises(
        ConfigError, match=r"replay of .* needs .* GB; free is 0.001 GB of memory; use replay.capacity <= \d+"
    ) as seen:
        stored(1_000_000).prepare(4, 3)
    fits = int(str(seen.value).split("replay.capacity <= ")[1].split(",")[0])
    assert 3_000 < fits < 20_000
    stored(fits).prepare(4, 3)
    with pytest.raises(ConfigError):
        stored(int(fits * 1.3)).prepare(4, 3)


def test_files_leave_nothing_behind_and_are_not_shared(tmp_path: Path):
    batch = one()
    replays = [stored(90, dir=str(tmp_path)) for _ in range(2)]
    for replay in replays:
        replay.append(batch)
        batch.prev_reward[...] += 1
    assert not list(tmp_path.iterdir())
    rewards = [replay.arrays()["prev_reward"] for replay in replays]
    assert (rewards[1][:4] == rewards[0][:4] + 1).all()
    with pytest.raises(ConfigError, match=r"replay.dir='/proc/nowhere'"):
        stored(90, dir="/proc/nowhere").prepare(4, 3)


def test_a_full_disk_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"No space left on device; use replay.capacity <= \d+"):
        stored(90, dir=str(tmp_path)).prepare(4, 3)


@pytest.mark.parametrize(("capacity", "batch"), [(15, (4, 3)), (12, (4, 3)), (90, (40, 3))])
def test_a_ring_too_short_for_a_batch_is_refused_with_the_length_it_needs(capacity: int, batch: tuple[int, int]):
    with pytest.raises(ConfigError, match=r"use replay.capacity >= \d+") as seen:
        stored(capacity).prepare(*batch)
    enough = int(str(seen.value).split(">= ")[1])
    stored(enough).prepare(*batch)
    with pytest.raises(ConfigError):
        stored(enough - 3).prepare(*batch)


def test_batches_keep_their_slots_and_stay_shorter_than_the_ring():
    replay = stored(60)
    replay.append(one())
    with pytest.raises(ConfigError, match="B must stay the same"):
        replay.append(next(random_batches(0, 4, 2, 1))[0])
    with pytest.raises(ConfigError, match=r"T=30, B=3 .* use replay.capacity >= \d+"):
        replay.append(next(random_batches(0, 30, 3, 1))[0])


def test_states_must_be_recorded_where_sequences_begin():
    view = Sequences(every=6, burn_in=2, train=4)
    with pytest.raises(ConfigError, match=r"sampler.T=4 rows, and sequences begin every 6"):
        Replay(SPEC, ReplaySettings(capacity=90), view, state=STATE).prepare(4, 3)
    replay = Replay(SPEC, ReplaySettings(capacity=90), view)  # no state, nothing to record
    for batch, _ in random_batches(1, 4, 3, 5):
        replay.append(batch)
    assert len(replay)


def test_frames_that_are_no_stack_are_refused():
    replay = stored(90, deduplicate_frames=True)
    batch = one()
    batch.obs["image"][2, :, 1] ^= 1
    with pytest.raises(ConfigError, match="deduplicate_frames=False"):
        replay.append(batch)
    batch = one()
    batch.first[0] = True
    batch.obs["image"][0, :, 0] ^= 1  # neither the first frame nor zeros
    with pytest.raises(ConfigError, match="deduplicate_frames=False"):
        stored(90, deduplicate_frames=True).append(batch)
    vector = EnvSpec(LeafSpec("box", (4,), "float32"), ATARI.action)
    with pytest.raises(ConfigError, match="no observation is a stack"):
        Replay(vector, ReplaySettings(deduplicate_frames=True), Transitions()).prepare(4, 8)


def test_a_stack_of_an_absent_agent_that_comes_back_is_rebuilt_or_refused():
    """A valid row after rows that are not, without a new episode: its frames are in no row before it."""
    replay = stored(90, deduplicate_frames=True)
    with pytest.raises(ConfigError, match="deduplicate_frames=False"):
        for batch, _ in random_batches(3, 4, 3, 12, absences=True):
            replay.append(batch)


@pytest.mark.parametrize("zeros", [False, True])
def test_stacks_are_rebuilt_from_the_padding_that_was_seen(zeros: bool):
    """By hand: two slots, stacks of 3, one opens in row 0 and one in row 1; frames are numbered."""
    column = FrameColumn("x", 6, 2, (3, 1, 1), np.uint8)
    column.bind({name: np.zeros(shape, dtype) for name, (shape, dtype) in column.plan.items()})
    pad = [0, 0] if zeros else [7, 7]
    left = [[5, 5, 5] if not zeros else [0, 0, 5], [5, 5, 6] if not zeros else [0, 5, 6], [5, 6, 8]]
    right = [[1, 2, 3], [*pad, 7], [pad[0], 7, 9]]
    rows = np.array([left, right], np.uint8).swapaxes(0, 1)[..., None, None]
    first = np.array([[True, False], [False, True], [False, False]])
    valid = np.array([[True, False], [True, True]])
    column.skip(2, 2, rows[0])
    column.write(2, rows, first, valid)
    for t in range(3):
        read = column.read((t + 2) * 2 + np.arange(2))
        np.testing.assert_array_equal(read, rows[t])
    assert column.zeros is zeros


@pytest.mark.parametrize("padding", ["zero", "reset"])
def test_stacks_of_colours_are_kept_frame_by_frame_as_well(padding: Any):
    stacked = functools.partial(gym.wrappers.FrameStackObservation, stack_size=3, padding_type=padding)
    sampler = SerialSampler(T=8, B=2).build(EnvConfig(PixelCatch, {"layout": "hwc", "scale": 1}, (stacked,)), seed=0)
    sampler.initialize(ps.DQN().build(sampler.spec).agent)
    whole, frames = (
        Replay(sampler.spec, ReplaySettings(capacity=100, deduplicate_frames=on), Transitions()) for on in (False, True)
    )
    for itr in range(6):
        batch, _ = sampler.obtain_samples(itr)
        for replay in (whole, frames):
            replay.append(batch)
    sampler.shutdown()
    rng = np.random.default_rng(0)
    assert frames.bytes < 0.4 * whole.bytes
    for _ in range(5):
        drawing, x = frames.sample(16, rng)
        assert x.inputs.obs.shape == (16, 3, 8, 8, 3)
        np.testing.assert_array_equal(x.inputs.obs, whole.read(drawing).inputs.obs)


@pytest.mark.parametrize("pad", [0, 7])
def test_an_episode_that_opens_in_the_last_row_goes_on_in_the_next_batch(pad: int):
    """The padding is not known then, as the row was not used yet; found by random layouts."""
    column = FrameColumn("x", 6, 1, (3, 1, 1), np.uint8)
    column.bind({name: np.zeros(shape, dtype) for name, (shape, dtype) in column.plan.items()})
    rows = np.array([[[1, 2, 3]], [[pad, pad, 7]], [[pad, 7, 8]]], np.uint8)[..., None, None]
    column.skip(2, 2, rows[0])
    column.write(2, rows[:2], np.array([[False], [True]]), np.array([[False]]))
    valid = np.array([True])
    assert column.zeros is None and column.goes_on(3, rows[1], valid) and not column.goes_on(3, rows[2], valid)
    column.write(3, rows[1:], np.array([[True], [False]]), valid[None])
    assert column.zeros is (pad == 0) and column.goes_on(4, rows[2], valid)
    np.testing.assert_array_equal(column.read(np.array([4]))[0], rows[2, 0])


def test_a_ring_is_written_in_at_most_two_parts():
    assert ring_slices(5, 3, 10) == [(slice(5, 8), slice(0, 3))]
    assert ring_slices(18, 4, 10) == [(slice(8, 10), slice(0, 2)), (slice(0, 2), slice(2, 4))]
    assert ring_slices(3, 0, 10) == [(slice(3, 3), slice(0, 0))]
