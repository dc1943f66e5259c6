from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.run.replays.export import export
from penstock.run.replays.stored import open_replay
from tests.run.replays.recorded import CASES, Recorded, T, opened


@pytest.mark.slow
def test_sample_rows_are_what_can_be_drawn(recorded: Callable[..., Recorded], tmp_path: Path) -> None:
    for case in CASES:
        run = recorded(case)
        export(open_replay(run.run), tmp_path / case)
        found, index = opened(tmp_path / case), run.own.replay.index
        stride = run.own.replay.view.stride
        assert found["sample.row"].tolist() == [u * stride for u in range(index.tail, index.head)]
        assert found["sample.row"].min() >= found["row"].min()
        name = "sample.mass" if "sample.mass" in found else "sample.usable"
        assert (name == "sample.mass") == (case in ("prioritized", "sequences"))
        assert np.count_nonzero(found[name]) == len(run.own.replay)
        drawn = run.own.replay.draw(200, np.random.default_rng(0))
        at = drawn.unit - index.tail
        assert (found[name][at, drawn.slot] > 0).all()


def test_recurrent_states_come_with_their_rows(recorded: Callable[..., Recorded], tmp_path: Path) -> None:
    run = recorded("sequences")
    export(open_replay(run.run), tmp_path / "x")
    found = opened(tmp_path / "x")
    assert found["state.row"].tolist() == list(range(found["state.row"][0], run.length, 8))
    for i, row in enumerate(found["state.row"]):
        for name in ("c", "h"):
            np.testing.assert_array_equal(found[f"state.{name}"][i], run.states[row // T][name])
