from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from penstock.cli.options import Parser, dotted, import_modules, key_values, played_env, whole_number
from penstock.core.errors import ConfigError


def test_values_are_json_where_they_can_be() -> None:
    assert key_values(["size=8", "mode=rgb_array", 'x={"a": [1]}', "e="], "--env-kwargs") == {
        "size": 8, "mode": "rgb_array", "x": {"a": [1]}, "e": "",
    }  # fmt: skip
    for wrong in ("size", "=8"):
        with pytest.raises(ConfigError, match=r"--env-kwargs .*; expected key=value"):
            key_values([wrong], "--env-kwargs")


def test_settings_by_path_and_pairs_of_key_and_value() -> None:
    options = ["--run.steps", "1e5", "--run.log-interval=7", "--run.stop", "eval/mean_reward", "475"]
    assert dotted(options, Parser("resume", "")) == {
        "run.steps": 1e5, "run.log_interval": 7, "run.stop": {"eval/mean_reward": 475},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"--run.steps has 0 values"):
        dotted(["--run.steps"], Parser("resume", ""))


def test_an_unknown_option_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("eval", "")
    parser.add_policy(episodes=20)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["runs/a", "--episode", "3"])
    assert stopped.value.code == 2
    assert "unknown option --episode; did you mean --episodes" in capsys.readouterr().err


def test_shared_options() -> None:
    parser = Parser("x", "")
    parser.add_policy(episodes=7)
    args = parser.parse_args(["runs/a", "--import", "a", "--import", "b"])
    assert (args.run, args.episodes, args.which, args.stochastic, args.seed) == ("runs/a", 7, "last", False, None)
    assert (args.imports, args.env_kwargs) == (["a", "b"], [])
    parser = Parser("x", "")
    parser.add_environment()
    assert parser.parse_args(["--wrappers", "m:n", "o:p"]).wrappers == ["m:n", "o:p"]


def test_modules_of_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_here.py").touch()
    import_modules(["json"], ["penstock.envs.toy:ThreeStep", "nowhere_to_be:Found", "runs/own_here:x", 7])
    assert "" not in sys.path
    import_modules(["own_here"])
    assert sys.path.index("") == len(sys.path) - 1  # the last: a torch.py there is not torch
    with pytest.raises(ConfigError, match=r"--import no_such_package: .*is it installed"):
        import_modules(["no_such_package"])


def test_whole_numbers() -> None:
    assert whole_number("12") == 12
    for wrong in ("0", "-1", "1.5", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="whole number from 1"):
            whole_number(wrong)


def test_arguments_and_options_of_resets_are_added_to_those_of_the_run() -> None:
    parser = Parser("eval", "")
    parser.add_policy(20)
    env, added = played_env(parser.parse_args(["runs/none", "--env-options", "level=5", "--env-kwargs", "size=8"]))
    assert (env, added) == (None, {"env_kwargs": {"size": 8}, "env_options": {"level": 5}})
    env, added = played_env(parser.parse_args(["runs/none", "--env", "CartPole-v1", "--env-mask", ""]))
    assert env is not None and (env.name, env.mask_key) == ("CartPole-v1", "")
