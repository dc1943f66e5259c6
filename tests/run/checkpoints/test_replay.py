"""The arrays of a replay in a checkpoint: whole or absent, never twice in memory, and kept of the newest ones only."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.mapped import chunks, copy_rows, mapping
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from penstock.run.checkpoints.manifest import read_manifest

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel where an array is mapped")


def save(run: Path, step: int, x: int | None = None, **options: Any) -> Path:
    arrays = {"obs": np.full((50, 3), step if x is None else x, np.uint8), "info['q']": np.arange(50.0)}
    return save_checkpoint(run, step, {"step": step}, {"w": torch.full((4,), float(step))}, arrays, **options)


def with_replay(run: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in (run / "checkpoints").glob("*/replay-000.npy"))


def loaded(path: Path) -> dict[str, Any]:
    return load_checkpoint(path, replay=True).arrays()


def in_file(folder: Path, x: np.ndarray[Any, Any], named: bool) -> np.ndarray[Any, Any]:
    """A copy of x that is a mapped file, as np.memmap makes it or without a name."""
    if named:
        y: np.ndarray[Any, Any] = np.memmap(folder / "a file with spaces", x.dtype, "w+", shape=x.shape)
    else:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(x.nbytes)
            y = np.frombuffer(mmap.mmap(file.fileno(), x.nbytes), x.dtype).reshape(x.shape)
    y[...] = x
    return y


def test_arrays_come_back_by_name(tmp_path: Path) -> None:
    arrays = {
        "obs['a']": np.arange(24, dtype=np.uint8).reshape(6, 4)[:, ::2],
        "prev_action": np.arange(6, dtype=np.int64),
        "first": np.array([[True], [False]]),
        "half": np.ones((3, 2), np.float16),
        "swapped": np.arange(3, dtype=">f4"),
        "nothing": np.zeros((0, 3), np.float32),
        "narrow": np.zeros((4, 0), np.float32),
    }
    path = save_checkpoint(tmp_path, 1, {"arrays": 5}, {}, arrays)
    checkpoint = load_checkpoint(path, replay=True)
    assert checkpoint.state == {"arrays": 5}
    found = checkpoint.arrays()
    assert list(found) == list(arrays)
    for name, x in arrays.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(found[name], x)
        np.testing.assert_array_equal(np.load(checkpoint.array_files[name], allow_pickle=False), x)
    assert load_checkpoint(path).arrays() == {}


@linux
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("refusal", [None, errno.EXDEV, errno.ENOSYS])
def test_mapped_arrays_are_copied_by_the_kernel_where_it_can(
    named: bool, refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).integers(0, 255, (3_000, 1_000), np.uint8)
    mapped, copy, copied = in_file(tmp_path, x, named), os.copy_file_range, [0]

    def counted(*args: Any) -> int:
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        copied[0] += (done := copy(*args))
        return done

    monkeypatch.setattr(os, "copy_file_range", counted)
    found = loaded(save_checkpoint(tmp_path / "run", 1, {}, {}, {"part": mapped[7:2_900], "every second": mapped[::2]}))
    np.testing.assert_array_equal(found["part"], x[7:2_900])
    np.testing.assert_array_equal(found["every second"], x[::2])
    assert copied == [0 if refusal else 2_893_000]


@linux
def test_another_file_by_the_mapped_ones_name_is_not_taken_for_it(tmp_path: Path) -> None:
    x = np.full((100, 100), 3, np.uint8)
    mapped = in_file(tmp_path, x, True)
    (tmp_path / "a file with spaces").unlink()
    in_file(tmp_path, x + 1, True)
    np.testing.assert_array_equal(loaded(save_checkpoint(tmp_path / "run", 1, {}, {}, {"x": mapped}))["x"], x)


@linux
def test_a_full_disk_in_a_kernel_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1)
    mapped = in_file(tmp_path, np.ones((100, 100), np.uint8), True)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(CheckpointError, match=r"step 2.*No space left"):
        save_checkpoint(tmp_path / "run", 2, {}, {}, {"x": mapped})
    assert find_checkpoint(tmp_path / "run", replay=True).name == "000000000001"


@linux
def test_private_memory_is_never_given_back(tmp_path: Path) -> None:
    """A page that was changed in a private mapping is nowhere else."""
    (tmp_path / "x").write_bytes(bytes(1 << 16))
    private = np.memmap(tmp_path / "x", np.uint8, "c")
    private[...] = 7
    target = np.zeros_like(private)
    copy_rows(target, private)
    assert (private == 7).all()
    assert (target == 7).all()
    found = mapping(private)
    assert found is not None
    assert not found.shared


def test_chunks_are_of_16_mb_and_at_least_a_row() -> None:
    assert [at.stop for at in chunks(np.zeros((40, 1 << 20), np.uint8))] == [16, 32, 40]
    assert [at.stop for at in chunks(np.zeros((2, 1 << 25), np.uint8))] == [1, 2]
    assert list(chunks(np.zeros((0, 5)))) == []


def test_a_flipped_bit_matters_to_those_who_need_the_replay(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    victim = path / "replay-001.npy"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    os.utime(victim, ns=(0, 0))  # or a clock that is coarser than this test hides the change
    victim.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{victim} is damaged"):
        load_checkpoint(path, replay=True)
    assert load_checkpoint(path).state == {"step": 2}
    assert find_checkpoint(tmp_path) == path
    with pytest.warns(UserWarning, match=f"{victim} is damaged.*using .*000000000001"):
        assert find_checkpoint(tmp_path, replay=True).name == "000000000001"


@pytest.mark.parametrize(("keep_replays", "left"), [(1, [4]), (2, [3, 4]), (9, [2, 3, 4])])
def test_the_newest_keep_their_replay_and_all_their_policy(keep_replays: int, left: list[int], tmp_path: Path) -> None:
    versions = read_manifest(save(tmp_path, 1, score=9.0)).versions
    for step in (2, 3, 4):
        save(tmp_path, step, keep=3, keep_replays=keep_replays, score=-float(step))
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
            assert sorted(p.name for p in path.iterdir()) == ["MANIFEST.json", "policy.safetensors", "state.pt"]
            with pytest.raises(CheckpointError, match=r"replay of .* is gone.*run\.keep_replays"):
                find_checkpoint(tmp_path, str(step), replay=True)


def test_a_replay_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    (first / "notes.txt").write_text("mine")
    (first / "plots").mkdir()
    (first / "replay-001.npy.bak").write_text("mine")
    (first / f".MANIFEST.json.tmp-{os.getpid() + 1}").write_text("of a process that died")
    for step in (2, 3, 4):
        save(tmp_path, step, keep=9, keep_replays=1)
    assert with_replay(tmp_path) == [4]
    assert sorted(p.name for p in first.iterdir()) == [
        "MANIFEST.json", "notes.txt", "plots", "policy.safetensors", "replay-001.npy.bak", "state.pt",
    ]  # fmt: skip
    assert load_checkpoint(first).state == {"step": 1}


def test_no_older_replay_goes_before_the_new_one_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, keep_replays=1)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data).replace(b"\x02\x02\x02", b"\x02\x02\x03")))
        with pytest.raises(CheckpointError, match=r"replay-000\.npy is damaged"):
            save(tmp_path, 2, keep_replays=1)
    assert with_replay(tmp_path) == [1]
    assert loaded(find_checkpoint(tmp_path, replay=True))["obs"][0, 0] == 1


def test_a_broken_checkpoint_does_not_count_as_a_replay(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "000000000002" / "replay-000.npy").write_bytes(b"")
    save(tmp_path, 3)
    assert with_replay(tmp_path) == [1, 2, 3]


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
