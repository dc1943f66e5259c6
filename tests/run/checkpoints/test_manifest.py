from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from penstock.core.errors import CheckpointError
from penstock.run.checkpoints import manifest
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from tests.run.checkpoints.saved import flip, names, save
from tests.run.checkpoints.saved_replay import save_replay


def test_100_flipped_bits_are_all_detected(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    rng = random.Random(0)
    files = sorted(path.iterdir())
    assert len(files) == 4
    for i in range(100):
        file = files[i % 4]
        offset, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, offset, bit)
        with pytest.raises(CheckpointError, match=str(file)):
            load_checkpoint(path)
        flip(file, offset, bit)
    load_checkpoint(path)


def test_20_truncations_are_all_detected(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    rng = random.Random(0)
    for i in range(20):
        file = sorted(path.iterdir())[i % 4]
        data = file.read_bytes()
        file.write_bytes(data[: rng.randrange(len(data))])
        with pytest.raises(CheckpointError, match=str(file)):
            load_checkpoint(path)
        file.write_bytes(data)
    load_checkpoint(path)


@pytest.mark.parametrize("name", ["state.json", "state.npy", "policy.safetensors", "MANIFEST.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_checkpoint(path)


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    content = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**content, "format": 3}))
    with pytest.raises(CheckpointError, match=r"has format 3.*reads format 2: install a newer"):
        load_checkpoint(path)


def test_a_manifest_that_reaches_out_of_its_directory_is_refused(tmp_path: Path) -> None:
    from penstock.run.checkpoints.manifest import manifest_bytes

    path = save(tmp_path, 1)
    (path / "MANIFEST.json").write_bytes(manifest_bytes(1, None, {"../secret": {"size": 0, "sha256": ""}}))
    with pytest.raises(CheckpointError, match="was not written by penstock"):
        load_checkpoint(path)
    (path / "MANIFEST.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not JSON"):
        load_checkpoint(path)


def test_a_flipped_bit_matters_to_those_who_need_the_replay(tmp_path: Path) -> None:
    save_replay(tmp_path, 1)
    path = save_replay(tmp_path, 2)
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


def test_of_checkpoints_that_were_pruned_nothing_is_remembered(tmp_path: Path) -> None:
    """One entry for every checkpoint of a run of months was kept."""
    for step in range(1, 9):
        save(tmp_path, step, keep=2)
    assert len(names(tmp_path)) == 2
    seen = manifest._SEEN_GOOD  # pyright: ignore[reportPrivateUsage]
    assert len([path for path in seen if tmp_path in path.parents]) <= 3  # the last one is pruned after it was seen
