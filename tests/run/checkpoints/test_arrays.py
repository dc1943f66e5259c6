from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import CheckpointError
from penstock.core.memmap import chunks, copy_rows, mapping
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from tests.run.checkpoints.saved_replay import loaded, save_replay

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel where an array is mapped")


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
    save_replay(tmp_path / "run", 1)
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


def test_stretches_are_of_16_mb_and_at_least_a_row() -> None:
    assert [at.stop for at in chunks(np.zeros((40, 1 << 20), np.uint8))] == [16, 32, 40]
    assert [at.stop for at in chunks(np.zeros((2, 1 << 25), np.uint8))] == [1, 2]
    assert list(chunks(np.zeros((0, 5)))) == []
