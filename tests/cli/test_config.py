"""`--config FILE` and `--preset-file FILE`: the experiments that they mean."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli.config import experiment_from
from penstock.cli.settings import experiment, train_parser
from penstock.core.errors import ConfigError
from penstock.run.files.settings_file import read_toml
from tests.cli.short import QUIET, Cli, config

FILE = """
eval_env_kwargs = {max_episode_steps = 20}
run = {steps = 640, stop = {"eval/mean_reward" = 475}}

[env]
id = "CartPole-v1"
kwargs = {max_episode_steps = 9}
info_keys = ["k"]
checks = "always"

[algo]
name = "a2c"
lr = "linear(1e-3, 0)"
net = {hidden = [8]}

[sampler]
name = "cpu"
T = 7
workers = 1
"""


def meant(*options: str, algo: str | None = None) -> Any:
    args, rest = train_parser().parse_known_args(options)
    return experiment(algo, args, rest)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "x.toml").write_text(FILE)
    return tmp_path / "x.toml"


def test_a_file_says_everything_and_options_override_it(file: Path) -> None:
    exp, preset = meant(
        "--config", str(file), "--run.seed", "3", "--sampler.B", "5", "--env-kwargs", "sutton_barto_reward=true"
    )
    assert preset is None
    assert exp.algo == ps.A2C(lr="linear(1e-3, 0)", net=ps.Net(hidden=(8,)))
    assert exp.sampler == ps.CpuSampler(T=7, B=5, workers=1)
    assert (exp.run.steps, exp.run.seed, exp.run.stop) == (640, 3, {"eval/mean_reward": 475.0})
    assert (exp.env, exp.info_keys, exp.env_checks) == ("CartPole-v1", ("k",), "always")
    assert exp.env_kwargs == {"max_episode_steps": 9, "sutton_barto_reward": True}
    assert exp.eval_env_config.kwargs["max_episode_steps"] == 20
    assert meant("--config", str(file), "--env", "CartPole-v0", algo="a2c")[0].env == "CartPole-v0"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[env]", "[envs]", r"'envs'.*'env'"),
        ('id = "C', 'idd = "C', r"the table env has 'idd'"),
        ('name = "a2c"', 'name = "a3c"', "a2c"),
        ('name = "a2c"', "", "names no algorithm"),
        ("workers = 1", "worker = 1", r"x\.toml: .*'workers'"),
        ("[env]", "[env", "not valid TOML"),
    ],
)
def test_mistakes_in_a_file_name_it(old: str, new: str, says: str, file: Path) -> None:
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=says):
        experiment_from(file)


def test_files_that_are_none(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        experiment_from(tmp_path / "y.toml")
    with pytest.raises(ConfigError, match=r"expected a file in \.toml"):
        experiment_from(tmp_path / "y.yaml")
    with pytest.raises(ConfigError, match="is of a2c, and ppo was asked for"):
        experiment_from(file, "ppo")
    with pytest.raises(ConfigError, match="leave out --preset"):
        meant("--config", str(file), "--preset", "none")


def test_a_run_is_made_again(cli: Cli, trained: Path, tmp_path: Path) -> None:
    said = cli("train", "--config", str(trained / "config.json"), *QUIET[2:], "--run.dir", "again", "--run.seed", "4")
    assert said.code == 0, said.both
    again, before = config(tmp_path / "again"), config(trained)
    assert again["run"].pop("seed") == 4
    assert (again["run"].pop("dir"), again["algo"]) == ("again", before["algo"])
    assert experiment_from(trained).run.dir is None
    assert experiment_from(trained).algo_name == "ppo"


def test_presets_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('["Cart*"]\nwhy = "mine"\nalgo = {lr = 0.5}\n["other"]\nalgo = {lr = 0.25}\n')
    exp, found = meant("--env", "CartPole-v1", "--preset-file", str(file), algo="ppo")
    assert (exp.algo.lr, found.why, found.path) == (0.5, "mine", file)
    assert meant("--env", "CartPole-v1", "--preset-file", str(file), "--preset", "other", algo="ppo")[0].algo.lr == 0.25
    assert meant("--env", "Acrobot-v1", "--preset-file", str(file), algo="ppo")[1] is None
    with pytest.raises(ConfigError, match=r"mine\.toml has no table 'othr'"):
        meant("--env", "X-v0", "--preset-file", str(file), "--preset", "othr", algo="ppo")
    with pytest.raises(ConfigError, match="no such file"):
        meant("--env", "X-v0", "--preset-file", str(tmp_path / "no.toml"), algo="ppo")


RUNNERS = """
env = "CartPole-v1"
algo = {name = "ppo"}

[sampler]
name = "runners"
runners = 4
depth = 1
backend = "in-process"
inner = {name = "cpu", workers = 2}
"""


def test_a_file_says_runners_and_what_is_in_them(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(RUNNERS)
    T, B = ps.PPO().batch
    inner = ps.CpuSampler(T=T, B=B // 4, workers=2)
    assert experiment_from(file).sampler == ps.RunnerSampler(4, inner, "in-process", depth=1)
    exp, _ = meant("--config", str(file), "--sampler.runners", "2", "--sampler.inner", "serial")
    assert exp.sampler == ps.RunnerSampler(2, ps.SerialSampler(T, B // 2), "in-process", depth=1)
    file.write_text(RUNNERS.replace("workers = 2", "T = 5, B = 3"))
    assert experiment_from(file).sampler_settings.spec == (5, 12)
    file.write_text(RUNNERS.replace('name = "cpu"', 'name = "cpuu"'))
    with pytest.raises(ConfigError, match=r"x\.toml: sampler.inner='cpuu'; did you mean 'cpu'"):
        experiment_from(file)


def test_a_preset_of_runners(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    table = '{name = "runners", runners = 3, inner = {name = "serial", T = 4, B = 2}}'
    file.write_text(f'["Cart*"]\nwhy = "mine"\nsampler = {table}\n')
    exp = meant("--env", "CartPole-v1", "--preset-file", str(file), algo="ppo")[0]
    assert exp.sampler == ps.RunnerSampler(3, ps.SerialSampler(4, 2))


TOLD = "open('EXECUTED', 'w').close()\n"
CODE = {
    "environment": ('env = "told:make"', "env='told:make'"),
    "arguments": ('env = {id = "CartPole-v1", kwargs = {xml_file = "/x.xml"}}', "env_kwargs.xml_file='/x.xml'"),
    "arguments of evaluations": ('eval_env_kwargs = {xml_file = "/x.xml"}', "eval_env_kwargs.xml_file='/x.xml'"),
    "wrappers": ('env = {id = "CartPole-v1", wrappers = ["told:Wrapper"]}', "wrappers: 'told:Wrapper'"),
    "imports": ('env = {id = "CartPole-v1", imports = ["told"]}', "imports: 'told'"),
    "evaluations": ('eval_env = "told:make"', "eval_env='told:make'"),
    "algorithm": ('algo = {name = "told:make"}', "algo.name='told:make'"),
    "agent": ('algo = {name = "ppo", agent = "told:agent"}', "algo.agent='told:agent'"),
    "sampler": ('sampler = {name = "told:system"}', "sampler.name='told:system'"),
    "another form": ('sampler = "told:system"', "sampler='told:system'"),
    "inner": ('sampler = {name = "async", inner = {name = "told:system"}}', "sampler.inner.name='told:system'"),
    "each": ('run = {each = "told:each"}', "run.each='told:each'"),
    "reward": ('algo = {name = "dqn", replay = {reward_fn = "told:f"}}', "algo.replay.reward_fn='told:f'"),
    "a key": ('run = {"\\u001b[2J" = "told:f"}', r"run.'\x1b[2J'='told:f'"),
}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module that says that it was imported, and nobody's list of trusted files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    monkeypatch.delitem(sys.modules, "told", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "told.py").write_text(TOLD)
    return tmp_path


@pytest.mark.parametrize("name", CODE)
def test_a_file_that_names_code_needs_trust_and_nothing_of_it_is_called(name: str, told: Path) -> None:
    text, part = CODE[name]
    (told / "x.toml").write_text(
        text if "\nalgo" in text or text.startswith("algo") else f'{text}\nalgo.name = "ppo"\n'
    )
    with pytest.raises(ConfigError, match=rf"^x\.toml names what is not part of penstock .*{re.escape(part)}.*--trust"):
        experiment_from("x.toml", "ppo" if "algo" not in text else None)
    preset = text.replace('env = "CartPole-v1"\n', "").replace("env = {id", "env_ = {id")
    if preset == text:
        (told / "mine.toml").write_text(f'["Cart*"]\nwhy = "mine"\n{text}\n')
        with pytest.raises(ConfigError, match=rf"^mine\.toml names .*{re.escape(part)}.*--trust.*security\.md"):
            meant("--env", "CartPole-v1", "--preset-file", "mine.toml", algo="ppo")
    assert not (told / "EXECUTED").exists()


def test_a_file_is_trusted_once_and_as_it_is(told: Path) -> None:
    file = told / "mine.toml"
    file.write_text('["Cart*"]\nimports = ["told"]\n')
    options = ("--env", "CartPole-v1", "--preset-file", "mine.toml")
    with pytest.raises(ConfigError, match="imports: 'told'"):
        meant(*options, algo="ppo")
    assert meant(*options, "--trust", algo="ppo")[0].imports == ("told",)
    assert meant(*options, algo="ppo")[0].imports == ("told",)
    file.write_text(file.read_text() + "# changed\n")
    with pytest.raises(ConfigError, match="imports: 'told'"):
        meant(*options, algo="ppo")


@pytest.mark.parametrize("name", ["told:system", "told:Settings", "os:getcwd"])
def test_a_sampler_that_is_none_is_not_called(name: str, told: Path) -> None:
    (told / "told.py").write_text(
        f"def system():\n    {TOLD}\nclass Settings:\n    def __init__(self):\n        {TOLD}"
    )
    (told / "x.toml").write_text(f'env = "CartPole-v1"\nalgo.name = "ppo"\nsampler.name = "{name}"\n')
    with pytest.raises(ConfigError, match=rf"{name} is .*; expected a frozen dataclass with build"):
        experiment_from("x.toml", trust=True)
    assert not (told / "EXECUTED").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = " + "[" * 20_000, "nested too deeply"),
        ("x = " + "{a=" * 5_000, "nested too deeply"),
        (f"x{'.a' * 1_500} = 1", "nested too deeply"),
        ("run.steps = " + "9" * 5_000, "not valid TOML"),
        ("run.eval_episodes = 1e30", r"eval_episodes=1e\+30; expected at most 9,223,372,036,854,775,807"),
        ("run.eval_episodes = 1" + "0" * 30, "eval_episodes=a whole number of 100 bits; expected at most"),
        ("run.eval_episodes = inf", "eval_episodes=inf"),
        ('run.eval_episodes = "1e30"', "eval_episodes='1e30'"),
        ("\x00", "not valid TOML"),
    ],
)
def test_a_malformed_file_is_one_error(text: str, says: str, told: Path) -> None:
    (told / "x.toml").write_text(f'env = "CartPole-v1"\nalgo.name = "ppo"\n{text}\n')
    with pytest.raises(ConfigError, match=rf"^x\.toml.*{says}"):
        experiment_from("x.toml")
    (told / "x.toml").write_bytes(bytes(20_000_000))
    with pytest.raises(ConfigError, match=r"^x\.toml has 20,000,000 bytes; expected settings"):
        experiment_from("x.toml")
    (told / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^x\.toml is not valid TOML"):
        experiment_from("x.toml")


@pytest.mark.parametrize("key", ["a." * 51 + "b", '"a" . ' * 60 + "b", "x = {" + "a-b\t.\t" * 60 + "c"])
def test_keys_of_many_parts_are_refused_before_they_are_read(
    key: str, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told / "x.toml").write_text(f"{key} = 1\n")
    monkeypatch.setattr("tomllib.loads", None)  # it takes time by the square of the parts
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_toml(told / "x.toml")


def test_long_texts_are_no_keys_of_many_parts_and_a_byte_order_mark_is_passed_over(told: Path) -> None:
    (told / "x.toml").write_text("\ufeffenv = '" + "A sentence. " * 99 + "'\nlr = [" + "0.1, " * 99 + "0.2]\n")
    assert len(read_toml(told / "x.toml")[0]["lr"]) == 100


def test_a_quoted_path_hides_nothing(told: Path) -> None:
    (told / "mine.toml").write_text('["Cart*"]\n"env_kwargs.xml_file" = "/x.xml"\n')
    with pytest.raises(ConfigError, match=r"env_kwargs\.xml_file='/x\.xml'"):
        meant("--env", "CartPole-v1", "--preset-file", "mine.toml", algo="ppo")
