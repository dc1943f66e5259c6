from typing import Any

import numpy as np
import pytest

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.samplers.episodes import Journal

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
        batch.first[0] = out[-1].first[-1] if out else False
        out.append(batch)
    return out


class Slow:
    """Every action of every slot since its episode opened, kept for ever."""

    def __init__(self, B: int, limit: int) -> None:
        self.taken: list[list[Any]] = [[] for _ in range(B)]
        self.lost, self.limit = [False] * B, limit

    def record(self, batch: SampleBatch) -> None:
        T, B = batch.spec
        for b in range(B):
            for t in range(T):
                self.taken[b].append(tree_map(lambda x, t=t, b=b: x[t, b].copy(), batch.action))
                if batch.first[t + 1, b]:
                    self.taken[b], self.lost[b] = [], False
            self.lost[b] = self.lost[b] or len(self.taken[b]) > self.limit


def assert_same(journal: Journal, slow: Slow) -> int:
    known = 0
    for b, taken in enumerate(slow.taken):
        actions: Any = journal.actions(b)
        assert (actions is None) == slow.lost[b]
        if actions is None:
            continue
        known += 1
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
        journal, slow = Journal(B, limit), Slow(B, limit)
        for b in range(B):
            before = allocate_batch(SPEC, BatchSpec(int(rng.integers(0, 4)), 1)).action
            before["pick"][...] = -5
            before = tree_map(lambda x: x[:, 0], before)
            n = len(before["pick"])
            if n or seed % 2:
                journal.begin(b, before if n else None)
            slow.taken[b] = [tree_map(lambda x, k=k: x[k], before) for k in range(n)]
        for k, batch in enumerate(random_batches(rng, T, B, 12, openings)):
            journal.record(batch)
            slow.record(batch)
            tree_map(lambda x: x.fill(-1), batch.action)  # the journal's copies are its own
            known += assert_same(journal, slow)
            if k % 4 == 3:
                state = journal.state_dict()
                journal = Journal(B, limit)
                journal.load_state_dict(state)
                assert_same(journal, slow)
    assert known or limit < 2


def test_an_episode_that_opens_with_the_next_batch_has_no_actions_rather_than_unknown_ones():
    batch = random_batches(np.random.default_rng(0), 3, 1, 1, 0.0)[0]
    batch.first[3] = True
    journal = Journal(1, 100)
    journal.record(batch)
    actions: Any = journal.actions(0)
    assert actions["pick"].shape == (0,)
    assert actions["arm"].shape == (0, 2)
    again = Journal(1, 100)
    again.load_state_dict(journal.state_dict())
    actions = again.actions(0)
    assert actions["arm"].shape == (0, 2)


def test_no_more_is_held_than_open_episodes_need():
    rng = np.random.default_rng(0)
    journal = Journal(2, 50)
    for batch in random_batches(rng, 10, 2, 30, 0.0):
        batch.first[10, 0] = True  # slot 1 never ends
        journal.record(batch)
        assert sum(len(chunk["pick"]) for _, chunk in journal._chunks) <= 50
    assert journal.actions(1) is None
    assert journal._chunks == []


def test_before_the_first_batch_nothing_is_known_and_nothing_is_lost():
    assert Journal(2, 5).state_dict() == [{"known": True, "actions": None}] * 2
