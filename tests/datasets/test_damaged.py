"""Damaged and forged datasets: every way of being wrong is a ConfigError that names file, episode and array."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.memmap import map_npy
from penstock.datasets.episode import Episode
from penstock.datasets.minari import write_minari
from penstock.datasets.reader import Dataset, index_bytes, open_dataset, read_index
from penstock.datasets.writer import DatasetWriter
from penstock.envs.spaces import env_spec
from tests.datasets.test_reader import write

FLIPS = 150


@pytest.fixture(scope="module")
def minari(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Minari dataset of four episodes, of 3, 1, 5 and 2 steps."""
    pytest.importorskip("h5py")
    folder = tmp_path_factory.mktemp("minari")
    return write_minari(Dataset(write(folder / "ours")), folder / "toy")


def read_all(path: Path) -> int:
    source = open_dataset(path)
    try:
        source.verify()
        return sum(len(source.episode(i)) for i in range(len(source.lengths)))
    finally:
        source.close()


def put(name: str, value: Any) -> Callable[[Any], None]:
    """Replaces an array of the file by another one."""

    def change(file: Any) -> None:
        del file[name]
        file[name] = value

    return change


def a_group(file: Any) -> None:
    del file["episode_1/rewards"]
    file.create_group("episode_1/rewards")


def a_loop(file: Any) -> None:
    h5py = pytest.importorskip("h5py")
    del file["episode_1/rewards"]
    file["episode_1/rewards"] = h5py.SoftLink("/episode_1/other")
    file["episode_1/other"] = h5py.SoftLink("/episode_1/rewards")


def no_space(file: Any) -> None:
    h5py = pytest.importorskip("h5py")
    del file["episode_1/rewards"]
    file["episode_1"].create_dataset("rewards", data=h5py.Empty("f4"))


def in_place(file: Any) -> None:
    del file["episode_1/infos"]
    file["episode_1/infos"] = np.zeros(2)


FORGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "scalar rewards": (put("episode_1/rewards", 1.0), r"main_data\.hdf5: episode_1: rewards has the shape \[\]"),
    "rewards of rows": (put("episode_1/rewards", np.zeros((1, 1))), r"episode_1: rewards has the shape \[1, 1\]"),
    "a group as rewards": (a_group, r"episode_1: rewards .*it is a Group; expected an array"),
    "rewards of no space": (no_space, r"episode_1: rewards .*it is a Dataset; expected an array"),
    "a loop of links": (a_loop, r"main_data\.hdf5: episode_1: rewards .*too many links"),
    "text as rewards": (put("episode_1/rewards", np.array([b"x"])), r"episode_1: rewards .*could not convert"),
    "one flag": (put("episode_2/terminations", np.ones(1, bool)),
                 r"main_data\.hdf5: episode_2: terminations is bool\[1\]; expected bool\[5\], one for each"),
    "flags too many": (put("episode_0/truncations", np.zeros(4, bool)), r"episode_0: truncations is bool\[4\]"),
    "a scalar flag": (put("episode_0/truncations", True), r"episode_0: truncations is bool\[\]"),
    "flags as floats": (put("episode_0/truncations", np.full(3, np.nan)), r"episode_0: truncations is float64\[3\]"),
    "a scalar action": (put("episode_0/actions", 1.0), r"episode_0: action is float32\[\]; expected float32\[3, 2\]"),
    "an action as a tree": (lambda f: (put("episode_0/actions", 1.0)(f), f.move("episode_0/actions", "episode_0/x"),
                                       f.create_group("episode_0/actions"))[0], r"episode_0: actions .*is a Group"),
    "a leaf as a tree": (put("episode_0/observations", np.zeros(3)), r"episode_0: observations: a .*damaged"),
    "a row too few": (put("episode_0/observations/a", np.zeros((3, 2), "f4")), r"episode_0: obs\['a'\] is float32\[3, 2\]"),
    "infos as an array": (in_place, r"episode_1: infos .*expected a group of arrays"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_minari_dataset(name: str, minari: Path, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    change, message = FORGED[name]
    data = Path(shutil.copytree(minari, tmp_path / "toy" / "data"))
    with h5py.File(data / "main_data.hdf5", "a") as file:
        change(file)
    with pytest.raises(ConfigError, match=message):
        read_all(tmp_path / "toy")


def flipped(minari: Path, target: Path, count: int) -> None:
    """Reads the dataset with one bit changed, `count` times; each is read, or refused in a message that names the file.

    Half of the bits lie in the first 4 KiB, which hold the file's own tables.
    """
    data, draw = Path(shutil.copytree(minari, target)), random.Random(0)
    main = data / "main_data.hdf5"
    sound = main.read_bytes()
    for i in range(count):
        changed = bytearray(sound)
        changed[draw.randrange(len(sound) if i % 2 else min(4096, len(sound)))] ^= 1 << draw.randrange(8)
        main.write_bytes(changed)
        try:
            read_all(data)
        except PenstockError as error:
            assert str(main) in str(error)  # noqa: PT017
    main.write_bytes(sound)
    assert read_all(data) == 11


def test_a_flipped_bit_of_a_minari_dataset(minari: Path, tmp_path: Path) -> None:
    flipped(minari, tmp_path / "data", 10)


@pytest.mark.slow
def test_many_flipped_bits_of_a_minari_dataset(minari: Path, tmp_path: Path) -> None:
    flipped(minari, tmp_path / "data", FLIPS)


@pytest.mark.parametrize(
    "header",
    [b"((((", b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,", b"\xff\xfe", b"[" * 5000, b"9" * 5000, b"'''",
     b"{'descr': 'O', 'fortran_order': False, 'shape': (1,)}", b"{'descr': [('a', '<f4')], 'shape': 1}", b"0\n  1\n 2"],
)  # fmt: skip
def test_a_forged_header_of_an_array(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12))
    with file.open("rb") as stream, pytest.raises(ValueError, match="its header"):
        map_npy(stream)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["info"].update(logp=["S1000000000", []]), r"dataset\.json is damaged .*'logp' is S1000000000\[\]"),
        (lambda i: i["info"].update(logp=["O", []]), r"dataset\.json is damaged .*'logp' is O\[\]"),
        (lambda i: i["info"].update(logp=["f4", [1 << 40]]), r"dataset\.json is damaged .*'logp' is f4"),
        (lambda i: i["info"].update(logp=["f4", [-1]]), r"dataset\.json is damaged .*'logp' is f4"),
        (lambda i: i["shards"][0]["files"].pop("reward.npy"), r"dataset\.json is damaged .*000000 has no reward\.npy"),
        (lambda i: i["shards"][0]["files"]["obs-0.npy"].pop("sha256"), r"dataset\.json is damaged .*sha256"),
    ],
)  # fmt: skip
def test_a_forged_index(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "d")
    index = read_index(path)
    change(index)
    (path / "dataset.json").write_bytes(index_bytes(index))
    with pytest.raises(ConfigError, match=message):
        read_all(path)


def test_a_wide_info_column_must_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = env_spec(gym.make("CartPole-v1"))
    reward = np.ones(1, np.float32)
    obs, wide = np.zeros((2, 4), np.float32), np.zeros((1, 1000), np.float32)
    with DatasetWriter(tmp_path / "d", spec) as writer:
        writer.append(Episode(obs, np.zeros(1, np.int64), reward, True, False, {"logp": wide}))
    monkeypatch.setattr("penstock.samplers.offline.free_memory", lambda: 1_000_000)
    with pytest.raises(ConfigError, match=r"dataset .*d: its info columns take 4,000 bytes a step, .* smaller T or B"):
        ps.OfflineSampler(str(tmp_path / "d"), T=128, B=16).build("CartPole-v1")
