"""`penstock replay info|export` shows what a run has stored, and writes it so that numpy gives back the record itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.files.rundir import write_config
from penstock.run.replays.export import export
from penstock.run.replays.stored import open_replay
from penstock.run.trainer import Trainer
from tests.run.replays.recorded import CASES, B, Recorded, T, opened

pytestmark = pytest.mark.timeout(60)


Cli = Callable[..., SimpleNamespace]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command in this process: code, out with its wrapped lines joined, err."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv: str | Path) -> SimpleNamespace:
        capsys.readouterr()
        try:
            code: Any = main([str(x) for x in argv])
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=" ".join(out.split()), err=err)

    return run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("batches", "to"),
    [
        pytest.param(2, "folder", id="partly full"),
        pytest.param(20, "replay.npz", id="gone round"),
        pytest.param(2, "replay.npz", marks=pytest.mark.slow),
        pytest.param(20, "folder", marks=pytest.mark.slow),
    ],
)
def test_an_export_is_the_record(
    case: str, batches: int, to: str, recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path
) -> None:
    run = recorded(case, batches)
    said = cli("replay", "export", run.run, "--to", tmp_path / to)
    assert (said.code, said.err) == (0, "")
    found = opened(tmp_path / to)
    rows = found["row"]
    kept = run.own.replay.storage
    assert rows.tolist() == list(range(kept.oldest, run.length))
    assert len(rows) < kept.rows
    for name, whole in run.record.items():
        more = name in ("obs", "first")
        used = np.ones((len(rows) + more, B), bool)
        if name in ("action", "reward"):
            used = run.record["valid"][rows]  # of a row that is not valid the null action and 0 are kept
        expected = whole[rows[0] : run.length + more]
        np.testing.assert_array_equal(found[name][used], expected[used].astype(found[name].dtype), err_msg=name)
        assert found[name].shape == expected.shape


def test_frames_can_stay_single(recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path) -> None:
    run = recorded("frames")
    assert cli("replay", "export", run.checkpoint, "--to", tmp_path / "x.npz", "--frames").code == 0
    found = opened(tmp_path / "x.npz")
    rows = found["row"]
    stacks = run.record["obs"][rows[0] : run.length + 1]
    np.testing.assert_array_equal(found["obs"], stacks[:, :, -1])
    assert found["obs.age"].max() == 3
    # The stack of a row: its own frame and the three before, the episode's first repeated.
    t, b = 20, 1
    ages = np.minimum(found["obs.age"][t, b], np.arange(3, -1, -1))
    np.testing.assert_array_equal(found["obs"][t - ages, b], stacks[t, b])


def test_info_says_what_is_stored(recorded: Callable[..., Recorded], cli: Cli) -> None:
    run = recorded("prioritized")
    said = cli("replay", "info", run.run)
    assert (said.code, said.err) == (0, "")
    own = run.own
    for text in (
        f"{run.checkpoint}, step {own.collected:,}", "100 rows in 2 slots", "110 and 159 of 160 rows",
        f"{own.collected:,} environment steps appended, {own.trained:,} gradient steps by the ratio",
        f"prioritized, {len(own.replay):,} samples can be drawn", "largest ever", "a tenth of the samples takes",
        "info['q']", "obs │ float32 │ [51, 2, 4] │ 1,632", "index.mass │ float64 │ [51, 2]",
    ):  # fmt: skip
        assert text in said.out
    again = cli("replay", "info", run.checkpoint)
    assert again.out.partition("capacity")[2] == said.out.partition("capacity")[2]


def test_info_takes_a_file_of_a_checkpoint_and_an_export(
    recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path
) -> None:
    run = recorded("uniform")
    assert "100 rows in 2 slots" in cli("replay", "info", run.checkpoint / "replay-000.npy").out
    for to in ("x.npz", "folder"):
        export(open_replay(run.run), tmp_path / to)
        said = cli("replay", "info", tmp_path / to)
        assert said.code == 0
        assert "penstock replay export 2" in said.out
        assert "first │ bool │ [51, 2] │ 102" in said.out
        assert "action │ int64 │ [50, 2] │ 800" in said.out
    with np.load(tmp_path / "x.npz") as file:
        about = json.loads(file["about.json"])
    assert about["spec"]["obs"]["leaf"][:2] == ["box", [4]]


def test_what_has_no_replay_says_why(recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path) -> None:
    ps.train(ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T, B),
                           ps.RunConfig(steps=16, dir=str(tmp_path / "ppo"), progress="off", eval_episodes=0)))  # fmt: skip
    said = cli("replay", "info", tmp_path / "ppo")
    assert said.code == 5
    assert "holds no replay: its algorithm learns from each batch once" in said.err
    said = cli("replay", "info", tmp_path)
    assert said.code == 2
    assert "is no run, checkpoint or exported replay" in said.err
    run = tmp_path / "run"
    shutil.copytree(recorded("uniform").run, run)
    victim = find_checkpoint(run) / "replay-002.npy"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    said = cli("replay", "export", run, "--to", tmp_path / "x.npz")
    assert said.code == 5
    assert f"{victim} is damaged" in said.err
    victim.unlink()
    assert f"{victim} is missing" in cli("replay", "info", victim.parent).err
    assert not (tmp_path / "x.npz").exists()
    (tmp_path / "about.json").write_text("{}")
    assert "is no exported replay: its format is None" in cli("replay", "info", tmp_path).err


def test_an_export_overwrites_nothing_and_leaves_nothing_half_written(
    recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded("frames")
    (tmp_path / "x.npz").write_text("mine")
    said = cli("replay", "export", run.run, "--to", tmp_path / "x.npz")
    assert (said.code, "is there already" in said.err) == (2, True)
    assert (tmp_path / "x.npz").read_text() == "mine"
    assert cli("replay", "export", run.run).code == 2
    assert cli("replay", "info", run.run, "--to", tmp_path / "y").code == 2
    alone = tmp_path / "alone"
    shutil.copytree(run.checkpoint, alone)
    with pytest.raises(CheckpointError, match=r"frame by frame.*config\.json.*--frames"):
        export(open_replay(alone), tmp_path / "y.npz")
    export(open_replay(alone), tmp_path / "single.npz", frames=True)
    replay = open_replay(run.run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"y\.npz needs .* MB and 0\.0 MB are free"):
        export(replay, tmp_path / "y.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "single.npz", "x.npz"]


def test_of_several_policies_one_is_named(cli: Cli, tmp_path: Path) -> None:
    mapping = {"agent_0": "a", "agent_1": "b"}
    dqn = ps.DQN(learning_starts=16, batch_size=8, replay=ps.ReplaySettings(capacity=100), net=ps.Net(hidden=(8,)))
    algo = ps.Policies({"a": dqn, "b": dqn}, mapping)
    exp = ps.Experiment("penstock.envs.toy:TeamBits", algo, ps.SerialSampler(T, B))
    with Trainer(exp, tmp_path) as trainer:
        trainer.train()
        batch = trainer.batch.copy()  # pyright: ignore[reportOptionalMemberAccess]
        trainer.save()
        write_config(trainer)
    said = cli("replay", "info", tmp_path)
    assert (
        said.code == 0 and f"{T * B}, {T * B} of them" in said.out and "policy a" in said.out and "policy b" in said.out
    )
    assert "policy b" not in cli("replay", "info", tmp_path, "--policy", "a").out
    for name in "ab":
        assert cli("replay", "export", tmp_path, "--policy", name, "--to", tmp_path / f"{name}.npz").code == 0
        found = opened(tmp_path / f"{name}.npz")
        np.testing.assert_array_equal(found["reward"], batch[name].reward)
        np.testing.assert_array_equal(found["obs"], batch[name].obs)
    said = cli("replay", "export", tmp_path, "--to", tmp_path / "x.npz")
    assert said.code == 2 and "['a', 'b']" in said.err and "--policy a" in said.err
    said = cli("replay", "export", tmp_path, "--policy", "c", "--to", tmp_path / "x.npz")
    assert said.code == 2 and "no replay of a policy 'c'" in said.err
