"""`penstock replay info|export` shows what a run has stored, and writes it so that numpy gives back the record itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.datasets.reader import open_dataset
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.files.rundir import write_config
from penstock.run.trainer import Trainer
from tests.run.replays.recorded import B, Recorded, T, opened

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


def test_an_export_is_the_arrays_or_a_dataset(recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path) -> None:
    run = recorded("prioritized")
    said = cli("replay", "export", run.run, "--to", tmp_path / "replay.npz")
    assert (said.code, said.err) == (0, "")
    found, expected = opened(tmp_path / "replay.npz"), ps.load_replay(run.run)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)
    said = cli("replay", "export", run.checkpoint, "--to", tmp_path / "data")
    assert said.code == 0 and "whole episodes" in said.out
    source = open_dataset(tmp_path / "data")
    assert f"{len(source.lengths)} whole episodes" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "replay.npz"]


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


def test_info_takes_a_file_of_a_checkpoint(recorded: Callable[..., Recorded], cli: Cli) -> None:
    assert "100 rows in 2 slots" in cli("replay", "info", recorded("uniform").checkpoint / "replay-000.npy").out


def test_what_has_no_replay_says_why(recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path) -> None:
    ps.train(ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T, B),
                           ps.RunConfig(steps=16, dir=str(tmp_path / "ppo"), progress="off", eval_episodes=0)))  # fmt: skip
    said = cli("replay", "info", tmp_path / "ppo")
    assert said.code == 5
    assert "holds no replay: its algorithm learns from each batch once" in said.err
    said = cli("replay", "info", tmp_path)
    assert said.code == 2
    assert "is no run or checkpoint; expected the directory of a run" in said.err
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


def test_an_export_overwrites_nothing_and_leaves_nothing_half_written(
    recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded("frames")
    (tmp_path / "x.npz").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    for to, text in (("x.npz", "is there already"), ("full", "full"), ("y.csv", "ends in '.csv'; expected .npz"),
                     ("no/x.npz", "there is no folder"), ("no/data", "there is no folder")):  # fmt: skip
        said = cli("replay", "export", run.run, "--to", tmp_path / to)
        assert (said.code, text in said.err) == (2, True), said.err
    assert cli("replay", "export", run.run).code == 2
    assert cli("replay", "info", run.run, "--to", tmp_path / "y").code == 2

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    said = cli("replay", "export", run.run, "--to", tmp_path / "y.npz")
    assert said.code == 2 and "y.npz: No space left on device" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "x.npz"]
    assert (tmp_path / "x.npz").read_text() == "mine"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, of which the last two have their replay."""
    path = tmp_path_factory.mktemp("three") / "run"
    memory = ps.ReplaySettings(capacity=100)
    algo = ps.DQN(learning_starts=16, batch_size=8, replay_ratio=0.5, replay=memory, net=ps.Net(hidden=(8,)))
    settings = ps.RunConfig(steps=96, dir=str(path), progress="off", eval_episodes=0,
                            checkpoint_interval=32, keep=3, keep_replays=2)  # fmt: skip
    ps.train(ps.Experiment("CartPole-v1", algo, ps.SerialSampler(8, 2), settings))
    return path


def test_a_damaged_replay_names_those_that_are_good(three: Path, cli: Cli, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(three, tmp_path / "copy"))
    oldest, older, newest = sorted((copy / "checkpoints").iterdir())
    step, victim = int(older.name), newest / "replay-000.npy"
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    for said in (
        cli("replay", "info", copy, "--which", int(newest.name)), cli("replay", "info", newest),
        cli("replay", "export", newest, "--to", tmp_path / "x.npz"),
    ):  # fmt: skip
        assert said.code == 5
        assert f"good replays of {copy} are of step {step}: take one by --which STEP" in " ".join(said.err.split())
        assert f"{victim} is damaged" in said.err
    said = cli("replay", "info", copy, "--which", int(oldest.name))
    assert said.code == 5 and "is gone, as the run keeps that of its newest" in said.err
    assert f"are of step {step}" in said.err
    (older / "replay-000.npy").unlink()
    for path in (copy, older):
        said = cli("replay", "info", path)
        assert said.code == 5
        assert f"no checkpoint of {copy} has a good replay: copy it again; `penstock eval` needs none" in said.err


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
