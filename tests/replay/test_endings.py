"""Replay of environments that reset in the step of an end: every sample as a plain loop makes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.batch import as_arrays
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves, tree_map
from penstock.datasets.reader import Dataset
from penstock.learn.rows.reset_rows import with_reset_rows
from penstock.replay.replay import Replay, ReplaySettings
from penstock.replay.view import Sequences, Transitions
from tests.tensor_envs.same_step import Counting
from tests.tensor_envs.test_same_step import collected

B = 5


def records(T: int, batches: int, groups: bool = False) -> tuple[Any, list[Any], Any]:
    """The spec, batches of arrays, and all of them as one record."""
    policy, found = collected(partial(Counting, groups=groups), ps.PPO(), T, B, batches)
    return policy.spec, [as_arrays(x) for x in found], as_arrays(ps.concat_samples(found, "T"))


def filled(spec: Any, batches: list[Any], view: Any, capacity: int = 200) -> Replay:
    replay = Replay(spec, ReplaySettings(capacity=capacity), view)
    for batch in batches:
        replay.append(batch)
    return replay


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("T", [1, 7])
def test_transitions_end_with_the_last_observation(T: int, n_step: int, groups: bool):
    spec, batches, record = records(T, 84 // T, groups)
    view = Transitions(n_step, 0.9)
    replay = filled(spec, batches, view)
    storage: Any = replay.storage
    again = filled(spec, batches[:1], Transitions(n_step, 0.9))
    again.load_state_dict(replay.state_dict(), {name: x.copy() for name, x in replay.arrays().items()})
    t, b = (x.ravel() for x in np.meshgrid(np.arange(storage.oldest, storage.head - n_step), np.arange(B)))
    assert storage.oldest > 20
    shown = view.read(storage, t, b)
    restored = view.read(again.storage, t, b)  # pyright: ignore[reportArgumentType]
    for x, y in zip(
        tree_leaves((tuple(shown.inputs), dict(shown.rows))), tree_leaves((tuple(restored.inputs), dict(restored.rows)))
    ):
        np.testing.assert_array_equal(x, y)
    for i, (row, slot) in enumerate(zip(t, b)):
        total, weight, at = 0.0, 1.0, row
        for k in range(n_step):
            at = row + k
            total, weight = total + 0.9**k * record.reward[at, slot], 0.9 ** (k + 1)
            if record.terminated[at, slot] or record.truncated[at, slot]:
                break
        after = (record.final, at) if record.resets[at, slot] else (record.obs, at + 1)
        for x, y in zip(tree_leaves(shown.rows["next"].obs), tree_leaves(after[0])):  # pyright: ignore
            np.testing.assert_array_equal(x[i], y[after[1], slot])
        assert not record.resets[at, slot] or not shown.rows["next"].first[i]  # pyright: ignore[reportAttributeAccessIssue]
        np.testing.assert_allclose(shown["return"][i], total, rtol=1e-6)  # pyright: ignore[reportIndexIssue]
        expected = 0.0 if record.terminated[at, slot] else weight
        np.testing.assert_allclose(shown["discount"][i], expected, rtol=1e-6)  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("T", [2, 8])
def test_sequences_have_a_reset_row_after_each_end(T: int):
    spec, batches, record = records(T, 80 // T)
    view = Sequences(every=4, burn_in=2, train=5, n_step=2)
    replay = filled(spec, batches, view)
    storage: Any = replay.storage
    starts = np.arange(-(-storage.oldest // 4) * 4, storage.head - view.span, 4)
    assert len(starts) > 3
    for start in starts:
        whole = with_reset_rows(tree_map(lambda x: torch.from_numpy(np.array(x)), record[start : start + view.span]))
        rows, slots = np.full(B, start), np.arange(B)
        shown = view.read(storage, rows, slots)
        L = view.span
        for name in ("terminated", "truncated", "reward"):
            np.testing.assert_array_equal(shown[name], getattr(whole, name)[:L].numpy(), name)  # pyright: ignore
        np.testing.assert_array_equal(shown.valid, whole.valid[:L].numpy())  # pyright: ignore[reportArgumentType]
        np.testing.assert_array_equal(shown.inputs.obs, whole.obs[: L + 1].numpy())
        np.testing.assert_array_equal(shown.inputs.first, whole.first[: L + 1].numpy())
        acted = whole.valid[:L].numpy()
        np.testing.assert_array_equal(shown["action"][acted], whole.action[:L].numpy()[acted])  # pyright: ignore
        follows = ~whole.first[1 : L + 1].numpy()
        np.testing.assert_array_equal(
            shown.inputs.prev_action[1:][follows], whole.prev_action[1 : L + 1].numpy()[follows]
        )


def test_the_ring_of_ends_grows_and_forgets():
    spec, batches, _ = records(16, 64)
    replay = filled(spec, batches, Transitions(), capacity=4_000)
    endings: Any = replay.storage.endings  # pyright: ignore[reportOptionalMemberAccess]
    assert 512 <= len(endings._row) <= 4_096
    short = filled(spec, batches, Transitions(), capacity=200)
    assert len(short.storage.endings._row) == 256  # pyright: ignore[reportOptionalMemberAccess]


def test_what_reads_the_row_after_an_end_is_refused():
    spec, batches, _ = records(4, 1)
    settings = ReplaySettings(capacity=200, index="prioritized", fresh_priority="agent")
    replay = Replay(spec, settings, Transitions(), priority_fn=lambda storage, t: np.ones((len(t), B)))
    with pytest.raises(ConfigError, match="fresh_priority='max' there"):
        replay.append(batches[0])


@pytest.mark.parametrize(
    "algo", [ps.DQN(learning_starts=64, batch_size=16), ps.R2D1(replay=ReplaySettings(), learning_starts=64)]
)
@pytest.mark.slow
def test_algorithms_learn_from_it(algo: Any):
    run = ps.RunConfig(steps=2_000, eval_episodes=0, progress="off")
    result = ps.train(ps.Experiment(Counting, algo, ps.SerialSampler(T=4, B=5), run))
    assert result.metrics["train/loss"] >= 0.0


def test_a_stored_replay_shows_last_observations_and_becomes_a_dataset(tmp_path: Any):
    run = ps.RunConfig(steps=400, eval_episodes=0, progress="off", dir=str(tmp_path / "run"))
    algo = ps.DQN(learning_starts=100, batch_size=16, replay=ReplaySettings(capacity=1_000))
    ps.train(ps.Experiment("tests.tensor_envs.same_step:Counting", algo, ps.SerialSampler(T=4, B=5), run))
    found = ps.load_replay(tmp_path / "run")
    at = found["final_at"]
    assert (at >= 0).any()
    t, b = np.nonzero(at >= 0)
    last = found["final.obs"][at[t, b]]
    np.testing.assert_array_equal(last[:, 2], found["obs"][t, b, 2] + 1)
    np.testing.assert_array_equal(last[:, 0], b)
    assert ps.replay_to_dataset(tmp_path / "run", tmp_path / "data") > 20
    dataset = Dataset(tmp_path / "data")
    for episode in (dataset.episode(i) for i in range(len(dataset.lengths))):
        assert episode.obs[-1, 2] == len(episode.reward)
