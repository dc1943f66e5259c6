"""Wrappers with arguments on the command line: trained, evaluated, recorded, resumed, replayed; in presets and grids."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli.config import experiment_from
from penstock.cli.settings import experiment, train_parser
from penstock.core.errors import ConfigError
from tests.cli.short import QUIET, SHORT, Cli, config

STACK = "gymnasium.wrappers:FrameStackObservation(stack_size=2)"
MODULE = """
import gymnasium as gym
class Mine(gym.RewardWrapper):
    def __init__(self, env, by, name="a"):
        super().__init__(env)
        assert by == (3, 4) and name == "x", (by, name)
    def reward(self, reward):
        return 3 * reward
"""
MINE = "my_wraps:Mine((3, 4), name='x')"
REPLAY = ("--algo.replay.capacity", "500", "--algo.learning-starts", "32")


@pytest.fixture
def mine(tmp_path: Path) -> None:
    (tmp_path / "my_wraps.py").write_text(MODULE)


def test_a_run_with_wrappers_with_arguments_is_trained_and_all_commands_open_it(
    mine: None, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    said = cli("train", "dqn", "--env", "CartPole-v1", "--wrappers", "FrameStackObservation(stack_size=2)", MINE,
               *QUIET, *REPLAY, "--run.dir", "run")  # fmt: skip
    assert said.code == 0, said.both
    assert config(tmp_path / "run")["wrappers"] == [STACK, MINE]
    said = cli("eval", "run", "--episodes", "2")
    assert said.code == 0, said.both
    assert ps.evaluate("run", episodes=1).return_[0] % 3 == 0
    assert cli("record", "run", "--dataset", "set", "--episodes", "1").code == 0
    assert cli("replay", "info", "run").code == 0
    said = cli("resume", "run", "--run.steps", "256")
    assert said.code == 0, said.both
    assert config(tmp_path / "run")["wrappers"] == [STACK, MINE]
    again = ps.EnvConfig("CartPole-v1", wrappers=(("FrameStackObservation", {"stack_size": 2}), MINE))
    ps.resume("run", {"run.steps": 320}, env=again)
    with pytest.raises(ConfigError, match=r"env\.wrappers=.*stack_size=3"):
        ps.resume(
            "run",
            {"run.steps": 400},
            env=ps.EnvConfig("CartPole-v1", wrappers=("FrameStackObservation(stack_size=3)", MINE)),
        )
    shutil.rmtree(tmp_path / "state")  # as a stranger's
    for command in (("eval", "run"), ("record", "run", "--dataset", "other"), ("resume", "run", "--run.steps", "400")):
        said = cli(*command)
        assert said.code == 5, said.both
        assert "my_wraps:Mine" in said.err
        assert "FrameStack" not in said.err
        assert "--trust" in said.err
    assert cli("eval", "run", "--episodes", "1", "--trust").code == 0


@pytest.mark.parametrize(
    ("wrappers", "said"),
    [
        (("FrameStackObservation(stak_size=2)",), "it takes no 'stak_size'; did you mean 'stack_size'?"),
        (("FrameStackObservation",), "missing a required argument: 'stack_size'"),
        (("FrameStakObservation(2)",), "unknown wrapper 'FrameStakObservation'; did you mean 'FrameStackObservation'"),
        (("TransformReward(func=lambda r: r)",), "has arguments that cannot be read"),
        (("my_wraps:Mane(3)",), "did you mean 'Mine'?"),
        (("OrderEnforcing", "no_such_module:Mine(3)"), "cannot import 'no_such_module'"),
    ],
)
def test_what_is_no_wrapper_is_refused_in_a_line_before_anything_is_written(
    wrappers: tuple[str, ...], said: str, mine: None, cli: Cli, tmp_path: Path
) -> None:
    found = cli("train", "a2c", "--env", "CartPole-v1", *QUIET, "--run.dir", "run", "--wrappers", *wrappers)
    assert found.code == 2, found.both
    assert said in found.err
    assert found.err.startswith("penstock: ConfigError: ")
    assert found.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_that_could_not_be_opened_again_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my_algo.py").write_text(
        "import penstock as ps\ndef made():\n    return ps.Policies({'a': ps.A2C()}, lambda *asked: 'a', {'a': 2})\n"
    )
    found = cli("train", "my_algo:made", "--env", "penstock.envs.toy:TeamBits", *QUIET[2:], "--run.dir", "run")
    assert found.code == 2, found.both
    assert "algo.policy_mapping_fn=made.<locals>.<lambda> cannot be stored, and penstock eval" in found.err
    assert not (tmp_path / "run").exists()


def test_eval_plays_in_another_environment_with_wrappers_with_arguments(cli: Cli, trained: Path) -> None:
    found = cli(
        "eval", str(trained), "--env", "CartPole-v1", "--wrappers", "TimeLimit(max_episode_steps=3)", "--episodes", "1"
    )
    assert found.code == 0, found.both
    assert "length      3.0" in found.out


def meant(*options: str) -> ps.Experiment:
    args, rest = train_parser().parse_known_args(options)
    return experiment("a2c", args, rest)[0]


@pytest.mark.parametrize(
    "given", ['"FrameStackObservation(stack_size=2)"', '["FrameStackObservation", {stack_size = 2}]']
)
def test_settings_files_hold_wrappers_with_arguments(given: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(f'algo = {{name = "a2c"}}\nenv = {{id = "CartPole-v1", wrappers = [{given}]}}\n')
    assert experiment_from(tmp_path / "x.toml").wrappers == (STACK,)
    (tmp_path / "p.toml").write_text(f'["CartPole-v1"]\nwhy = "x"\nwrappers = [{given}]\n')
    exp = meant("--env", "CartPole-v1", "--preset-file", str(tmp_path / "p.toml"), "--wrappers", "OrderEnforcing")
    assert exp.wrappers == (STACK, "gymnasium.wrappers:OrderEnforcing")


@pytest.mark.parametrize(
    "given",
    ['"my_wraps:Mine(3)"', '["my_wraps:Mine", {by = 3}]', '"gymnasium.wrappers:RecordVideo(\'x\')"', '"TimeLimit(99999999)"',
     '["TransformReward", {func = {import = "os:system"}}]', '"FilterObservation([\'/etc\'])"', '"Nothing(3)"', '"TimeLimit("'],
)  # fmt: skip
def test_files_of_others_that_name_code_or_files_in_wrappers_need_trust(given: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(f'algo = {{name = "a2c"}}\nenv = {{id = "CartPole-v1", wrappers = [{given}]}}\n')
    with pytest.raises(ConfigError, match=r"x\.toml names what is not part of penstock.*wrappers: .*--trust"):
        experiment_from(tmp_path / "x.toml")


@pytest.mark.slow
def test_a_grid_of_wrappers(launched: None, cli: Cli, tmp_path: Path) -> None:
    found = cli("launch", "a2c", "--env", "CartPole-v1", "--dir", "x", *SHORT, "--slots", "1", "--wrappers", "OrderEnforcing",
                "--grid", "wrappers=[],FrameStackObservation(stack_size=2),[OrderEnforcing,FrameStackObservation(2)]")  # fmt: skip
    assert found.code == 0, found.both
    runs = sorted((tmp_path / "x").glob("wrappers=*"))
    kept = [config(run)["wrappers"] for run in runs]
    assert sorted(map(len, kept)) == [0, 1, 2], runs
    assert [STACK] in kept
    assert cli("launch", "x").code == 0
    best = meant("--env", "CartPole-v1", "--preset-file", str(tmp_path / "x" / "best.toml")).wrappers
    assert list(best) in kept
