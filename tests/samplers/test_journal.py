import zlib
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.pools.slot_start import thinned
from penstock.samplers.trackers.slots import Journal, JournalViews

CHOICE = LeafSpec("discrete", (), "int64", sizes=(100,))
ARM = LeafSpec("box", (2,), "float32")
SPEC = EnvSpec(ARM, {"arm": ARM, "pick": CHOICE})


def random_batches(rng: Any, T: int, B: int, count: int, openings: float) -> list[SampleBatch]:
    """Batches whose actions never repeat; `first` says where episodes open."""
    out: list[SampleBatch] = []
    for k in range(count):
        batch = allocate_batch(SPEC, BatchSpec(T, B))
        batch.action["pick"][...] = np.arange(T * B).reshape(T, B) + 1000 * k
        batch.action["arm"][...] = batch.action["pick"][..., None] + np.array([0.25, 0.5])
        batch.first[1:] = rng.random((T, B)) < openings
        batch.obs[...] = rng.random(batch.obs.shape)
        batch.prev_reward[...] = rng.random(batch.prev_reward.shape)
        if out:
            batch.first[0], batch.obs[0], batch.prev_reward[0] = out[-1].first[-1], out[-1].obs[-1], out[-1].reward[-1]
        out.append(batch)
    return out


class Slow:
    """Every action and row of every slot since its episode opened, kept for ever."""

    def __init__(self, B: int, limit: int, first: SampleBatch) -> None:
        self.taken: list[list[Any]] = [[] for _ in range(B)]
        self.unseen = [0] * B
        self.obs = [first.obs[0, b].tobytes() for b in range(B)]
        self.reward = [first.prev_reward[0, b].tobytes() for b in range(B)]
        self.lost, self.limit = [False] * B, limit

    def record(self, batch: SampleBatch) -> None:
        T, B = batch.spec
        for b in range(B):
            for t in range(T):
                self.taken[b].append(tree_map(lambda x, t=t, b=b: x[t, b].copy(), batch.action))
                if batch.first[t + 1, b]:
                    self.taken[b], self.lost[b], self.unseen[b], self.obs[b], self.reward[b] = [], False, 0, b"", b""
                self.obs[b] += batch.obs[t + 1, b].tobytes()
                self.reward[b] += batch.reward[t, b].tobytes()
            self.lost[b] = self.lost[b] or len(self.taken[b]) > self.limit


def assert_same(journal: Journal, slow: Slow) -> int:
    known = 0
    for b, taken in enumerate(slow.taken):
        episode = journal.episode(b)
        assert (episode is None) == slow.lost[b]
        if episode is None:
            continue
        known += 1
        actions: Any = episode.actions
        if slow.limit:
            assert (episode.unseen, list(episode.digest)) == (
                slow.unseen[b],
                [zlib.crc32(slow.obs[b]), zlib.crc32(slow.reward[b])],
            )
        assert actions["pick"].tolist() == [a["pick"] for a in taken]
        assert actions["arm"].tolist() == [a["arm"].tolist() for a in taken]
        assert [(x.dtype, x.shape[1:]) for x in tree_leaves(actions)] == [(np.float32, (2,)), (np.int64, ())]
    return known


@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("limit", [0, 1, 7, 20, 1000])
@pytest.mark.parametrize("openings", [0.02, 0.2, 0.7])
def test_against_a_slow_copy_of_everything(T: int, limit: int, openings: float):
    known = 0
    for seed in range(6):
        rng = np.random.default_rng([seed, T, limit])
        B = int(rng.integers(1, 5))
        batches = random_batches(rng, T, B, 12, openings)
        journal, slow = Journal(B, limit), Slow(B, limit, batches[0])
        warmup: list[Any] = []
        for b in range(B):
            before = allocate_batch(SPEC, BatchSpec(int(rng.integers(0, 4)), 1)).action
            before["pick"][...] = -5
            before = tree_map(lambda x: x[:, 0], before)
            n = slow.unseen[b] = len(before["pick"])
            warmup.append(before if n else None)
            slow.taken[b] = [tree_map(lambda x, k=k: x[k], before) for k in range(n)]
        journal.begin(JournalViews(batches[0]), warmup)
        for k, batch in enumerate(batches):
            journal.record(JournalViews(batch))
            slow.record(batch)
            tree_map(lambda x: x.fill(-1), batch.action)  # the journal's copies are its own
            known += assert_same(journal, slow)
            if k % 4 == 3:
                state = journal.state_dict()
                journal = Journal(B, limit)
                journal.load_state_dict(state)
                assert_same(journal, slow)
    assert known or limit < 2


def open_actions(journal: Journal, b: int) -> Any:
    episode = journal.episode(b)
    assert episode is not None
    return episode.actions


def test_an_episode_that_opens_with_the_next_batch_has_no_actions_rather_than_unknown_ones():
    batch = random_batches(np.random.default_rng(0), 3, 1, 1, 0.0)[0]
    batch.first[3] = True
    journal = Journal(1, 100)
    journal.record(JournalViews(batch))
    actions: Any = open_actions(journal, 0)
    assert actions["pick"].shape == (0,)
    assert actions["arm"].shape == (0, 2)
    again = Journal(1, 100)
    again.load_state_dict(journal.state_dict())
    actions = open_actions(again, 0)
    assert actions["arm"].shape == (0, 2)


def test_no_more_is_held_than_the_limit():
    rng = np.random.default_rng(0)
    journal = Journal(2, 50)
    for batch in random_batches(rng, 10, 2, 30, 0.0):
        batch.first[10, 0] = True  # slot 1 never ends
        journal.record(JournalViews(batch))
        assert all(len(x) <= 50 for x in journal._ring)
    assert journal.episode(1) is None
    assert open_actions(journal, 0)["pick"].shape == (0,)


def test_an_episode_of_a_million_rows_costs_a_row_each():
    journal, batch = Journal(1, 10**6), random_batches(np.random.default_rng(0), 1000, 1, 1, 0.0)[0]
    batch = batch[:, :1]
    views = JournalViews(batch)
    copied = 0
    written = journal._write

    def counting(actions: Any, count: int) -> None:
        nonlocal copied
        before = journal._ring
        written(actions, count)
        copied += count + (journal._rows if journal._ring is not before else 0)

    journal._write = counting
    for _ in range(1000):
        journal.record(views)
    assert copied < 4 * 10**6
    assert len(open_actions(journal, 0)["pick"]) == 10**6


def test_of_large_observations_a_part_is_digested():
    for size, read in [(1024, 1024), (1025, 513), (84 * 84 * 4, 1008)]:
        assert thinned(np.zeros((2, 3, size))).shape == (3, 2, read)


def test_before_the_first_batch_nothing_is_known_and_nothing_is_lost():
    assert Journal(2, 5).state_dict() == [{"known": True, "actions": None, "unseen": 0, "digest": []}] * 2
