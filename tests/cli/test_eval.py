from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from tests.cli.short import QUIET, Cli


def test_eval(cli: Cli, trained: Path) -> None:
    said = cli("eval", str(trained), "--episodes", "3")
    assert said.code == 0
    assert "3, actions deterministic" in said.out
    assert cli("eval", str(trained), "--episodes", "3").out == said.out
    assert "sampled" in cli("eval", str(trained), "--episodes", "3", "--stochastic", "--seed", "4").out
    short = cli("eval", str(trained), "--env-kwargs", "max_episode_steps=5", "--which", "best")
    assert re.search(r"length +5\.0", short.out)
    assert cli("eval", str(trained), "--which", "beste").code == 2
    assert cli("eval", str(trained), "--which", "7").code == 5
    assert cli("eval", str(trained), "--episodes", "0").code == 2


@pytest.mark.parametrize("env", ["CartPole-v1", "penstock.envs.toy:ThreeStep", "gymnasium:CartPole-v1"])
def test_the_current_folder_is_not_searched_for_what_is_not_named(
    env: str, cli: Cli, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for a module of a folder that one of an installed package would have imported, had it been there."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "gmpy2.py").write_text("open('EXECUTED', 'w').close()")
    (tmp_path / "gymnasium.py").write_text("open('EXECUTED', 'w').close()")
    cli("eval", str(trained), "--episodes", "1", "--env", env)
    cli("train", "ppo", "--env", env, *QUIET, "--run.dir", "again")
    cli("resume", str(trained), "--run.steps", "128")
    assert "" not in sys.path
    assert not (tmp_path / "EXECUTED").exists()


def test_the_current_folder_is_searched_last_for_names_that_were_typed_or_that_a_trusted_run_stores(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [path for path in sys.path if path]
    (tmp_path / "own_pole.py").write_text("import gymnasium\ndef Pole():\n    return gymnasium.make('CartPole-v1')\n")
    monkeypatch.setattr(sys, "path", [*path])
    assert cli("train", "ppo", "--env", "own_pole:Pole", *QUIET, "--run.dir", "run").code == 0
    assert sys.path == [*path, ""]
    for trusted in (True, False):
        monkeypatch.setenv("XDG_STATE_HOME", os.environ["XDG_STATE_HOME"] if trusted else str(tmp_path / "nobody"))
        sys.modules.pop("own_pole", None)
        monkeypatch.setattr(sys, "path", [*path])
        assert cli("eval", "run", "--episodes", "1").code == (0 if trusted else 5)
        assert sys.path == ([*path, ""] if trusted else path)


@pytest.mark.slow
def test_a_torch_py_beside_a_run_is_not_torch(trained: Path, tmp_path: Path) -> None:
    for name in ("torch", "numpy", "gymnasium"):
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w').close()")
    shutil.copytree(trained, tmp_path / "run")
    env = {**os.environ, "PYTHONPATH": os.path.abspath(""), "PENSTOCK_TRUST": str(tmp_path)}
    command = [sys.executable, "-m", "penstock", "eval", "run", "--episodes", "1"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "EXECUTED").exists()


def test_a_strangers_environment_needs_trust_and_one_of_ones_own_does_not(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pole.py").write_text("import gymnasium\ndef Pole():\n    return gymnasium.make('CartPole-v1')\n")
    assert cli("train", "ppo", "--env", "pole:Pole", *QUIET, "--run.dir", "run").code == 0
    assert cli("eval", "run", "--episodes", "1").code == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nobody"))
    for command in (("eval", "run"), ("record", "run", "--dataset", "data"), ("resume", "run")):
        said = cli(*command)
        assert said.code == 5
        assert re.search(r"run/config\.json names .*env='pole:Pole'.*--trust", said.err)
    assert cli("eval", "run", "--env", "CartPole-v1", "--episodes", "1").code == 0
    said = cli("eval", "run", "--wrappers", "a:b")
    assert said.code == 2
    assert "--wrappers a:b without --env" in said.err
    assert cli("record", "run", "--dataset", "data", "--episodes", "1", "--trust").code == 0
    assert cli("eval", "run", "--episodes", "1").code == 0


@pytest.fixture(scope="module")
def players(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one policy that plays both sides of a game."""
    run = tmp_path_factory.mktemp("players") / "run"
    config = ps.RunConfig(steps=64, dir=run, progress="off", eval_episodes=0)
    ps.train(ps.Experiment("penstock.envs.toy:Nim", ps.PPO(), ps.SerialSampler(T=8, B=4), config))
    return run


def test_matches(cli: Cli, players: Path) -> None:
    said = cli("eval", str(players), "--against", "random", "tests.run.playing.test_matches:perfect", "--episodes", "8")
    assert said.code == 0
    rows = [line.split("│")[1:-1] for line in said.out.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["random", *["tests.run.playing.test_matches:perfect"] * 2]
    assert all(int(row[3]) + int(row[4]) + int(row[5]) == int(row[2]) == 8 for row in rows)
    assert (players / "plots" / "matches.png").stat().st_size > 5_000
    assert cli("eval", str(players), "--against", "random", "--episodes", "1").code == 2
    assert cli("eval", str(players), "--against", "nobody").code == 5
    assert cli("eval", str(players), "--against", "random", "--video").code == 2
    assert "the agents are" in cli("eval", str(players), "--against", "random", "--seats", "listener_0").err
    assert "--seats agent_1 without --against" in cli("eval", str(players), "--seats", "agent_1").err


def test_exploitability(cli: Cli, players: Path) -> None:
    said = cli("eval", str(players), "--exploit", "--episodes", "3")
    assert said.code == 0
    assert re.search(r"exploitability .*\d\.\d{4}, exact", said.out)
    assert re.search(r"in place of agent_1 .*\d\.\d{4}, the policy itself -?\d\.\d{4}", said.out)
    said = cli("eval", str(players), "--exploit-steps", "32", "--episodes", "3", "--stochastic")
    assert said.code == 0 and "at least, by an exploiter of 32 steps" in said.out
    for other in (("--against", "random"), ("--video",)):
        assert "--exploit" in cli("eval", str(players), "--exploit", *other).err


def test_an_environment_of_many_agents_is_told_agent_by_agent(cli: Cli, players: Path, trained: Path) -> None:
    said = cli("eval", str(players), "--episodes", "4")
    assert said.code == 0 and "return, agent agent_0" in said.out and "return, policy" not in said.out
    assert "one agent" in cli("eval", str(trained), "--against", "random").err


def test_a_folder_of_runs_is_answered_with_the_runs(cli: Cli, tmp_path: Path) -> None:
    for name in ("runs/CartPole-v1/ppo/a", "runs/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "runs/search/settings/base").mkdir(parents=True)
    (tmp_path / "runs/search/settings/base/config.json").write_text("{}")
    said = cli("eval", "runs")
    assert said.code == 5
    assert "runs is a folder of runs, name one of them: runs/CartPole-v1/ppo/a, runs/b\n" in said.err


def test_without_the_extra_a_video_is_refused_before_anything_is_played(
    cli: Cli, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    said = cli("eval", str(trained), "--video")
    assert said.code == 2
    assert "imageio-ffmpeg is not installed" in said.err
    assert "evaluation of" not in said.out
