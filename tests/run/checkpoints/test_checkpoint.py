from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.checkpoints import checkpoint as module
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from tests.run.checkpoints.saved import crashes, names, rewrite, save


def test_policy_tensors_may_share_memory_and_views_take_their_own_size_only(tmp_path: Path) -> None:
    big = torch.arange(1_000_000.0)
    path = save_checkpoint(tmp_path, 1, {"view": big[:3]}, {"a": big[:4], "b": big[:4], "t": torch.ones(2, 3).t()})
    assert (path / "state.npy").stat().st_size < 10_000
    policy = load_checkpoint(path).policy
    assert torch.equal(policy["a"], policy["b"])
    assert policy["t"].shape == (3, 2)


def test_policy_must_hold_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"policy\['w'\] is a ndarray"):
        save_checkpoint(tmp_path, 1, {}, {"w": np.zeros(2)})  # type: ignore[dict-item]


def test_a_forged_pickle_runs_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "boom"),)

    file = io.BytesIO()
    torch.save(Bomb(), file)
    for text in (pickle.dumps(Bomb()), file.getvalue(), b'{"$class": ["os:mkdir", "boom"]}'):
        path = save(tmp_path, 1)
        rewrite(path, text)
        with pytest.raises(CheckpointError, match=r"state\.json is as its manifest says, but cannot be read"):
            load_checkpoint(path)
        shutil.rmtree(path)
        assert not (tmp_path / "boom").exists()


def test_find_falls_back_past_broken_ones_and_names_them(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "000000000030" / "state.npy").write_bytes(b"x")
    (tmp_path / "checkpoints" / "000000000020" / "MANIFEST.json").write_bytes(b"{")
    with pytest.warns(UserWarning, match="passed over") as caught:
        assert find_checkpoint(tmp_path).name == "000000000010"
    text = "\n".join(str(w.message) for w in caught)
    assert "000000000030/state.npy has 1 bytes" in text
    assert "000000000020/MANIFEST.json is damaged" in text
    with pytest.raises(
        CheckpointError, match=r"no good checkpoint of step 30 .*000000000010, .*state\.npy has 1 bytes"
    ):
        find_checkpoint(tmp_path, "30")


def test_a_broken_older_one_is_no_reason_to_warn(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "checkpoints" / "000000000010" / "MANIFEST.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_checkpoint(tmp_path).name == "000000000020"


def test_find_by_step_best_and_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds nothing"):
        find_checkpoint(tmp_path)
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert find_checkpoint(tmp_path, "best").name == "000000000020"
    save(tmp_path, 30, score=5.0, keep=9)
    save(tmp_path, 40, score=float("nan"), keep=9)
    save(tmp_path, 50, score=-1.0, keep=9)
    assert find_checkpoint(tmp_path, "best").name == "000000000030"
    assert find_checkpoint(tmp_path, "000000000010").name == find_checkpoint(tmp_path, "10").name == "000000000010"
    with pytest.raises(CheckpointError, match=r"step 11 .*000000000050"):
        find_checkpoint(tmp_path, "11")
    with pytest.raises(ConfigError, match="'latest' is not known"):
        find_checkpoint(tmp_path, "latest")


@pytest.mark.parametrize("options", [{"keep": 0}, {"step": -1}])
def test_senseless_settings_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected keep >= 1 and step >= 0"):
        save_checkpoint(tmp_path, options.get("step", 1), {}, {}, keep=options.get("keep", 3))


def test_the_same_step_is_replaced_and_a_broken_one_put_aside(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, {"x": 1}, {})
    path = save_checkpoint(tmp_path, 5, {"x": 2}, {})
    assert load_checkpoint(path).state == {"x": 2}
    assert names(tmp_path) == ["000000000005"]
    (path / "state.npy").unlink()
    path = save_checkpoint(tmp_path, 5, {"x": 3}, {})
    assert load_checkpoint(path).state == {"x": 3}
    assert [name[:19] for name in names(tmp_path)] == ["000000000005", "000000000005.broken"]


@pytest.mark.parametrize("call", ["mkdir", "write", "fsync", "rename"])
def test_an_error_of_the_disk_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    save(tmp_path, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match=r"step 2 in .*checkpoints: Input/output error"):
            save(tmp_path, 2)
    assert names(tmp_path) == ["000000000001"]
    load_checkpoint(find_checkpoint(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of descriptors from /proc")
def test_everything_is_forced_to_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(fd: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def record_rename(source: Any, target: Any) -> None:
        calls.append(f"rename to {os.path.basename(target)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    save(tmp_path, 1)
    assert calls[:4] == ["state.json", "state.npy", "policy.safetensors", "MANIFEST.json"]
    assert calls[4].startswith(".tmp-1-")
    assert calls[5:] == ["rename to 000000000001", "checkpoints"]


def test_a_failed_replacement_brings_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, {"x": 1}, {})
    rename = os.rename

    def fail(source: Any, target: Any) -> None:
        if ".tmp-" in str(source):
            raise OSError(30, "Read-only file system")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(CheckpointError, match="Read-only"):
            save_checkpoint(tmp_path, 1, {"x": 2}, {})
    assert names(tmp_path) == ["000000000001"]
    assert load_checkpoint(find_checkpoint(tmp_path)).state == {"x": 1}


def test_what_the_disk_changed_while_writing_is_found_before_pruning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, keep=1)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data).replace(b'"step":2', b'"step":3')))
        with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
            save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["000000000001"]


def test_ctrl_c_within_a_write_stays_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_too_little_space_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 2_000_000))
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has 2\.0 MB free and a checkpoint needs 5\.0 MB"):
        save_checkpoint(tmp_path, 2, {"x": torch.zeros(500_000), "y": np.zeros(250_000)}, {})
    assert names(tmp_path) == ["000000000001"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("new_step", "every"), [(3, 6), (2, 6), *(pytest.param(step, 1, marks=pytest.mark.slow) for step in (3, 2))]
)
def test_a_crash_at_any_call_leaves_a_good_checkpoint(tmp_path: Path, new_step: int, every: int) -> None:
    def keep(run: Path, step: int, x: int) -> None:
        state = {"x": x, "t": torch.full((8,), float(x))}
        save_checkpoint(run, step, state, {"w": torch.full((4,), float(x))}, keep=2)

    def before(run: Path) -> None:
        keep(run, 1, 1)
        keep(run, 2, 2)

    for run, through in crashes(tmp_path, before, lambda run: keep(run, new_step, 7), every):
        found = load_checkpoint(find_checkpoint(run))
        assert found.state["x"] == 7 if through else found.state["x"] in (2, 7)
        assert float(found.policy["w"][0]) == float(found.state["t"][0]) == found.state["x"]
        keep(run, 4, 4)
        assert len(names(run)) == 2 and all(name.isdecimal() for name in names(run))
        assert load_checkpoint(find_checkpoint(run)).state["x"] == 4


FULL_DISK = """
import os, shutil, subprocess, sys
from pathlib import Path
import torch
from penstock.core.errors import CheckpointError
from penstock.run.checkpoints import checkpoint
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint

mount = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(mount)], check=True)
save_checkpoint(mount, 1, {"x": 1}, {})

def refused(what):
    for state, policy in (({"t": torch.zeros(2_000_000)}, {}), ({}, {"t": torch.zeros(2_000_000)})):
        try:
            save_checkpoint(mount, 2, state, policy)
        except CheckpointError as error:
            assert what in str(error) and str(mount) in str(error), error
        else:
            raise AssertionError("saved")
        assert sorted(os.listdir(mount / "checkpoints")) == ["000000000001"]
        assert load_checkpoint(find_checkpoint(mount)).state == {"x": 1}

refused("4.2 MB free" if shutil.disk_usage(mount).free > 4.15e6 else "MB free")
usage = shutil.disk_usage
checkpoint.shutil.disk_usage = lambda path: usage("/")._replace(free=10**12)
refused("No space left on device")
subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
refused("Read-only file system")
print("done")
"""


def can_mount() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(command, capture_output=True, timeout=100, check=False).returncode == 0


@pytest.mark.slow
def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("needs root and a private mount namespace for a small tmpfs")
    result = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.stdout.strip() == "done", result.stderr


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        save(tmp_path, 1)
