"""Minari's HDF5 layout: read and written with h5py alone, as Minari 0.5.4 lays it out."""

from __future__ import annotations

import builtins
import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.spec import EnvSpec
from penstock.datasets.episode import Episode
from penstock.datasets.minari import MinariEpisodes, minari_id, write_minari
from penstock.datasets.minari_spaces import space_to_plain, stored_spec
from penstock.datasets.reader import Dataset, open_dataset
from penstock.datasets.writer import DatasetWriter
from penstock.envs.spaces import space_to_spec

OBS = spaces.Dict(
    {
        "a": spaces.Box(np.float32([-1, -np.inf]), np.float32([1, 2]), dtype=np.float32),
        "b": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(4), spaces.MultiBinary([2, 2]))),
        "image": spaces.Box(0, 255, (40, 33, 3), np.uint8),
    }
)
ACTION = spaces.Dict({"m": spaces.MultiDiscrete([[2, 3], [4, 5]]), "x": spaces.Box(-2, 2, (), np.float64)})
SPEC = EnvSpec(space_to_spec(OBS, "observation"), space_to_spec(ACTION, "action"))


def episode(L: int, terminated: bool) -> Episode:
    rng = np.random.default_rng(L)
    obs = {
        "a": rng.random((L + 1, 2)).astype(np.float32),
        "b": (rng.integers(1, 4, L + 1), rng.integers(0, 2, (L + 1, 4)).astype(np.int8),
              rng.integers(0, 2, (L + 1, 2, 2)).astype(np.int8)),
        "image": rng.integers(0, 256, (L + 1, 40, 33, 3)).astype(np.uint8),
    }  # fmt: skip
    action = {"m": rng.integers(0, 2, (L, 2, 2)), "x": np.linspace(-3, 3, L)}
    info = {"env/s": np.arange(1, L + 1).astype(np.float32), "logp": np.zeros(L, np.float32)}
    return Episode(obs, action, rng.random(L).astype(np.float32), terminated, not terminated, info)


@pytest.fixture
def ours(tmp_path: Path) -> Dataset:
    with DatasetWriter(tmp_path / "ours", SPEC) as writer:
        writer.append(episode(3, True))
        writer.append(episode(5, False))
    return Dataset(tmp_path / "ours")


@pytest.fixture
def h5py() -> Any:
    return pytest.importorskip("h5py")


def test_spaces_go_there_and_back() -> None:
    metadata = {
        "observation_space": json.dumps(space_to_plain(SPEC.obs)),
        "action_space": json.dumps(space_to_plain(SPEC.action)),
    }
    assert stored_spec(metadata, "x") == SPEC
    assert space_to_plain(SPEC.action)["subspaces"]["m"]["nvec"] == [[2, 3], [4, 5]]
    text = {"type": "Text", "max_length": 3, "min_length": 1, "charset": "ab"}
    with pytest.raises(ConfigError, match=r"x: action space is Text.*which has no array of fixed size"):
        stored_spec({**metadata, "action_space": json.dumps(text)}, "x")


def test_without_spaces_the_environment_is_asked() -> None:
    gym = importlib.import_module("gymnasium")
    env = gym.make("CartPole-v1")
    assert env.spec is not None
    found = stored_spec({"env_spec": env.spec.to_json()}, "x")
    assert found.obs.shape == (4,)
    with pytest.raises(ConfigError, match="x does not say which spaces"):
        stored_spec({}, "x")


@pytest.mark.parametrize(
    "forged",
    [
        {"id": "os:system", "entry_point": "os:system", "kwargs": {"command": "touch EXECUTED"}},
        {"id": "CartPole-v1", "kwargs": {"xml_file": "/x.xml"}},
        {"id": "CartPole-v1", "additional_wrappers": [{"entry_point": "os:system"}]},
    ],
)
def test_nothing_that_a_dataset_names_is_called(
    forged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^x: it names no spaces, and .* would be called, which a dataset must not"):
        stored_spec({"env_spec": json.dumps(forged)}, "x")
    assert not list(tmp_path.iterdir())


def test_data_of_other_files_and_pictures_of_other_formats_are_refused(
    ours: Dataset, h5py: Any, tmp_path: Path
) -> None:
    data = write_minari(ours, tmp_path / "toy")
    with h5py.File(data / "main_data.hdf5", "a") as file:
        del file["episode_0/rewards"], file["episode_1/observations/image"]
        file.create_dataset("episode_0/rewards", (3,), "f4", external=[("/proc/self/environ", 0, 12)])
        file["episode_1/observations/image"] = np.zeros((6, 9), np.uint8)
    for i, told in ((0, "rewards keeps its data in another file"), (1, "a row is no JPEG file")):
        with pytest.raises(ConfigError, match=f"episode_{i}: .*damaged.*{told}"):
            open_dataset(tmp_path / "toy").episode(i)
    with h5py.File(data / "main_data.hdf5", "a") as file:
        file["episode_1/infos/x"] = h5py.ExternalLink("/tmp/other.hdf5", "x")
    with pytest.raises(ConfigError, match=r"main_data\.hdf5: episode_1/infos/x is a link into another file"):
        open_dataset(tmp_path / "toy")


def test_the_layout_by_hand(ours: Dataset, h5py: Any, tmp_path: Path) -> None:
    data = write_minari(ours, tmp_path / "toy", env="Toy-v0", env_spec="{}", algorithm="ppo")
    metadata = json.loads((data / "metadata.json").read_text())
    assert data == tmp_path / "toy" / "data"
    assert sorted(p.name for p in data.iterdir()) == ["main_data.hdf5", "metadata.json"]
    shown = {
        key: metadata[key]
        for key in ("total_episodes", "total_steps", "data_format", "jpeg_encoding", "dataset_id", "env_spec")
    }
    assert shown == {"total_episodes": 2, "total_steps": 8, "data_format": "hdf5", "jpeg_encoding": False,
                     "dataset_id": "toy-v0", "env_spec": "{}"}  # fmt: skip
    with h5py.File(data / "main_data.hdf5") as file:
        group = file["episode_1"]
        assert (group.attrs["id"], group.attrs["total_steps"]) == (1, 5)
        assert group["observations/b/_index_1"].shape == (6, 4)
        assert group["actions/x"][()].tolist() == [-2, -1.5, 0, 1.5, 2]  # as the environment got them
        assert group["terminations"][()].tolist() == [False] * 5
        assert group["truncations"][()].tolist() == [False] * 4 + [True]
        assert np.isnan(group["infos/s"][0])
        assert group["infos/s"][1:].tolist() == [1, 2, 3, 4, 5]


def test_it_comes_back(ours: Dataset, h5py: Any, tmp_path: Path) -> None:
    write_minari(ours, tmp_path / "toy")
    for path in (tmp_path / "toy", tmp_path / "toy" / "data"):
        found = open_dataset(path)
        found.verify()
        assert found.spec == SPEC
        assert found.lengths.tolist() == [3, 5]
        assert found.info == {"env/s": ("float32", ())}
        for i in range(2):
            x, y = found.episode(i), ours.episode(i)
            assert (x.terminated, x.truncated) == (y.terminated, y.truncated)
            assert all((x.obs["b"][k] == y.obs["b"][k]).all() for k in range(3))
            assert (x.obs["image"] == y.obs["image"]).all()
            assert (x.obs["a"] == y.obs["a"]).all()
            assert (x.action["m"] == y.action["m"]).all()
            assert (x.reward == y.reward).all()
            assert x.info["env/s"].tolist() == y.info["env/s"].tolist()
        found.close()
    with pytest.raises(ConfigError, match="holds a Minari dataset, which was not touched"):
        write_minari(ours, tmp_path / "toy")


def test_jpeg_and_other_number_types_are_read(ours: Dataset, h5py: Any, tmp_path: Path) -> None:
    image = importlib.import_module("PIL.Image")
    io = importlib.import_module("io")
    data = write_minari(ours, tmp_path / "toy")
    flat = np.full((40, 33, 3), 77, np.uint8)
    stream = io.BytesIO()
    image.fromarray(flat).save(stream, format="JPEG")
    with h5py.File(data / "main_data.hdf5", "a") as file:
        group = file["episode_0"]
        del group["observations/image"], group["rewards"], group["infos"], group["observations/a"]
        group["observations/image"] = np.stack([np.frombuffer(stream.getvalue(), np.uint8)] * 4)
        group["rewards"] = np.arange(3.0)
        group["observations/a"] = np.zeros((4, 2), np.float64)
        del group["truncations"], group["terminations"]
        group["truncations"] = group["terminations"] = np.zeros(3, bool)
    found = MinariEpisodes(data).episode(0)
    assert np.abs(found.obs["image"].astype(int) - flat).max() <= 1
    assert found.reward.tolist() == [0, 1, 2]
    assert found.reward.dtype == np.float32
    assert found.obs["a"].dtype == np.float32
    assert found.truncated  # a record that stops without an end
    assert not found.terminated


def test_what_is_broken_is_named(ours: Dataset, h5py: Any, tmp_path: Path) -> None:
    data = write_minari(ours, tmp_path / "toy")
    metadata = json.loads((data / "metadata.json").read_text())

    def stored(**changes: Any) -> None:
        (data / "metadata.json").write_text(json.dumps({**metadata, **changes}))

    stored(total_episodes=3)
    with pytest.raises(ConfigError, match=r"holds 2 episodes; metadata.json says 3: it is half-written"):
        open_dataset(tmp_path / "toy")
    stored(data_format="arrow")
    with pytest.raises(ConfigError, match="data_format is 'arrow'; expected 'hdf5'"):
        open_dataset(tmp_path / "toy")
    (data / "metadata.json").write_text("{")
    with pytest.raises(ConfigError, match=r"metadata.json is missing, half-written or damaged"):
        open_dataset(tmp_path / "toy")
    stored()
    with h5py.File(data / "main_data.hdf5", "a") as file:
        file["episode_0/terminations"][0] = True
        del file["episode_1/observations/a"]
    found = open_dataset(tmp_path / "toy")
    with pytest.raises(ConfigError, match="episode_0 ends at step 0 of 3 and goes on"):
        found.verify()
    with pytest.raises(ConfigError, match=r"episode_1: observations: a is missing, .* of another layout"):
        found.episode(1)
    found.close()
    main = data / "main_data.hdf5"
    main.write_bytes(main.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"main_data.hdf5 is missing, half-written or damaged"):
        open_dataset(tmp_path / "toy")


def test_a_fingerprint_is_of_the_content(ours: Dataset, h5py: Any, tmp_path: Path) -> None:
    """A copy has the same; one number that was changed in the middle of an array of the same size has another."""
    data = write_minari(ours, tmp_path / "toy")
    before = open_dataset(data)
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    assert open_dataset(copy).fingerprint == before.fingerprint
    size = (copy / "main_data.hdf5").stat().st_size
    with h5py.File(copy / "main_data.hdf5", "a") as file:
        file["episode_1/observations/image"][3, 20, 16, 1] ^= 1
    assert (copy / "main_data.hdf5").stat().st_size == size
    changed = open_dataset(copy)
    changed.verify()
    assert changed.lengths.tolist() == before.lengths.tolist()
    assert changed.fingerprint != before.fingerprint


def test_what_was_verified_is_what_the_fingerprint_is_of(ours: Dataset, h5py: Any, tmp_path: Path) -> None:
    main = write_minari(ours, tmp_path / "toy") / "main_data.hdf5"
    read = open_dataset(tmp_path / "toy")
    other = Path(shutil.copy(main, tmp_path / "other"))
    with h5py.File(other, "a") as file:
        file["episode_1/rewards"][2] = 7.0
    read.verify()
    other.replace(main)
    assert open_dataset(tmp_path / "toy").fingerprint != read.fingerprint


def test_a_write_that_dies_leaves_no_dataset(
    ours: Dataset, h5py: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "episode", lambda i: replace(episode(3, True), obs={}) if i == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_minari(ours, tmp_path / "toy")
    with pytest.raises(ConfigError, match="is no dataset"):
        open_dataset(tmp_path / "toy" / "data")


def test_a_name_is_the_one_that_minari_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert minari_id(tmp_path / "my data") == "my_data-v0"
    assert minari_id(tmp_path / "toy-v3") == "toy-v3"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    assert minari_id(tmp_path / "root" / "my" / "group" / "toy-v3") == "my/group/toy-v3"
    assert minari_id(tmp_path / "toy") == "toy-v0"
    with pytest.raises(ConfigError, match=r"root/my/toy is in Minari's folder .* use .*root/my/toy-v0"):
        minari_id(tmp_path / "root" / "my" / "toy")


def test_without_h5py_the_extra_is_named(ours: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"h5py is not installed.*penstock\[offline\]"):
        write_minari(ours, tmp_path / "toy")


def test_no_jax_and_no_minari(ours: Dataset, h5py: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def watched(name: str, *rest: Any, **named: Any) -> Any:
        assert name.split(".")[0] not in ("jax", "minari")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", watched)
    write_minari(ours, tmp_path / "toy")
    open_dataset(tmp_path / "toy").verify()
