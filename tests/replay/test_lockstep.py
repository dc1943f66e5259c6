"""Teams drawn in lockstep, against numbers by hand and a loop over environments; what a seat without an agent adds."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves
from penstock.replay.lockstep import LockstepTransitions, TeamPartition
from penstock.replay.replay import Replay, ReplaySettings

BOX = LeafSpec("box", (1,), "float32")
SPEC = EnvSpec(
    {"own": BOX, "state": LeafSpec("box", (2,), "float32")}, LeafSpec("discrete", (), "int64", sizes=(9,)), 2
)
POISON = 1e6


def golden() -> SampleBatch:
    """One environment of two seats, rows 0 to 7; rewards 1 and 3, 2 and 4, then 8 of one agent alone.

    Seat 1's agent dies in row 1. Seat 0's is cut by a limit in row 2. Row 3 is the reset. In rows 4 and 5 both are
    there, rewards 16 and 16, 32 and 64, and both die in row 5. Row 6 is the reset. Row 7 is open.
    """
    batch = allocate_batch(SPEC, BatchSpec(8, 2))
    batch.obs["own"][..., 0] = np.arange(18).reshape(9, 2)
    batch.obs["state"][...] = np.arange(9)[:, None, None] + [[[0.0, 0.5], [0.0, 0.5]]]
    batch.valid[[0, 1, 2, 4, 5, 7], 0] = batch.valid[[0, 1, 4, 5, 7], 1] = True
    batch.reward[...] = POISON * ~batch.valid
    batch.obs["own"][2:4, 1] = batch.obs["state"][2:4, 1] = POISON  # of the dead agent's seat
    batch.reward[[0, 1, 2, 4, 5, 7], 0] = [1, 2, 8, 16, 32, 5]
    batch.reward[[0, 1, 4, 5, 7], 1] = [3, 4, 16, 64, 7]
    batch.action[...] = np.arange(16).reshape(8, 2) % 9
    batch.terminated[[1, 5], 1] = batch.terminated[5, 0] = True
    batch.truncated[2, 0] = True
    batch.first[[0, 4, 7]] = True
    return batch


def read(replay: Replay, rows: list[int], slot: int = 0) -> Any:
    assert replay.storage is not None
    t = np.array(rows)
    return replay.view.read(replay.storage, t, np.full(len(t), slot), np.zeros((len(t), 0)))


@pytest.mark.parametrize(
    ("n", "reward", "returns", "discounts"),
    [
        (1, "mean", [2, 3, 8, 16, 48, 6], [0.5, 0.5, 0.5, 0.5, 0, 0.5]),
        (1, "sum", [4, 6, 8, 32, 96, 12], [0.5, 0.5, 0.5, 0.5, 0, 0.5]),
        (3, "mean", [2 + 1.5 + 2, 3 + 4, 8, 16 + 24, 48, 6], [1 / 8, 1 / 4, 1 / 2, 0, 0, 1 / 2]),
    ],
)
def test_golden_teams(n: int, reward: Any, returns: list[float], discounts: list[float]) -> None:
    """Discount 1/2. Whoever dies adds nothing more; a limit bootstraps from the agent that it cut, a death does not."""
    replay = Replay(SPEC, ReplaySettings(capacity=120), LockstepTransitions(2, n, 0.5, reward))
    replay.append(golden())
    assert len(replay) == {1: 5, 3: 4}[n]  # of 8 rows the last n lack what follows, two others are resets
    replay.append(golden())  # begins anew: a cut after row 7
    shown = read(replay, [0, 1, 2, 4, 5, 7])
    np.testing.assert_allclose(shown["return"], returns)
    np.testing.assert_allclose(shown["discount"], discounts)
    np.testing.assert_array_equal(shown.valid, [[1, 1], [1, 1], [1, 0], [1, 1], [1, 1], [1, 1]])
    alone, both, nobody = [True, False], [True, True], [False, False]
    following = {1: [both, alone, alone, both, nobody, both], 3: [alone, alone, alone, nobody, nobody, both]}[n]
    np.testing.assert_array_equal(shown["next_valid"], following)
    np.testing.assert_array_equal(shown.inputs.obs["own"][:, 0, 0], [0, 2, 4, 8, 10, 14])
    np.testing.assert_array_equal(shown["state"][:, 0], [0, 1, 2, 4, 5, 7])
    np.testing.assert_array_equal(shown["next_state"][:, 0], {1: [1, 2, 3, 5, 6, 8], 3: [3, 3, 3, 6, 6, 8]}[n])
    np.testing.assert_array_equal(shown["next"].obs["own"][:, 0, 0], {1: [2, 4, 6, 10, 12, 16], 3: [6, 6, 6, 12, 12, 16]}[n])  # fmt: skip
    np.testing.assert_array_equal(shown["action"], golden().action[[0, 1, 2, 4, 5, 7]])
    assert sorted(shown.inputs.obs) == sorted(shown["next"].obs) == ["own"]
    assert shown["return"].dtype == shown["discount"].dtype == np.float32


def test_a_newcomer_is_bootstrapped_from_where_all_others_have_died() -> None:
    """Seat 0's agent dies in row 0; in row 1, which is not valid, nobody acts but a new agent of seat 1 appears."""
    batch = allocate_batch(SPEC, BatchSpec(4, 2))
    batch.valid[0, 0] = batch.terminated[0, 0] = batch.valid[[0, 1, 2], 1] = True
    batch.reward[...] = 1.0
    replay = Replay(SPEC, ReplaySettings(capacity=60), LockstepTransitions(2, 1, 0.5))
    replay.append(batch)
    shown = read(replay, [0, 1])
    np.testing.assert_array_equal(shown["next_valid"], [[False, True], [False, True]])
    np.testing.assert_array_equal(shown["discount"], [0.5, 0.5])


def drawn_batches(rng: np.random.Generator, E: int, K: int, count: int, T: int) -> list[SampleBatch]:
    """Batches that continue one another, of environments whose agents die one by one, are cut, and begin anew."""
    spec = EnvSpec(SPEC.obs, SPEC.action, K)
    whole = allocate_batch(spec, BatchSpec(count * T, E * K))
    whole.obs["own"][...] = rng.normal(size=whole.obs["own"].shape)
    whole.obs["state"][...] = np.repeat(rng.normal(size=(count * T + 1, E, 2)), K, 1)
    whole.reward[...] = rng.normal(size=whole.reward.shape)
    whole.action[...] = rng.integers(0, 9, whole.action.shape)
    for e in range(E):
        there = np.zeros(K, bool)
        for t in range(count * T):
            at = slice(e * K, e * K + K)
            if not there.any():
                there = rng.random(K) < 0.8
                whole.first[t + 1, at] = there
                continue
            whole.valid[t, at] = there
            ends = there & (rng.random(K) < 0.15)
            kind = rng.random(K) < 0.5
            whole.terminated[t, at], whole.truncated[t, at] = ends & kind, ends & ~kind
            there = there & ~ends
            if rng.random() < 0.05:
                there = np.zeros(K, bool)  # a fault: the rows after it are cut off
    return [whole[i * T : i * T + T] for i in range(count)]


@pytest.mark.parametrize(("K", "n", "index"), [(1, 1, "uniform"), (3, 1, "prioritized"), (2, 3, "uniform"), (4, 5, "fifo")])  # fmt: skip
def test_drawn_teams_equal_a_plain_loop(K: int, n: int, index: Any) -> None:
    rng = np.random.default_rng(K)
    E, T = 3, 7
    batches = drawn_batches(rng, E, K, 12, T)
    settings = ReplaySettings(capacity=40 * E * K, index=index)
    replay = Replay(EnvSpec(SPEC.obs, SPEC.action, K), settings, LockstepTransitions(K, n, 0.9))
    checked = 0
    for i, batch in enumerate(batches):
        replay.append(batch.copy())
        if i < 2:
            continue
        drawing, shown = replay.sample(8, rng)
        assert shown.valid is not None
        replay.update_priorities(drawing, rng.random(8))
        for j, (t, e) in enumerate(zip(drawing.unit.tolist(), drawing.slot.tolist())):

            def row(t: int, name: str, e: int = e) -> np.ndarray:
                part, at = batches[t // T], t % T
                return getattr(part, name)[at, e * K : e * K + K]

            total, weight, m = 0.0, 1.0, 0
            while True:
                acted = row(t + m, "valid")
                total += weight * sum(r for r, a in zip(row(t + m, "reward"), acted) if a) / sum(acted)
                weight, m = weight * 0.9, m + 1
                following = row(t + m, "valid")
                if m == n or not following.any():
                    break
            left = following if following.any() else acted & ~row(t + m - 1, "terminated")
            np.testing.assert_allclose(shown["return"][j], total, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(shown["next_valid"][j], left)
            np.testing.assert_allclose(shown["discount"][j], weight if left.any() else 0.0, rtol=1e-6)
            np.testing.assert_array_equal(shown.valid[j], row(t, "valid"))
            np.testing.assert_array_equal(shown["action"][j], row(t, "action"))
            later = batches[(t + m - 1) // T]
            np.testing.assert_array_equal(shown["next_state"][j], later.obs["state"][(t + m - 1) % T + 1, e * K])
            checked += 1
    assert checked == 80


@pytest.mark.parametrize("index", ["uniform", "prioritized"])
def test_a_loaded_replay_of_teams_goes_on_in_the_same_bits(index: Any) -> None:
    batches = drawn_batches(np.random.default_rng(0), 3, 2, 10, 5)

    def made() -> Replay:
        replay = Replay(SPEC, ReplaySettings(capacity=150, index=index), LockstepTransitions(2, 2))
        replay.prepare(5, 6)
        return replay

    def drawn(replay: Replay) -> list[np.ndarray]:
        drawing, shown = replay.sample(6, np.random.default_rng(1))
        replay.update_priorities(drawing, np.arange(6.0))
        return [*(x for x in drawing if x is not None), *tree_leaves(shown)]

    one, other = made(), made()
    for batch in batches[:6]:
        one.append(batch)
    drawn(one)
    other.load_state_dict(copy.deepcopy(one.state_dict()), {name: x.copy() for name, x in one.arrays().items()})
    for batch in batches[6:]:
        one.append(batch)
        other.append(batch)
        for x, y in zip(drawn(one), drawn(other), strict=True):
            np.testing.assert_array_equal(x, y)


def test_learners_share_whole_environments() -> None:
    class TwoLearners:
        """The second of two learners with 4 and 2 columns."""

        total, local_slots = 6, slice(4, 6)

        def gather_array(self, x: np.ndarray) -> np.ndarray:
            return np.concatenate([np.zeros((len(x), 4), x.dtype), x], 1)

    teams = TeamPartition(TwoLearners(), 2)  # pyright: ignore[reportArgumentType]
    assert (teams.total, teams.local_slots) == (3, slice(2, 3))
    np.testing.assert_array_equal(teams.gather_array(np.array([[7], [8]])), [[0, 0, 7], [0, 0, 8]])


def test_columns_that_are_no_whole_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="B=3 columns for samples of the 2 seats"):
        Replay(SPEC, ReplaySettings(capacity=60), LockstepTransitions(2)).prepare(2, 3)
    with pytest.raises(ConfigError, match="shards=2 with samples of 2 seats"):
        Replay(SPEC, ReplaySettings(capacity=60, shards=2), LockstepTransitions(2)).prepare(2, 4)
    with pytest.raises(ConfigError, match="seats=0; expected 1 or more"):
        LockstepTransitions(0)
