"""Values of datasets are held against their spaces as environments' are, with the episode and the row."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.datasets import episode as episodes
from penstock.datasets.episode import Episode, illegal_choice
from penstock.datasets.reader import Dataset, open_dataset
from penstock.datasets.writer import DatasetWriter

VIEW = LeafSpec("box", (2,), "float32", -1.0, 1.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(3,), start=1)
MASK = LeafSpec("multi_binary", (3,), "int8")


def episode(L: int, **changed: Any) -> Episode:
    obs = changed.pop("obs", np.zeros((L + 1, 2), np.float32))
    return Episode(obs, changed.pop("action", np.ones(L, np.int64)), np.zeros(L, np.float32), True, False)


def written(path: Path, parts: list[Episode], spec: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset as a version wrote it that did not look at choices; two episodes to a shard."""
    with monkeypatch.context() as patched:
        patched.setattr(episodes, "check_choices", lambda *args: None)
        with DatasetWriter(path, spec) as writer:
            for i, part in enumerate(parts):
                writer.append(part)
                if i % 2:
                    writer.flush()
    return path


@pytest.mark.parametrize(
    ("leaf", "good", "bad", "said"),
    [
        (CHOICE, 3, 0, "action: got 0, expected 1 to 3"),
        (CHOICE, 1, 5, "action: got 5, expected 1 to 3"),
        (LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 0)), [1, 2], [1, 3], "at most 2"),
        (LeafSpec("multi_binary", (2,), "int8"), [0, 1], [0, 7], "got 7 at [1], expected at most 1"),
        (LeafSpec("multi_binary", (2,), "int8"), [0, 1], [-1, 1], "expected at least 0"),
    ],
)
def test_a_choice_that_is_none_names_episode_and_row(
    leaf: LeafSpec, good: Any, bad: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EnvSpec(VIEW, leaf)
    actions = [np.array([good] * L, leaf.dtype) for L in (3, 1, 2, 4)]
    actions[3][2] = bad
    parts = [episode(len(x), action=x) for x in actions]
    data = Dataset(written(tmp_path / "d", parts, spec, monkeypatch))
    for read in (data.verify, lambda: data.episode(3)):
        with pytest.raises(ConfigError, match=r"episode 3, row 2: .*") as error:
            read()
        assert said in str(error.value)
    data.episode(2)
    with DatasetWriter(tmp_path / "e", spec) as writer, pytest.raises(ConfigError, match="episode 0, row 2: action"):
        writer.append(parts[3])


def test_boxes_of_actions_may_lie_outside_as_the_agent_chose_them() -> None:
    spec = EnvSpec(VIEW, VIEW)
    assert illegal_choice([np.full((3, 2), 9, np.float32)], None, spec) is None


def test_a_masked_choice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EnvSpec({"obs": VIEW, "action_mask": MASK}, CHOICE)
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1]], np.int8)  # none where none matters
    obs = {"obs": np.zeros((4, 2), np.float32), "action_mask": mask}
    fine = episode(3, obs=obs, action=np.array([3, 1, 2]))
    bad = episode(3, obs=obs, action=np.array([3, 1, 3]))
    data = Dataset(written(tmp_path / "d", [fine, bad, fine], spec, monkeypatch))
    for read in (data.verify, lambda: data.episode(1)):
        with pytest.raises(
            ConfigError, match=r"episode 1, row 2: action: got 3, which obs\['action_mask'\] forbids.*\[2\]"
        ):
            read()
    data.episode(0)


def test_observations_outside_their_space_are_told_as_of_environments(tmp_path: Path) -> None:
    spec = EnvSpec(VIEW, CHOICE)
    parts = [episode(3), episode(2), episode(4)]
    parts[1].obs[2, 1] = 1.5
    parts[2].obs[0, 0] = -9
    with DatasetWriter(tmp_path / "d", spec, shard_bytes=1) as writer:
        for part in parts:
            writer.append(part)
    data = Dataset(tmp_path / "d")
    with pytest.warns(UserWarning, match=r"episode 1, row 2: obs: got 1\.5 at \[1\], expected at most 1\.0") as said:
        data.verify()
    assert len(said) == 1
    with pytest.raises(ConfigError, match="episode 1, row 2"):
        data.verify("always")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.verify("finite")
        data.verify("off")


def test_keys_that_the_environment_drops_are_dropped_in_its_datasets(tmp_path: Path) -> None:
    spec = EnvSpec({"a": {"b": VIEW, "c": MASK}, "d": VIEW}, CHOICE)
    obs = {
        "a": {"b": np.full((4, 2), 0.5, np.float32), "c": np.ones((4, 3), np.int8)},
        "d": np.full((4, 2), 0.25, np.float32),
    }
    with DatasetWriter(tmp_path / "d", spec) as writer:
        writer.append(episode(3, obs=obs))
    data = open_dataset(tmp_path / "d", drop=("a/b", "not there"))
    assert data.spec.obs == {"a": {"c": MASK}, "d": VIEW}
    data.verify()
    found = data.episode(0).obs
    assert found.keys() == {"a", "d"} and found["a"].keys() == {"c"}
    assert (found["a"]["c"] == 1).all() and (found["d"] == 0.25).all()


def minari(path: Path, mission: Any, action: Any) -> Path:
    h5py = pytest.importorskip("h5py")
    (path / "data").mkdir(parents=True)
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1.0] * 2, "high": [1.0] * 2}
    text = {"type": "Text", "max_length": 9, "min_length": 1, "charset": "go"}
    plain = {
        "total_episodes": 1,
        "observation_space": json.dumps({"type": "Dict", "subspaces": {"at": box, "mission": text}}),
        "action_space": json.dumps({"type": "Discrete", "dtype": "int64", "start": 1, "n": 3}),
    }
    (path / "data" / "metadata.json").write_text(json.dumps(plain))
    with h5py.File(path / "data" / "main_data.hdf5", "w") as file:
        group = file.create_group("episode_0")
        group["observations/at"], group["observations/mission"] = np.zeros((4, 2), np.float32), mission
        group["actions"], group["rewards"] = np.array(action), np.ones(3)
        group["terminations"], group["truncations"] = np.zeros(3, bool), np.arange(3) == 2
    return path


@pytest.mark.parametrize("dtype", ["S9", "O"])
def test_text_of_minari_is_dropped_or_shown_as_bytes(dtype: str, tmp_path: Path) -> None:
    path = minari(
        tmp_path / "d", np.array(["go", "stop", "go", "höher"] if dtype == "O" else ["go"] * 4, dtype), [1, 2, 3]
    )
    with pytest.raises(ConfigError, match=r"--env-drop mission\), or show it as bytes by env_text=64"):
        open_dataset(path)
    assert open_dataset(path, drop=("mission",)).episode(0).obs.keys() == {"at"}
    data = open_dataset(path, text=6)
    data.verify()
    shown = data.episode(0).obs["mission"]
    assert shown.dtype == np.uint8 and shown.shape == (4, 6)
    assert shown[0].tolist() == [*b"go", 0, 0, 0, 0]
    if dtype == "O":
        assert shown[3].tolist() == [*"höher".encode()]
        with pytest.raises(
            ConfigError, match="episode_0: observations, row 1: text 'stop' is 4 bytes long; set text=4 or more"
        ):
            open_dataset(path, text=3).verify()


def test_minaris_choices_count_from_the_start_of_their_space(tmp_path: Path) -> None:
    path = minari(tmp_path / "d", np.array(["go"] * 4, "S9"), [1, 3, 0])
    env = ps.EnvConfig("penstock.envs.toy:Echo", drop=("mission",))
    with pytest.raises(ConfigError, match="episode_0, row 2: action: got 0, expected 1 to 3"):
        open_dataset(path, env.drop).verify()
