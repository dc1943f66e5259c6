"""`penstock record`: what it writes, what it refuses, and what a signal leaves."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.datasets.reader import Dataset, open_dataset
from penstock.run.recording import record
from tests.cli.short import QUIET, Cli
from tests.run.recorded import replayed


@pytest.fixture(scope="session")
def run(trained: Path) -> str:
    return str(trained)


def test_it_writes_what_the_policy_did(cli: Cli, run: str) -> None:
    said = cli("record", run, "--dataset", "d", "--episodes", "20", "--stochastic")
    assert said.code == 0
    assert "20 of 20, actions sampled; 20 in the dataset" in said.out
    assert "penstock train bc --env CartPole-v1" in said.out.replace("\n", " ")
    data = Dataset("d")
    data.verify()
    assert len(data.lengths) == 20
    assert data.index["made_by"][0]["run"] == run
    assert len({data.episode(i).obs[0].tobytes() for i in range(20)}) == 20
    for i in range(5):
        replayed(data.episode(i))
    policy = ps.load(run)
    one = data.episode(0)
    inputs = ps.Inputs(*(np.asarray(x) for x in (one.obs[:-1], None, None, None)))
    torch = pytest.importorskip("torch")
    dist = policy.agent(ps.Inputs(torch.from_numpy(inputs.obs), None, None, None)).dist
    assert dist.log_prob(torch.from_numpy(one.action)).tolist() == pytest.approx(one.info["logp"].tolist(), abs=1e-5)


def test_the_same_command_gives_the_same_data_and_append_gives_more(cli: Cli, run: str) -> None:
    for name in ("a", "b"):
        assert cli("record", run, "--dataset", name, "--episodes", "6").code == 0
    a, b = Dataset("a"), Dataset("b")
    assert [a.episode(i).obs.tobytes() for i in range(6)] == [b.episode(i).obs.tobytes() for i in range(6)]
    said = cli("record", run, "--dataset", "a", "--episodes", "6")
    assert said.code == 2
    assert "holds a dataset of 6 episodes, which was not touched; add to it with --append" in said.err
    assert cli("record", run, "--dataset", "a", "--episodes", "4", "--append").code == 0
    a = Dataset("a")
    assert len({a.episode(i).obs.tobytes() for i in range(10)}) == 10
    assert cli("record", run, "--dataset", "a", "--episodes", "0").code == 2
    assert cli("record", run, "--dataset", "a", "--episodes", "0", "--append").code == 0
    assert len(Dataset("a").lengths) == 10


def test_a_policy_is_cloned_from_it(cli: Cli, run: str) -> None:
    assert cli("record", run, "--dataset", "d", "--episodes", "5").code == 0
    said = cli("train", "bc", "--env", "CartPole-v1", "--sampler.dataset", "d", *QUIET[2:], "--run.dir", "bc")
    assert said.code == 0
    assert cli("eval", "bc", "--episodes", "2").code == 0
    said = cli("train", "bc", "--env", "Acrobot-v1", "--sampler.dataset", "d", *QUIET[2:])
    assert said.code == 2
    assert "shape of obs is (4,), the environment's is (6,)" in said.err
    said = cli("train", "marwil", "--env", "CartPole-v1", *QUIET[2:])
    assert (said.code, "sampler.dataset is empty" in said.err) == (2, True)


def test_minari_format(cli: Cli, run: str) -> None:
    pytest.importorskip("h5py")
    for name, args in (("ours", ()), ("theirs", ("--format", "minari"))):
        assert cli("record", run, "--dataset", name, "--episodes", "3", *args).code == 0
    ours, theirs = open_dataset("ours"), open_dataset("theirs")
    assert sorted(p.name for p in Path("theirs").iterdir()) == ["data"]
    assert theirs.spec == ours.spec
    for i in range(3):
        assert theirs.episode(i).obs.tobytes() == ours.episode(i).obs.tobytes()
        assert theirs.episode(i).action.tobytes() == ours.episode(i).action.tobytes()
    for args in ((), ("--format", "minari")):
        said = cli("record", run, "--dataset", "theirs", "--append", *args)
        assert (said.code, "holds a Minari dataset, which cannot be added to in any format" in said.err) == (2, True)
    said = cli("record", run, "--dataset", "ours", "--append", "--format", "minari")
    assert said.code == 2
    assert "ours holds a dataset in penstock's format, to which --format minari cannot be added" in said.err
    assert "leave out --format, or choose another directory" in said.err
    assert len(Dataset("ours").lengths) == 3
    said = cli("train", "bc", "--env", "CartPole-v1", "--sampler.dataset", "theirs", *QUIET[2:])
    assert said.code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_leaves_whole_episodes(
    number: int, code: int, run: str, zygote: Any, until: Any, tmp_path: Path
) -> None:
    child = zygote.cli("record", run, "--dataset", str(tmp_path / "d"), "--episodes", "1000000")
    until((tmp_path / "d" / "dataset.json").exists, child)
    time.sleep(1.0)  # what is played in the first 30 s is in memory alone
    child.send(number)
    assert child.wait() == code, child.output
    if number == signal.SIGKILL:
        with pytest.raises(ConfigError, match="half-written"):
            Dataset(tmp_path / "d")
        record(run, tmp_path / "d", 2, append=True)
        assert len(Dataset(tmp_path / "d").lengths) == 2
        return
    data = Dataset(tmp_path / "d")
    data.verify()
    assert f"{len(data.lengths):,} of 1,000,000" in child.output
