"""penstock's dataset format: what is written comes back, and what is broken is named and loses nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core import files
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves
from penstock.datasets import writer as dataset_writer
from penstock.datasets.episode import Episode, check_spec
from penstock.datasets.reader import Dataset, open_dataset
from penstock.datasets.writer import DatasetWriter

BOX = LeafSpec("box", (2,), "float32")
SPEC = EnvSpec(
    {"a": BOX, "b": (LeafSpec("discrete", (), "int64", sizes=(9,)), LeafSpec("multi_binary", (3,), "int8"))}, BOX
)
LENGTHS = (3, 1, 5, 2)


def episode(i: int, L: int) -> Episode:
    """Row t of the observation shows 100 i + t, so that a row read from elsewhere shows."""
    rows = 100 * i + np.arange(L + 1)
    obs = {
        "a": np.stack([rows, -rows], 1).astype(np.float32),
        "b": (rows % 9, np.stack([rows % 2] * 3, 1).astype(np.int8)),
    }
    action = np.stack([rows[1:], rows[1:] / 2], 1).astype(np.float32)
    info = {"logp": -rows[1:].astype(np.float32), "env/x": np.where(rows[1:] % 2, np.nan, rows[1:]).astype(np.float32)}
    return Episode(obs, action, rows[1:].astype(np.float32), i % 2 == 0, i % 2 == 1, info)


EPISODES = [episode(i, L) for i, L in enumerate(LENGTHS)]


def equal(x: Episode, y: Episode) -> bool:
    same = (x.terminated, x.truncated, sorted(x.info)) == (y.terminated, y.truncated, sorted(y.info))
    trees = [(e.obs, e.action, e.reward, dict(e.info)) for e in (x, y)]
    pairs = list(zip(*map(tree_leaves, trees)))
    return same and all(a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape for a, b in pairs)


def write(path: Path, episodes: list[Episode] = EPISODES, **settings: Any) -> Path:
    with DatasetWriter(path, SPEC, env="Toy-v0", **settings) as writer:
        for one in episodes:
            writer.append(one)
    return path


@pytest.mark.parametrize("shard_bytes", [1, 150, 1 << 20])
def test_what_is_written_comes_back_bit_for_bit(shard_bytes: int, tmp_path: Path) -> None:
    data = Dataset(write(tmp_path / "d", shard_bytes=shard_bytes))
    data.verify()
    assert data.lengths.tolist() == list(LENGTHS)
    assert (data.spec, data.env) == (SPEC, "Toy-v0")
    assert data.info == {"env/x": ("float32", ()), "logp": ("float32", ())}
    for i in (2, 0, 3, 1, 2):
        assert equal(data.episode(i), EPISODES[i])
    assert len(data.index["shards"]) == {1: 4, 150: 3, 1 << 20: 1}[shard_bytes]
    data.close()


def test_an_episode_owns_its_memory(tmp_path: Path) -> None:
    data = Dataset(write(tmp_path / "d"))
    data.episode(0).reward[:] = 7
    assert equal(data.episode(0), EPISODES[0])


def test_more_shards_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.datasets.reader._OPEN_SHARDS", 2)
    data = Dataset(write(tmp_path / "d", shard_bytes=1))
    assert all(equal(data.episode(i), EPISODES[i]) for i in (0, 1, 2, 3, 0, 3))
    assert len(data._open) == 2  # pyright: ignore[reportPrivateUsage]


def test_a_dataset_goes_on_only_if_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "d", EPISODES[:2])
    before = Dataset(path).fingerprint
    with pytest.raises(ConfigError, match="holds a dataset of 2 episodes, which was not touched"):
        DatasetWriter(path, SPEC)
    assert Dataset(path).fingerprint == before
    write(path, EPISODES[2:], append=True, made_by={"run": "a"})
    data = Dataset(path)
    assert all(equal(data.episode(i), EPISODES[i]) for i in range(4))
    assert data.fingerprint != before
    assert data.index["made_by"] == [{"run": "a"}]
    other = replace(SPEC, action=replace(BOX, high=1.0))
    with pytest.raises(ConfigError, match=r"high of action is inf, the environment's is 1\.0"):
        DatasetWriter(path, other, append=True)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for append in (False, True):
        with pytest.raises(ConfigError, match="is not empty; nothing in it was touched"):
            DatasetWriter(tmp_path, SPEC, append=append)
        with pytest.raises(ConfigError, match=r"thesis\.tex is a file, which was not touched"):
            DatasetWriter(tmp_path / "thesis.tex", SPEC, append=append)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_writer_that_dies_loses_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "d"
    writer = DatasetWriter(path, SPEC, shard_bytes=150)
    with pytest.raises(ConfigError, match=r"half-written.*It holds no whole episode yet: go on with .* --append"):
        open_dataset(path)
    for one in EPISODES:
        writer.append(one)  # the fourth is in memory only, as if the process were killed here
    (path / ".000002.tmp").mkdir()
    with pytest.raises(ConfigError, match=r"half-written.*3 whole episodes in 2 shards are not lost.*--append"):
        open_dataset(path)
    write(path, EPISODES[3:], append=True)
    assert all(equal(Dataset(path).episode(i), EPISODES[i]) for i in range(4))


def test_an_error_keeps_whole_episodes_and_the_mark(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), DatasetWriter(tmp_path / "d", SPEC) as writer:
        writer.append(EPISODES[0])
        raise RuntimeError("the environment broke")
    with pytest.raises(ConfigError, match="Its 1 whole episodes"):
        Dataset(tmp_path / "d")
    DatasetWriter(tmp_path / "d", SPEC, append=True).close()
    assert equal(Dataset(tmp_path / "d").episode(0), EPISODES[0])


@pytest.mark.parametrize("where", ["shard", "index"])
def test_a_full_disk_is_named_and_can_be_tried_again(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_new = files.write_new

    def full(path: Path, data: bytes) -> Any:
        if where == "shard" or path.name.startswith(f".{dataset_writer.INDEX}.tmp"):
            raise OSError(28, "No space left on device")
        return write_new(path, data)

    writer = DatasetWriter(tmp_path / "d", SPEC, made_by={"run": "a"})
    writer.append(EPISODES[0])
    with monkeypatch.context() as m:
        m.setattr(files, "write_new", full)
        with pytest.raises(CheckpointError, match="No space left on device; 0 episodes in it are safe"):
            writer.flush()
    with pytest.raises(ConfigError, match="It holds no whole episode yet"):
        Dataset(tmp_path / "d")
    assert writer.episodes == 1
    writer.append(EPISODES[1])
    writer.close()
    data = Dataset(tmp_path / "d")
    assert len(data.index["shards"]) == 1 and data.index["made_by"] == [{"run": "a"}]
    assert all(equal(data.episode(i), EPISODES[i]) for i in range(2))


def test_a_complete_dataset_stays_so_until_something_is_added(tmp_path: Path) -> None:
    path = write(tmp_path / "d", EPISODES[:1])
    before = Dataset(path).index
    with pytest.raises(ConfigError, match="has the info columns"), DatasetWriter(path, SPEC, append=True) as writer:
        writer.append(replace(EPISODES[1], info={}))
    assert Dataset(path).index == before
    DatasetWriter(path, SPEC, append=True, made_by={"run": "b"}).close()
    assert Dataset(path).index == before


def test_a_second_writer_is_noticed(tmp_path: Path) -> None:
    first = DatasetWriter(tmp_path / "d", SPEC)
    write(tmp_path / "d", EPISODES[:1], append=True)
    first.append(EPISODES[1])
    with pytest.raises(ConfigError, match=r"was changed by another writer; let one process"):
        first.close()
    assert equal(Dataset(tmp_path / "d").episode(0), EPISODES[0])


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def test_damage_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    cut = copy("cut")
    damage(cut / "000000" / "obs-1.npy", lambda x: x[:-1])
    with pytest.raises(ConfigError, match=r"obs-1.npy has \d+ bytes; expected \d+: the copy was cut short"):
        Dataset(cut)
    absent = copy("absent")
    (absent / "000000" / "reward.npy").unlink()
    with pytest.raises(ConfigError, match=r"reward.npy cannot be read \(No such file"):
        Dataset(absent)
    flipped = copy("flipped")
    damage(flipped / "000000" / "reward.npy", lambda x: x[:-1] + bytes([x[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"reward.npy is damaged: sha256"):
        Dataset(flipped).verify()
    index = copy("index")
    damage(index / "dataset.json", lambda x: x[: len(x) // 2])
    with pytest.raises(ConfigError, match=r"dataset.json is damaged"):
        open_dataset(index)
    newer = copy("newer")
    damage(newer / "dataset.json", lambda x: json.dumps({**json.loads(x), "format": 2}).encode())
    with pytest.raises(ConfigError, match="of format 2; this version of penstock reads format 1"):
        open_dataset(newer)


def test_what_is_no_dataset_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no dataset at .*nowhere"):
        open_dataset(tmp_path / "nowhere")
    (tmp_path / "x.csv").touch()
    with pytest.raises(ConfigError, match=r"is no dataset: it holds x.csv; expected dataset.json"):
        open_dataset(tmp_path)
    with pytest.raises(ConfigError, match="holds no episode"):
        open_dataset(write(tmp_path / "empty", []))


WRONG = {
    "no end": (replace(EPISODES[0], terminated=False), "has no end"),
    "reward": (replace(EPISODES[0], reward=np.zeros(3)), r"reward is float64\[3\]"),
    "short": (
        replace(EPISODES[0], action=EPISODES[0].action[:2]),
        r"action is float32\[2, 2\]; expected float32\[3, 2\]",
    ),
    "NaN": (replace(EPISODES[0], action=EPISODES[0].action * np.float32(np.nan)), "row 0 holds NaN"),
    "leaves": (replace(EPISODES[0], obs=EPISODES[0].obs["a"]), r"expected \[\"\['a'\]\""),
    "info": (replace(EPISODES[0], info={"logp": np.zeros(2)}), "'logp' has 2 rows; expected 3"),
    "empty": (replace(EPISODES[0], reward=np.zeros(0, np.float32)), "has no step"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_episode_that_does_not_fit_is_refused_and_named(case: str, tmp_path: Path) -> None:
    wrong, message = WRONG[case]
    with DatasetWriter(tmp_path / "d", SPEC) as writer:
        writer.append(EPISODES[0])
        with pytest.raises(ConfigError, match=rf"episode 1.*{message}"):
            writer.append(wrong)
    assert Dataset(tmp_path / "d").lengths.tolist() == [3]


def test_columns_stay_the_same(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "d", SPEC) as writer:
        writer.append(EPISODES[0])
        with pytest.raises(ConfigError, match=r"has the info columns \{\}"):
            writer.append(replace(EPISODES[0], info={}))


def test_other_spaces_are_named_by_their_leaf() -> None:
    check_spec(SPEC, SPEC, "dataset d", "Toy-v0")
    for other, message in (
        (replace(SPEC, obs=BOX), r"obs has the leaves .*'a'.*the environment's are \[''\]"),
        (replace(SPEC, obs={**SPEC.obs, "a": replace(BOX, shape=(3,))}), r"shape of obs\['a'\] is \(2,\), the environment's is \(3,\)"),
        (replace(SPEC, action=replace(BOX, dtype="float64")), "dtype of action is float32, the environment's is float64"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"dataset d has other spaces than Toy-v0: {message}"):
            check_spec(SPEC, other, "dataset d", "Toy-v0")
