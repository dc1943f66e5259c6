from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.datasets.reader import Dataset, open_dataset
from penstock.datasets.writer import DatasetWriter
from penstock.envs.toy import Endless
from penstock.run import recording
from penstock.run.recording import record
from penstock.testing.pools import echo_config
from tests.run.recorded import QUIET, replayed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = str(tmp_path_factory.mktemp("record") / "run")
    assert main(["train", "ppo", "--env", "CartPole-v1", "--preset", "none", *QUIET, "--run.dir", run]) == 0
    return run


def test_a_kill_before_the_hdf5_file_is_written_loses_nothing(trained: str, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    with DatasetWriter(tmp_path / "d" / "episodes", ps.load(trained).spec) as writer:
        record(trained, tmp_path / "other", 3)
        for i in range(3):
            writer.append(Dataset(tmp_path / "other").episode(i))
    for file_format in ("penstock", "minari"):
        with pytest.raises(ConfigError, match="holds a half-written Minari dataset, which was not touched"):
            record(trained, tmp_path / "d", 2, file_format=file_format)
    with pytest.raises(
        ConfigError, match=r"half-written Minari dataset, to which --format penstock .* use --format minari"
    ):
        record(trained, tmp_path / "d", 2, append=True)
    with pytest.raises(ConfigError, match=r"is half-written.*go on with .*--format minari --append"):
        open_dataset(tmp_path / "d")
    found = record(trained, tmp_path / "d", 2, file_format="minari", append=True)
    assert (len(found.returns), found.total) == (2, 5)
    assert len(open_dataset(tmp_path / "d").lengths) == 5


def test_what_would_refuse_the_hdf5_file_is_known_before_anything_is_played(
    trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    pytest.importorskip("h5py")
    with pytest.raises(ConfigError, match="names need a version"):
        record(trained, tmp_path / "root" / "d", 2, file_format="minari")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[offline\]"):
        record(trained, tmp_path / "d", 2, file_format="minari")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("file_format", ["penstock", "minari"])
def test_a_file_is_called_one(append: bool, file_format: Any, trained: str, tmp_path: Path) -> None:
    if file_format == "minari":
        pytest.importorskip("h5py")
    (tmp_path / "x.npz").write_text("mine")
    with pytest.raises(ConfigError, match=r"x\.npz is a file, which was not touched; a dataset is a folder"):
        record(trained, tmp_path / "x.npz", 2, append=append, file_format=file_format)
    assert (tmp_path / "x.npz").read_text() == "mine"


def test_an_environment_of_other_spaces_is_refused_before_anything_is_written(trained: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the policy was trained on .* Acrobot-v1 as it is made now has"):
        record(trained, tmp_path / "d", 2, env="Acrobot-v1")
    assert not (tmp_path / "d").exists()


def run_of(env: Any, folder: Path, algo: Any = None) -> Path:
    run = ps.RunConfig(steps=64, dir=str(folder), eval_episodes=0, progress="off", learner_threads=1)
    return ps.train(ps.Experiment(env, algo or ps.PPO(epochs=1), ps.SerialSampler(T=16, B=4), run)).run_dir


@pytest.mark.slow
def test_nested_spaces_and_memory_go_through(tmp_path: Path) -> None:
    """Boxes are stored as the agent chose them, and the environment's info keys are columns."""
    config = echo_config(nested=True)
    net = ps.Net(hidden=(8,), recurrent="gru", recurrent_size=8)
    run = run_of(config, tmp_path / "run", ps.PPO(epochs=1, net=net))
    found = record(run, tmp_path / "d", 12, deterministic=False, env=config)
    data = Dataset(tmp_path / "d")
    assert (len(found.returns), found.total, found.steps) == (12, 12, int(data.lengths.sum()))
    assert set(data.info) == {"env/echo", "env/is_success", "logp"}
    assert any(np.abs(data.episode(i).action["arm"]).max() > 1 for i in range(12))
    assert float(data.episode(3).reward.sum()) == pytest.approx(float(found.returns[3]), rel=1e-5)


def test_a_native_batched_environment_gives_its_share_and_no_more(tmp_path: Path) -> None:
    def four() -> CartPoleVectorEnv:
        return CartPoleVectorEnv(num_envs=4)

    run = run_of(CartPoleVectorEnv, tmp_path / "run")
    record(run, tmp_path / "d", 20, deterministic=False)
    data = Dataset(tmp_path / "d")
    assert len(data.lengths) == 20
    for i in range(20):
        replayed(data.episode(i))
    assert len(record(run_of(four, tmp_path / "four"), tmp_path / "e", 20, env=four).returns) == 20
    clone = ps.Experiment(CartPoleVectorEnv, ps.BC(), ps.OfflineSampler(str(tmp_path / "d"), T=8, B=4))
    with ps.Trainer(clone) as trainer:
        trainer.train()
        assert len(trainer.evaluate(3)[1]) == 3


def test_an_environment_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> Any:
        return Endless(limit=10**9)

    run = run_of(endless, tmp_path / "run")
    monkeypatch.setattr(recording, "_MAX_STEPS", 128)
    with pytest.warns(UserWarning, match="none has ended in 128 steps"), pytest.raises(ConfigError, match="time limit"):
        record(run, tmp_path / "d", 2, env=endless)


def test_a_broken_environment_keeps_what_was_whole(tmp_path: Path) -> None:
    class Breaks(gym.Wrapper[Any, Any, Any, Any]):
        """Fails in the 40th step of an instance's life."""

        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 400:
                raise RuntimeError("the motor is hot")
            return self.env.step(action)

    def made() -> Any:
        return Breaks(gym.make("CartPole-v1", max_episode_steps=5))

    run = run_of(made, tmp_path / "run")
    with pytest.raises(ps.EnvWorkerError, match="the motor is hot"):
        record(run, tmp_path / "d", 2000, env=made)
    with pytest.raises(ConfigError, match="whole episodes in 1 shards are not lost"):
        Dataset(tmp_path / "d")
    record(run, tmp_path / "d", 0, append=True, env=made)
    assert len(Dataset(tmp_path / "d").lengths) > 100
