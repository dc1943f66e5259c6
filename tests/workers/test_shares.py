"""Shares of a batch by hand: columns of workers, invalidated columns, and the activity of a worker that died."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock.core.batch import ROWS_AND_NEXT, SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.noise import env_seed
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.pools.messages import one_spec
from penstock.envs.pools.settings import MAKING, RESETTING, STEPPING
from penstock.envs.toy.plumbing import SeedEcho
from penstock.workers.shares import at_work, carry_columns, cut, even_split, mark_ends, part_of
from tests.workers.first_batches import TWO_KINDS, no_process_is_left, refuse

__all__ = ["no_process_is_left"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kind", TWO_KINDS)
def test_spaces_that_differ_between_workers_are_shown_side_by_side(kind: str, tmp_path: Path) -> None:
    claimed = str(tmp_path / "claimed")

    class OfThisProcess(SeedEcho):
        """Shows one number more in every process but the first that makes one."""

        def __init__(self) -> None:
            super().__init__()
            with contextlib.suppress(FileExistsError):
                os.symlink(str(os.getpid()), claimed)  # at once, or not at all
            if os.readlink(claimed) != str(os.getpid()):
                self.observation_space = gym.spaces.Box(0.0, 1.0, (4,))

    text = (
        r"(?s)differs between instances: one shows box\[[34]\].*another shows box\[[34]\].*the same in every instance"
    )
    refuse(kind, OfThisProcess, text)


# By hand.


@pytest.mark.parametrize(
    ("n", "parts", "sizes"),
    [(7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (6, 3, [2, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_sizes_differ_by_at_most_one_and_the_larger_come_first(n: int, parts: int, sizes: list[int]) -> None:
    assert even_split(n, parts) == sizes


def test_the_columns_of_each_worker_in_a_group() -> None:
    assert [part_of(slice(4, 11), 3, w) for w in range(3)] == [slice(4, 7), slice(7, 9), slice(9, 11)]
    assert [part_of(slice(4, 6), 3, w) for w in range(3)] == [slice(4, 5), slice(5, 6), None]


CONFIG = EnvConfig("CartPole-v1")


def a_spec(n: int) -> EnvSpec:
    return EnvSpec(LeafSpec("box", (n,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))


def test_specs_that_are_equal_are_one() -> None:
    assert one_spec([a_spec(3), a_spec(3)], CONFIG.name) == a_spec(3)


def test_specs_that_differ_are_shown_beside_each_other() -> None:
    with pytest.raises(ConfigError) as error:
        one_spec([a_spec(3), a_spec(3), a_spec(4)], CONFIG.name)
    assert str(error.value) == (
        "CartPole-v1 differs between instances: one shows box[3] float32 and takes discrete(2) int64, another shows "
        "box[4] float32 and takes discrete(2) int64; make its spaces the same in every instance"
    )


def a_batch(T: int = 3, B: int = 4) -> SampleBatch:
    """Every entry is its own number, every mark is set."""
    batch = allocate_batch(a_spec(1), BatchSpec(T, B), {}, None, ("echo",))
    for x in (batch.obs, batch.prev_action, batch.prev_reward, batch.info["env"]["echo"]):
        x[...] = np.arange(1, x.size + 1).reshape(x.shape)
    batch.action[...] = 1
    for x in (batch.first, batch.terminated, batch.truncated, batch.valid):
        x[...] = True
    return batch


def test_columns_are_invalidated_from_a_row_on_and_the_others_left_alone() -> None:
    """T = 3, B = 4: rows 1 and 2 of slots 1 and 2 are lost, four in all; obs stands still from row 1 on."""
    batch, before = a_batch(), a_batch()
    assert cut(batch, slice(1, 3), 1, np.int64(0)) == 4
    assert batch.obs[:, :, 0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 6, 7, 12], [13, 6, 7, 16]]
    lost = [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1]]
    for x in (batch.terminated, batch.truncated, batch.valid, batch.action):
        assert x.astype(int).tolist() == lost
    assert batch.reward.tolist() == (before.reward * lost).tolist()
    assert batch.first.astype(int).tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1]]
    assert np.isfinite(batch.info["env"]["echo"]).astype(int).tolist() == lost
    for x, y in zip(tree_leaves(batch), tree_leaves(before)):
        assert x[:, [0, 3]].tobytes() == y[:, [0, 3]].tobytes()


def test_nothing_is_lost_where_the_last_row_is_whole() -> None:
    batch = a_batch()
    assert cut(batch, slice(0, 4), 3, np.int64(0)) == 0
    assert all(x.tobytes() == y.tobytes() for x, y in zip(tree_leaves(batch), tree_leaves(a_batch())))


def test_rows_in_which_agents_ended_become_valid_in_some_columns() -> None:
    batch = a_batch()
    for x in (batch.terminated, batch.truncated, batch.valid):
        x[...] = False
    batch.terminated[1, :2], batch.truncated[2, 1:3], batch.valid[0] = True, True, True
    mark_ends(batch, slice(1, 3))
    assert batch.valid.astype(int).tolist() == [[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]


@pytest.mark.parametrize("same", [False, True])
def test_row_t_of_some_columns_becomes_row_0_of_the_next_batch(same: bool) -> None:
    source, before = a_batch(), a_batch()
    source.first[-1] = [False, True, False, True]
    out = source if same else allocate_batch(a_spec(1), BatchSpec(3, 4), {}, None, ("echo",))
    carry_columns(source, out, slice(1, 3))
    for name in ROWS_AND_NEXT:
        assert getattr(out, name)[0, 1:3].tolist() == getattr(source, name)[-1, 1:3].tolist()
        untouched = getattr(before, name) if same else 0 * getattr(before, name)
        assert getattr(out, name)[0, [0, 3]].tolist() == untouched[0, [0, 3]].tolist()
    assert out.first[0, 1:3].tolist() == [True, False]
    assert out.obs[0, 1:3, 0].tolist() == [14, 15]


@pytest.mark.parametrize(
    ("activity", "episode_table", "action", "text"),
    [
        ((2, MAKING, 0, 4, 0, 0), (-1, -1, 0), None, "slot 6 of CartPole-v1 in its construction"),
        ((2, MAKING, 0, 4, 0, 1), (-1, -1, 0), None, "evaluation slot 6 of CartPole-v1 in its construction"),
        (
            (1, RESETTING, 9, 4, 30, 0), (3, -1, 30), None,
            f"slot 5 of CartPole-v1 in reset() at episode 3, step 0, seed {env_seed(8, 5, 3)}",
        ),
        (
            (1, STEPPING, 9, 4, 30, 0), (3, -1, 19), np.int64(1),
            f"slot 5 of CartPole-v1 in step() at episode 3, step 10, seed {env_seed(8, 5, 3)}; last action 1",
        ),
        (
            (1, STEPPING, 9, 4, 30, 1), (-1, 2, 29), None,
            f"evaluation slot 5 of CartPole-v1 in step() at episode -1, step 0, seed {env_seed(8, 5, 0, True)}",
        ),
    ],
    ids=["making", "making to evaluate", "resetting", "stepping", "before an episode"],
)  # fmt: skip
def test_the_activity_of_a_worker_that_died(activity: Any, episode_table: Any, action: Any, text: str) -> None:
    assert at_work("CartPole-v1", 8, activity, episode_table, action) == text
