"""`penstock record`: what it writes, what it refuses, and what a signal leaves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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

QUIET = (
    "--sampler.T", "16", "--sampler.B", "4", "--run.steps", "128", "--run.eval-episodes", "1", "--run.tensorboard", "False",
    "--run.progress", "off",
)  # fmt: skip
Cli = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = str(tmp_path_factory.mktemp("record") / "run")
    assert main(["train", "ppo", "--env", "CartPole-v1", "--preset", "none", *QUIET, "--run.dir", run]) == 0
    return run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command in this process and in an empty folder; gives code, out and err."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*argv: str) -> SimpleNamespace:
        capsys.readouterr()
        code = main(list(argv))
        return SimpleNamespace(code=code, **dict(zip(("out", "err"), capsys.readouterr())))

    return run


def replayed(episode: Any) -> None:
    """Raises AssertionError unless CartPole answers the episode's actions as it says."""
    env: Any = gym.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    env.state = episode.obs[0].astype(np.float64)
    for t, action in enumerate(episode.action):
        obs, reward, terminated, _, _ = env.step(action)
        assert obs == pytest.approx(episode.obs[t + 1], abs=1e-3)
        assert (float(reward), terminated) == (episode.reward[t], episode.terminated and t + 1 == len(episode))


def test_it_writes_what_the_policy_did(cli: Cli, trained: str) -> None:
    said = cli("record", trained, "--dataset", "d", "--episodes", "20", "--stochastic")
    assert said.code == 0
    assert "20 of 20, actions sampled; 20 in the dataset" in said.out
    assert "penstock train bc --env CartPole-v1" in said.out.replace("\n", " ")
    data = Dataset("d")
    data.verify()
    assert len(data.lengths) == 20
    assert data.index["made_by"][0]["run"] == trained
    assert len({data.episode(i).obs[0].tobytes() for i in range(20)}) == 20
    for i in range(5):
        replayed(data.episode(i))
    policy = ps.load(trained)
    one = data.episode(0)
    inputs = ps.Inputs(*(np.asarray(x) for x in (one.obs[:-1], None, None, None)))
    torch = pytest.importorskip("torch")
    dist = policy.agent(ps.Inputs(torch.from_numpy(inputs.obs), None, None, None)).dist
    assert dist.log_prob(torch.from_numpy(one.action)).tolist() == pytest.approx(one.info["logp"].tolist(), abs=1e-5)


def test_the_same_command_gives_the_same_data_and_append_gives_more(cli: Cli, trained: str) -> None:
    for name in ("a", "b"):
        assert cli("record", trained, "--dataset", name, "--episodes", "6").code == 0
    a, b = Dataset("a"), Dataset("b")
    assert [a.episode(i).obs.tobytes() for i in range(6)] == [b.episode(i).obs.tobytes() for i in range(6)]
    said = cli("record", trained, "--dataset", "a", "--episodes", "6")
    assert said.code == 2
    assert "holds a dataset of 6 episodes, which was not touched; add to it with --append" in said.err
    assert cli("record", trained, "--dataset", "a", "--episodes", "4", "--append").code == 0
    a = Dataset("a")
    assert len({a.episode(i).obs.tobytes() for i in range(10)}) == 10
    assert cli("record", trained, "--dataset", "a", "--episodes", "0").code == 2
    assert cli("record", trained, "--dataset", "a", "--episodes", "0", "--append").code == 0
    assert len(Dataset("a").lengths) == 10


def test_a_policy_is_cloned_from_it(cli: Cli, trained: str) -> None:
    assert cli("record", trained, "--dataset", "d", "--episodes", "5").code == 0
    said = cli("train", "bc", "--env", "CartPole-v1", "--sampler.dataset", "d", *QUIET, "--run.dir", "bc")
    assert said.code == 0
    assert cli("eval", "bc", "--episodes", "2").code == 0
    said = cli("train", "bc", "--env", "Acrobot-v1", "--sampler.dataset", "d", *QUIET)
    assert said.code == 2
    assert "shape of obs is (4,), the environment's is (6,)" in said.err
    said = cli("train", "marwil", "--env", "CartPole-v1", *QUIET)
    assert (said.code, "sampler.dataset is empty" in said.err) == (2, True)


def test_minari_format(cli: Cli, trained: str) -> None:
    pytest.importorskip("h5py")
    for name, args in (("ours", ()), ("theirs", ("--format", "minari"))):
        assert cli("record", trained, "--dataset", name, "--episodes", "3", *args).code == 0
    ours, theirs = open_dataset("ours"), open_dataset("theirs")
    assert sorted(p.name for p in Path("theirs").iterdir()) == ["data"]
    assert theirs.spec == ours.spec
    for i in range(3):
        assert theirs.episode(i).obs.tobytes() == ours.episode(i).obs.tobytes()
        assert theirs.episode(i).action.tobytes() == ours.episode(i).action.tobytes()
    for args in ((), ("--format", "minari")):
        said = cli("record", trained, "--dataset", "theirs", "--append", *args)
        assert (said.code, "holds a Minari dataset, which cannot be added to in any format" in said.err) == (2, True)
    said = cli("record", trained, "--dataset", "ours", "--append", "--format", "minari")
    assert said.code == 2
    assert "ours holds a dataset in penstock's format, to which --format minari cannot be added" in said.err
    assert "leave out --format, or choose another directory" in said.err
    assert len(Dataset("ours").lengths) == 3
    said = cli("train", "bc", "--env", "CartPole-v1", "--sampler.dataset", "theirs", *QUIET)
    assert said.code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_leaves_whole_episodes(
    number: int, code: int, trained: str, zygote: Any, until: Any, tmp_path: Path
) -> None:
    child = zygote.cli("record", trained, "--dataset", str(tmp_path / "d"), "--episodes", "1000000")
    until((tmp_path / "d" / "dataset.json").exists, child)
    time.sleep(1.0)  # what is played in the first 30 s is in memory alone
    child.send(number)
    assert child.wait() == code, child.output
    if number == signal.SIGKILL:
        with pytest.raises(ConfigError, match="half-written"):
            Dataset(tmp_path / "d")
        record(trained, tmp_path / "d", 2, append=True)
        assert len(Dataset(tmp_path / "d").lengths) == 2
        return
    data = Dataset(tmp_path / "d")
    data.verify()
    assert f"{len(data.lengths):,} of 1,000,000" in child.output


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
    run = ps.RunConfig(steps=64, dir=str(folder), eval_episodes=0, progress="off", tensorboard=False, learner_threads=1)
    return ps.train(ps.Experiment(env, algo or ps.PPO(), ps.SerialSampler(T=16, B=4), run)).run_dir


def test_nested_spaces_and_memory_go_through(tmp_path: Path) -> None:
    """Boxes are stored as the agent chose them, and the environment's info keys are columns."""
    config = echo_config(nested=True)
    net = ps.Net(hidden=(8,), recurrent="gru", recurrent_size=8)
    run = run_of(config, tmp_path / "run", ps.PPO(net=net))
    found = record(run, tmp_path / "d", 40, deterministic=False, env=config)
    data = Dataset(tmp_path / "d")
    assert (len(found.returns), found.total, found.steps) == (40, 40, int(data.lengths.sum()))
    assert set(data.info) == {"env/echo", "env/is_success", "logp"}
    assert any(np.abs(data.episode(i).action["arm"]).max() > 1 for i in range(40))
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
