"""The arrays of a replay in a checkpoint: whole or absent, never twice in memory, and kept of the newest ones only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from penstock.run.checkpoints.manifest import read_manifest
from tests.run.checkpoints.saved import crashes


def test_runs_without_replay_have_none_to_miss(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {}, {})
    assert not read_manifest(find_checkpoint(tmp_path, "1", replay=True)).replay_dropped
    with pytest.raises(ConfigError, match="keep_replays=0"):
        save_checkpoint(tmp_path, 4, {}, {}, keep_replays=0)


def test_too_little_space_says_what_the_replay_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 2_000_000))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"needs 4\.0 MB, of which the replay 3\.0 MB \(run\.keep_replays"):
        save_checkpoint(tmp_path, 1, {}, {}, {"x": np.zeros(3_000_000, np.uint8)})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_at_any_call_leaves_a_checkpoint_with_its_replay(tmp_path: Path, every: int) -> None:
    def keep(run: Path, step: int) -> None:
        save_checkpoint(run, step, {"x": step}, {}, {"x": np.full(9, step)}, keep=2, keep_replays=1)

    def before(run: Path) -> None:
        keep(run, 1)
        keep(run, 2)

    for run, _ in crashes(tmp_path, before, lambda run: keep(run, 3), every):
        found = load_checkpoint(find_checkpoint(run, replay=True), replay=True)
        assert found.state["x"] in (2, 3) and (found.arrays()["x"] == found.state["x"]).all()
        assert load_checkpoint(find_checkpoint(run)).state["x"] in (2, 3)
        keep(run, 4)
        kept = {path.name: {file.name for file in path.iterdir()} for path in (run / "checkpoints").iterdir()}
        small = {"MANIFEST.json", "policy.safetensors", "state.json", "state.npy"}
        assert kept.pop(f"{4:012d}") == {*small, "replay-000.npy"}
        assert list(kept.values()) == [small]
