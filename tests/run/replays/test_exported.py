"""An export that is not whole any more says so, and what to do; none is written where it was not asked for."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.replays.export import export
from penstock.run.replays.exported import exported
from penstock.run.replays.stored import open_replay

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, of which the last two have their replay."""
    path = tmp_path_factory.mktemp("exported") / "run"
    memory = ps.ReplaySettings(capacity=100)
    algo = ps.DQN(learning_starts=16, batch_size=8, replay_ratio=0.5, replay=memory, net=ps.Net(hidden=(8,)))
    settings = ps.RunConfig(steps=96, dir=str(path), progress="off", tensorboard=False, eval_episodes=0,
                            checkpoint_interval=32, keep=3, keep_replays=2)  # fmt: skip
    ps.train(ps.Experiment("CartPole-v1", algo, ps.SerialSampler(8, 2), settings))
    return path


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    export(open_replay(run), tmp_path / "folder")
    return tmp_path / "folder"


@pytest.fixture
def npz(run: Path, tmp_path: Path) -> Path:
    export(open_replay(run), tmp_path / "x.npz")
    return tmp_path / "x.npz"


def change(path: Path, how: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    how(data)
    path.write_bytes(data)


def flip(at: int) -> Callable[[bytearray], None]:
    def how(data: bytearray) -> None:
        data[at] ^= 1

    return how


def said(path: Path, capsys: pytest.CaptureFixture[str], *more: str, action: str = "info") -> tuple[int, str]:
    code = main(["replay", action, str(path), *more])
    return code, " ".join(capsys.readouterr().err.split())


def test_flipped_bytes_are_found(npz: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(npz, capsys) == (0, "")
    assert said(folder, capsys) == (0, "")
    with zipfile.ZipFile(npz) as file:
        inside = file.getinfo("obs.npy").header_offset + 400
    change(npz, flip(inside))
    code, text = said(npz, capsys)
    assert code == 5
    assert f"{npz} is damaged: obs.npy cannot be read: Bad CRC-32" in text
    assert "copy it again, or export it anew" in text
    change(folder / "obs.npy", flip(-1))
    code, text = said(folder, capsys)
    assert code == 5
    assert f"{folder} is damaged: obs.npy has sha256" in text


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (lambda file: file.unlink(), "obs.npy is missing"),
        (lambda file: change(file, lambda x: x.pop()), r"obs.npy has [\d,]+ bytes, expected [\d,]+: it was cut short"),
        (lambda file: file.write_bytes(b""), "obs.npy cannot be read"),
        (lambda file: np.save(file, np.zeros((2, 2), ">f8")), r"obs.npy is >f8\[2, 2\], expected float32\["),
        (lambda file: np.save(file, np.load(file)[:-1]), r"obs.npy is float32\[.*\], expected float32\["),
        (lambda file: (file.parent / "about.json").unlink(), "holds no about.json"),
        (lambda file: change(file.parent / "about.json", lambda x: x.pop(0)), "cannot be read"),
    ],
)
def test_a_folder_that_is_not_whole(how: Callable[[Path], Any], text: str, folder: Path) -> None:
    how(folder / "obs.npy")
    with pytest.raises((CheckpointError, ConfigError), match=rf"{folder} .*{text}.*copy it again, or export it anew"):
        exported(folder)


@pytest.mark.parametrize("left", [0.0, 0.3, 0.999])
def test_a_file_that_was_cut_short_is_called_so(left: float, npz: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npz.write_bytes(npz.read_bytes()[: int(left * npz.stat().st_size)])
    code, text = said(npz, capsys)
    assert code == 5
    assert f"{npz} is damaged or was cut short" in text


def test_any_byte_that_matters(npz: Path) -> None:
    """Of an export with one bit changed either an error is raised, or numpy still reads the same arrays."""
    whole = npz.read_bytes()
    with np.load(npz) as file:
        arrays = {name: file[name] for name in file.files if name != "about.json"}
    rng = np.random.default_rng(0)
    found: list[str] = []
    for at in [*rng.integers(0, len(whole), 150), *range(len(whole) - 120, len(whole))]:
        npz.write_bytes(whole)
        change(npz, flip(int(at)))
        try:
            exported(npz)
        except (CheckpointError, ConfigError) as error:
            found.append(str(error))
            continue
        with np.load(npz) as file:
            assert all(np.array_equal(file[name], x) for name, x in arrays.items())
    assert len(found) > 150
    assert all(str(npz) in error for error in found)


def test_a_checkpoints_own_zip_and_another_npz_are_no_exports(run: Path, tmp_path: Path) -> None:
    assert exported(find_checkpoint(run) / "state.pt") is None
    assert exported(run) is None
    np.savez(tmp_path / "y.npz", x=np.zeros(3))
    with pytest.raises(ConfigError, match=r"y\.npz holds no about\.json"):
        exported(tmp_path / "y.npz")


def test_hashes_are_of_the_files_and_written_last(folder: Path, npz: Path) -> None:
    about = json.loads((folder / "about.json").read_text())
    for name, entry in about["fields"].items():
        assert hashlib.sha256((folder / f"{name}.npy").read_bytes()).hexdigest() == entry["sha256"]
    with zipfile.ZipFile(npz) as file:
        assert file.namelist()[-1] == "about.json"
        assert json.loads(file.read("about.json"))["fields"] == about["fields"]


def test_only_what_was_named_is_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("y.csv", "y.h5", "y.NPZ"):
        code, text = said(run, capsys, "--to", str(tmp_path / name), action="export")
        assert code == 2
        assert f"ends in '{Path(name).suffix}'; expected .npz for one file, or a name without a suffix" in text
        assert "use y.npz or y-" in text
    for name in ("no/x.npz", "no/folder"):
        code, text = said(run, capsys, "--to", str(tmp_path / name), action="export")
        assert code == 2
        assert f"there is no folder {tmp_path / 'no'} to write {Path(name).name} into; make it" in text
    assert not list(tmp_path.iterdir())


def test_a_damaged_replay_names_those_that_are_good(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    oldest, older, newest = sorted((copy / "checkpoints").iterdir())
    step = int(older.name)
    change(newest / "replay-000.npy", flip(-1))
    for code, text in (
        said(copy, capsys, "--which", str(int(newest.name))),
        said(newest, capsys),
        said(newest, capsys, "--to", str(tmp_path / "x.npz"), action="export"),
    ):
        assert code == 5
        assert f"good replays of {copy} are of step {step}: take one by --which STEP" in text
        short = text.partition("its sha256 is ")[2].replace(", its manifest says", "").replace(";", "").split()
        assert [len(x) for x in short[:2]] == [12, 12]
    code, text = said(copy, capsys, "--which", str(int(oldest.name)))
    assert code == 5
    assert "is gone, as the run keeps that of its newest" in text
    assert f"are of step {step}" in text
    (older / "replay-000.npy").unlink()
    for path in (copy, older):
        code, text = said(path, capsys)
        assert code == 5
        assert f"no checkpoint of {copy} has a good replay: copy it again; `penstock eval` needs none" in text
