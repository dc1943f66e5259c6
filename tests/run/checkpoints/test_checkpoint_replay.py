"""The arrays of a replay in a checkpoint: whole or absent, never twice in memory, and kept of the newest ones only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.checkpoints.checkpoint import find_checkpoint, save_checkpoint
from penstock.run.checkpoints.manifest import read_manifest


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


CRASH = '''
import os, sys
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint

def save(run, step, x):
    save_checkpoint(run, step, {"x": x}, {}, {"x": np.full(9, x)}, keep=2, keep_replays=1)

def crash_at(n):
    """Dies at the nth system call that changes the disk; half a write is done first."""
    left = [n]
    def patched(name):
        call = getattr(os, name)
        def wrapper(*args, **options):
            left[0] -= 1
            if left[0] < 0:
                if name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                os._exit(9)
            return call(*args, **options)
        return wrapper
    for name in ("mkdir", "write", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, patched(name))

def files(run):
    return {p.name: sorted(f.name for f in p.iterdir()) for p in (run / "checkpoints").iterdir()}

root = Path(sys.argv[1])
points = 0
while True:
    run = root / str(points)
    save(run, 1, 1)
    save(run, 2, 2)
    pid = os.fork()
    if pid == 0:
        crash_at(points)
        save(run, 3, 3)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = load_checkpoint(find_checkpoint(run, replay=True), replay=True)
    assert found.state["x"] in (2, 3) and (found.arrays()["x"] == found.state["x"]).all(), found
    assert load_checkpoint(find_checkpoint(run)).state["x"] in (2, 3)
    save(run, 4, 4)
    kept = files(run)
    small = ["MANIFEST.json", "policy.safetensors", "state.pt"]
    assert sorted(kept.pop("000000000004")) == sorted([*small, "replay-000.npy"]), kept
    assert list(kept.values()) == [small], (points, kept)
    if code == 0:
        break
    points += 1
print("points", points)
'''


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_crash_at_any_call_leaves_a_checkpoint_with_its_replay(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", CRASH, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 20
