from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from penstock.core.errors import CheckpointError
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_evaluated
from penstock.run.checkpoints.manifest import read_manifest
from tests.run.checkpoints.saved import POLICY, flip, names, save
from tests.run.checkpoints.saved_replay import loaded, save_replay


def steps(run_dir: Path) -> list[int]:
    return [int(name) for name in names(run_dir)]


def test_prune_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, score in ((1, 1.0), (2, 9.0), (3, 2.0), (4, 3.0), (5, None)):
        save(tmp_path, step, keep=2, score=score)
    assert steps(tmp_path) == [2, 4, 5]
    save(tmp_path, 6, keep=1, score=9.0)
    assert steps(tmp_path) == [6]


def test_a_policy_alone_does_not_push_out_what_a_run_is_resumed_from(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    save_evaluated(tmp_path, 3, POLICY, 5.0, keep=1)
    assert steps(tmp_path) == [1, 3]
    assert find_checkpoint(tmp_path, replay=True).name == "000000000001"
    save_evaluated(tmp_path, 4, POLICY, 6.0, keep=1)
    assert steps(tmp_path) == [1, 4]  # the best
    save(tmp_path, 6, keep=1)
    assert steps(tmp_path) == [4, 6]


def test_a_whole_checkpoint_of_the_step_takes_the_score_and_stays_whole(tmp_path: Path) -> None:
    save(tmp_path, 2, keep=2)
    save(tmp_path, 4, keep=2)
    assert save_evaluated(tmp_path, 2, POLICY, 5.0, keep=2).name == "000000000002"
    manifest = read_manifest(tmp_path / "checkpoints" / "000000000002")
    assert (manifest.score, manifest.policy_only) == (5.0, False)
    assert find_checkpoint(tmp_path, "best").name == "000000000002"
    assert load_checkpoint(manifest.path).state["step"] == 2


def test_prune_does_not_count_or_delete_broken_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    flip(tmp_path / "checkpoints" / "000000000003" / "state.npy", 100, 0)
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [2, 3, 4]


def test_prune_orders_by_number_and_spares_the_one_just_written(tmp_path: Path) -> None:
    save(tmp_path, 10**12, keep=1)
    save(tmp_path, 5, keep=1)
    assert steps(tmp_path) == [5, 10**12]
    assert find_checkpoint(tmp_path).name == "1000000000000"


def test_temporaries_of_dead_processes_are_removed_and_of_live_ones_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    dead = subprocess.Popen(["true"])
    dead.wait(timeout=100)
    for pid in (dead.pid, os.getpid(), os.getppid()):
        (tmp_path / "checkpoints" / f".tmp-2-{pid}-abcd").mkdir()
    save(tmp_path, 3)
    assert names(tmp_path) == [f".tmp-2-{os.getppid()}-abcd", "000000000001", "000000000003"]


def with_replay(run: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in (run / "checkpoints").glob("*/replay-000.npy"))


@pytest.mark.parametrize(("keep_replays", "left"), [(1, [4]), (2, [3, 4]), (9, [2, 3, 4])])
def test_the_newest_keep_their_replay_and_all_their_policy(keep_replays: int, left: list[int], tmp_path: Path) -> None:
    versions = read_manifest(save_replay(tmp_path, 1, score=9.0)).versions
    for step in (2, 3, 4):
        save_replay(tmp_path, step, keep=3, keep_replays=keep_replays, score=-float(step))
        assert float(load_checkpoint(find_checkpoint(tmp_path)).policy["w"][0]) == step
    assert with_replay(tmp_path) == ([1, *left] if keep_replays == 9 else left)
    for step in (1, 2, 3, 4):  # 1 is the best
        path = find_checkpoint(tmp_path, str(step))
        assert load_checkpoint(path).state == {"step": step}
        kept = step in with_replay(tmp_path)
        assert sorted(loaded(path)) == (["info['q']", "obs"] if kept else [])
        manifest = read_manifest(path)
        assert (manifest.replay_dropped, manifest.versions) == (not kept, versions)
        assert manifest.score == (9.0 if step == 1 else -step)
        if not kept:
            assert sorted(p.name for p in path.iterdir()) == [
                "MANIFEST.json",
                "policy.safetensors",
                "state.json",
                "state.npy",
            ]
            with pytest.raises(CheckpointError, match=r"replay of .* is gone.*run\.keep_replays"):
                find_checkpoint(tmp_path, str(step), replay=True)


def test_a_replay_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    first = save_replay(tmp_path, 1)
    (first / "notes.txt").write_text("mine")
    (first / "plots").mkdir()
    (first / "replay-001.npy.bak").write_text("mine")
    (first / f".MANIFEST.json.tmp-{os.getpid() + 1}").write_text("of a process that died")
    for step in (2, 3, 4):
        save_replay(tmp_path, step, keep=9, keep_replays=1)
    assert with_replay(tmp_path) == [4]
    assert sorted(p.name for p in first.iterdir()) == [
        "MANIFEST.json", "notes.txt", "plots", "policy.safetensors", "replay-001.npy.bak", "state.json", "state.npy",
    ]  # fmt: skip
    assert load_checkpoint(first).state == {"step": 1}


def test_no_older_replay_goes_before_the_new_one_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_replay(tmp_path, 1, keep_replays=1)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data).replace(b"\x02\x02\x02", b"\x02\x02\x03")))
        with pytest.raises(CheckpointError, match=r"replay-000\.npy is damaged"):
            save_replay(tmp_path, 2, keep_replays=1)
    assert with_replay(tmp_path) == [1]
    assert loaded(find_checkpoint(tmp_path, replay=True))["obs"][0, 0] == 1


def test_a_broken_checkpoint_does_not_count_as_a_replay(tmp_path: Path) -> None:
    for step in (1, 2):
        save_replay(tmp_path, step)
    (tmp_path / "checkpoints" / "000000000002" / "replay-000.npy").write_bytes(b"")
    save_replay(tmp_path, 3)
    assert with_replay(tmp_path) == [1, 2, 3]
