"""n-step targets and sequences by hand: what a truncation, a terminal state and a cut do to them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.replay.replay import Replay, ReplaySettings
from penstock.replay.view import Sequences, Transitions

SPEC = EnvSpec(LeafSpec("box", (), "float32"), LeafSpec("discrete", (), "int64", sizes=(9,)))
VALUES = [10, 20, 30, 100, 40, 50, 0, 60, 70]
"""V of each observation, which are their values: 100 is where the first episode was truncated, 0 the terminal state."""
STEPS = [0, 1, 2, 4, 5, 7]
"""Rows 3 and 6 are resets."""


def golden() -> SampleBatch:
    """Rewards 1, 2, 4 | 8, 16 | 32: truncated, terminated, and cut by what follows."""
    batch = allocate_batch(SPEC, BatchSpec(8, 1))
    batch.obs[:, 0] = VALUES
    batch.valid[STEPS], batch.reward[STEPS, 0] = True, [1, 2, 4, 8, 16, 32]
    batch.action[STEPS, 0] = np.arange(6)
    batch.truncated[2] = batch.terminated[5] = True
    batch.first[[0, 4, 7]] = True
    return batch


def elsewhere() -> SampleBatch:
    """A batch that does not go on from the golden one."""
    batch = golden()
    batch.obs[:] = 1_000.0
    return batch


@pytest.mark.parametrize(("n", "targets"), [(1, [11, 17, 54, 33, 16, 67]), (3, [15.5, 29, 54, 16, 16, 67])])
def test_golden_targets(n: int, targets: list[float]) -> None:
    """y = return + discount * V(next) with a discount of 1/2."""
    replay = Replay(SPEC, ReplaySettings(capacity=60), Transitions(n, 0.5))
    replay.append(golden())
    assert len(replay) == (6 if n == 1 else 5)  # rows 6 and 7 lack what follows, and 6 is none
    replay.append(elsewhere())
    assert replay.storage is not None
    rows = np.array(STEPS)
    shown = replay.view.read(replay.storage, rows, np.zeros(6, np.int64), np.zeros((6, 0)))
    np.testing.assert_allclose(shown.rows["return"] + shown.rows["discount"] * shown.rows["next"].obs, targets)
    np.testing.assert_array_equal(shown.inputs.obs, [10, 20, 30, 40, 50, 60])
    np.testing.assert_array_equal(shown.rows["action"], np.arange(6))
    np.testing.assert_array_equal(shown.inputs.prev_reward, [0, 1, 2, 0, 8, 0])
    np.testing.assert_array_equal(shown.inputs.first, [True, False, False, True, False, True])


def test_a_sequence_ends_in_its_mask_where_another_batch_begins() -> None:
    """Burn-in 2, trained rows 4, tail 3 from row 0; then from row 8, where nothing follows the cut but what is masked."""
    view = Sequences(every=8, burn_in=2, train=4, n_step=3)
    replay = Replay(SPEC, ReplaySettings(capacity=60), view)
    replay.append(golden())
    replay.append(elsewhere())
    assert replay.storage is not None and replay.storage.head == 24  # 9 rows rounded up to a start of sequences
    assert len(replay) == 1  # that of row 8 trains on rows of the gap only, that of row 16 lacks its tail
    drawing, shown = replay.sample(2, np.random.default_rng(0))
    assert drawing.unit.tolist() == [0, 0] and shown.valid is not None
    assert shown.valid[:, 0].tolist() == [True, True, True, False, True, True, False, True, False]
    np.testing.assert_array_equal(shown.inputs.obs[:9, 0], VALUES)
    np.testing.assert_array_equal(shown.rows["reward"][:8, 0], [1, 2, 4, 0, 8, 16, 0, 32])
    assert np.flatnonzero(shown.rows["terminated"][:8, 0]).tolist() == [5]
    assert np.flatnonzero(shown.rows["truncated"][:8, 0]).tolist() == [2]
    assert shown.inputs.obs.shape == (10, 2) and shown.rows["action"].shape == (9, 2)


def test_what_no_view_can_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"n_step=0; expected 1 or more"):
        Transitions(0)
    for every, burn_in, train, n in ((0, 0, 1, 1), (1, -1, 1, 1), (1, 0, 0, 1), (1, 0, 1, 0)):
        with pytest.raises(ConfigError, match=r"expected positive numbers"):
            Sequences(every, burn_in, train, n)
