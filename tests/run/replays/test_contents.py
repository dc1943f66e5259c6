"""Arrays and datasets of a stored replay are the record that the run collected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.datasets.reader import open_dataset
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.replays.stored_replay import open_replay, whole_episodes
from tests.run.replays.recorded import CASES, B, Recorded, T

pytestmark = pytest.mark.timeout(60)
Get = Callable[..., Recorded]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batches", [pytest.param(2, id="partly full"), pytest.param(20, id="gone round")])
def test_arrays_are_the_record(case: str, batches: int, recorded: Get) -> None:
    run = recorded(case, batches)
    found = ps.load_replay(run.run)
    rows, kept = found["row"], run.own.replay.storage
    assert rows.tolist() == list(range(kept.oldest, run.length)) and len(rows) < kept.rows
    for name, whole in run.record.items():
        more = name in ("obs", "first")
        used = np.ones((len(rows) + more, B), bool)
        if name in ("action", "reward"):
            used = run.record["valid"][rows]  # of a row that is not valid the null action and 0 are kept
        expected = whole[rows[0] : run.length + more]
        np.testing.assert_array_equal(found[name][used], expected[used].astype(found[name].dtype), err_msg=name)
        assert found[name].shape == expected.shape and type(found[name]) is np.ndarray
    assert not any(".age" in name for name in found)


@pytest.mark.parametrize(
    "case", ["uniform", "prioritized", *(pytest.param(x, marks=pytest.mark.slow) for x in ("frames", "sequences"))]
)
def test_sample_rows_are_what_can_be_drawn(case: str, recorded: Get) -> None:
    run = recorded(case)
    found, index = ps.load_replay(run.run), run.own.replay.index
    stride = run.own.replay.view.stride
    assert found["sample.row"].tolist() == [u * stride for u in range(index.tail, index.head)]
    assert found["sample.row"].min() >= found["row"].min()
    name = "sample.mass" if "sample.mass" in found else "sample.usable"
    assert (name == "sample.mass") == (case in ("prioritized", "sequences"))
    assert np.count_nonzero(found[name]) == len(run.own.replay)
    drawn = run.own.replay.draw(200, np.random.default_rng(0))
    assert (found[name][drawn.unit - index.tail, drawn.slot] > 0).all()


def test_recurrent_states_come_with_their_rows(recorded: Get) -> None:
    run = recorded("sequences")
    found = ps.load_replay(run.checkpoint)
    assert found["state.row"].tolist() == list(range(found["state.row"][0], run.length, 8))
    for i, row in enumerate(found["state.row"]):
        for name in ("c", "h"):
            np.testing.assert_array_equal(found[f"state.{name}"][i], run.states[row // T][name])


def episodes(record: dict[str, Any], first_row: int) -> list[tuple[int, int, int]]:
    """Slot, first row and end of every whole episode from a row on, found row by row."""
    found: list[tuple[int, int, int]] = []
    for b in range(B):
        opened = None
        for t in range(first_row, len(record["valid"])):
            opened = t if record["first"][t, b] else opened
            opened = opened if record["valid"][t, b] else None
            if opened is not None and (record["terminated"] | record["truncated"])[t, b]:
                found.append((b, opened, t + 1))
                opened = None
    return found


@pytest.mark.parametrize("case", ["uniform", "prioritized", "frames"])
def test_a_dataset_has_the_whole_episodes(case: str, recorded: Get, tmp_path: Path) -> None:
    run = recorded(case)
    expected = episodes(run.record, open_replay(run.run).oldest)
    assert ps.replay_to_dataset(run.run, tmp_path / "data") == len(expected) > 1
    assert whole_episodes(open_replay(run.run)) == expected
    source = open_dataset(tmp_path / "data")
    source.verify()
    for i, (b, start, stop) in enumerate(expected):
        found, record = source.episode(i), {name: x[:, b] for name, x in run.record.items()}
        np.testing.assert_array_equal(found.obs, record["obs"][start : stop + 1])
        np.testing.assert_array_equal(found.action, record["action"][start:stop])
        np.testing.assert_array_equal(found.reward, record["reward"][start:stop].astype(np.float32))
        assert (found.terminated, found.truncated) == (record["terminated"][stop - 1], record["truncated"][stop - 1])
    assert set(source.info) == ({"q", "q_max"} if case == "prioritized" else set())
    index = json.loads((tmp_path / "data" / "dataset.json").read_text())
    assert index["env"] == CASES[case][0] and index["made_by"][0]["run"] == str(run.run)
    with pytest.raises(ConfigError, match="data"):
        ps.replay_to_dataset(run.run, tmp_path / "data")


def test_nested_observations_are_named_by_their_path_and_stay_nested_in_a_dataset(tmp_path: Path) -> None:
    algo = ps.DQN(learning_starts=16, batch_size=8, replay=ps.ReplaySettings(capacity=100), net=ps.Net(hidden=(8,)))
    settings = ps.RunConfig(steps=64, dir=str(tmp_path / "run"), progress="off", eval_episodes=0)
    ps.train(ps.Experiment("penstock.envs.toy:BitFlip", algo, ps.SerialSampler(T, B), settings))
    found = ps.load_replay(tmp_path / "run")
    keys = {name.partition(".")[2] for name in found if name.startswith("obs.")}
    assert keys == {"observation", "achieved_goal", "desired_goal"}
    ps.replay_to_dataset(tmp_path / "run", tmp_path / "data")
    source = open_dataset(tmp_path / "data")
    for i, (b, start, stop) in enumerate(whole_episodes(open_replay(tmp_path / "run"))):
        episode, rows = source.episode(i), slice(start - found["row"][0], stop - found["row"][0] + 1)
        assert episode.obs.keys() == keys
        for key in keys:
            np.testing.assert_array_equal(episode.obs[key], found[f"obs.{key}"][rows, b])


def test_without_a_whole_episode_no_dataset_is_made(recorded: Get, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no episode from its first row to its last"):
        ps.replay_to_dataset(recorded("box").run, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_checkpoint_without_its_run_has_no_spaces(recorded: Get, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(recorded("frames").checkpoint, tmp_path / "alone"))
    with pytest.raises(CheckpointError, match=r"alone needs its run's config\.json, which holds its spaces"):
        ps.load_replay(alone)
    alone = Path(shutil.copytree(recorded("uniform").checkpoint, tmp_path / "plain"))
    assert ps.load_replay(alone)["row"].size
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ps.replay_to_dataset(alone, tmp_path / "data")


def test_a_damaged_replay_is_named(recorded: Get, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded("uniform").run, tmp_path / "run"))
    victim = find_checkpoint(run) / "replay-002.npy"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    for call in (lambda: ps.load_replay(run), lambda: ps.replay_to_dataset(run, tmp_path / "data")):
        with pytest.raises(CheckpointError, match=f"{victim} is damaged"):
            call()
