from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.algos import ALGOS
from penstock.cli.settings import declared_settings, options as options_of
from penstock.processes import fork_client
from penstock.processes.python import one_thread_environment
from penstock.run.bench.search import BenchmarkResult, Timing, base_sampler, with_settings
from penstock.samplers import ACTING
from tests.cli.short import QUIET, SHORT, Cli, config, metrics

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def settings_of(algo: str) -> list[str]:
    settings = declared_settings(algo, "async", "cpu")
    return [path for name, part in settings.items() for path in options_of(part, f"--{name}")]


@pytest.mark.parametrize("algo", ALGOS)
def test_help_is_short_and_grouped_and_whole_on_demand(algo: str, cli: Cli) -> None:
    short, whole = (
        cli("train", algo, "--sampler", "async", "--sampler.inner", "cpu", word) for word in ("--help", "--help-all")
    )
    assert (short.code, whole.code, short.err, whole.err) == (0, 0, "", "")
    for option in (
        "--env ",
        "--run.steps INT",
        "--run.stop KEY VALUE",
        "--sampler.inner.workers INT",
        "--seeds",
        "--init",
    ):
        assert option in short.out, option
    every = [option for option in settings_of(algo) if option != "--algo.agent"]  # which is one of `train` itself
    assert [option for option in every if f"  {option} " not in whole.out and f"  {option}\n" not in whole.out] == []
    missing = [option for option in every if f"  {option} " not in short.out]
    assert f"\n{len(missing)} more settings, and all texts in full: --help-all\n" in short.out
    assert len(short.out.splitlines()) < 0.6 * len(whole.out.splitlines())
    assert f"\nalgorithm ({declared_settings(algo, None, None)['algo'].__class__.__name__}):\n" in short.out
    assert "--algo.alpha" not in cli("train", "ppo", "--help-all").out
    for option in ("--algo.net.actor_hidden", "--algo.net.critic_hidden", "--algo.net.encoder"):
        assert option in short.out or option not in every
    optional = {"--algo.rnd.coef NUMBER", "--algo.rnd.net.hidden INT"} if "--algo.rnd" in every else set[str]()
    assert {*optional, "--sampler.inner.affinity.server INT"} <= set(re.findall(r"^  (--\S+ \S+)", whole.out, re.M))
    assert "--env-mask" not in short.out and "--env-mask" in whole.out and "--algo.agent" in whole.out


def test_help_of_an_algorithm_of_ones_own(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from dataclasses import dataclass\nimport penstock as ps\n@dataclass(frozen=True)\nclass Own(ps.PPO):\n"
    (tmp_path / "own_help.py").write_text(f'{text}    extra: float = 2.5\n    """A number of mine. More of it."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    said = cli("train", "own_help:Own", "--help")
    assert "  --algo.extra NUMBER         A number of mine [2.5]\n" in said.out and "algorithm (Own):" in said.out
    assert "  --algo.lr NUMBER|SCHEDULE" in said.out


# train


@pytest.mark.usefixtures("drawn")
def test_train_says_what_it_does_and_where_it_left_it(cli: Cli, tmp_path: Path) -> None:
    said = cli("train", "a2c", "--env", "CartPole-v1", *SHORT, "--run.dir", "x", "--run.progress", "plain")
    assert said.code == 0, said.both
    for words in (
        "no preset asked for",
        "A2C on CartPole-v1",
        "seed 0",
        "stopped by",
    ):
        assert words in said.out
    last = [line.strip("│ ") for line in said.out.splitlines() if not line.startswith("╰")][-3:]
    assert re.sub(" +", " ", last[0]) == "next penstock eval x"
    assert re.fullmatch(r"penstock resume x --run.steps \d+", last[1])
    assert last[2] == "learning curve: x/plots/learning-curve.png"
    assert (tmp_path / "x" / "plots" / "learning-curve.png").stat().st_size > 1000
    assert metrics(tmp_path / "x")


def test_options_reach_the_run(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        "train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", "x", "--run.seed", "7", "--algo.lr", "linear(1e-3, 0)",
        "--algo.net.hidden", "8", "8", "--algo.net.activation", "relu", "--run.stop", "rollout/ep_rew_mean", "475", "--run.keep", "2",
        "--env-kwargs", "max_episode_steps=9", "--env-checks", "always", "--info-keys", "a", "b", "--algo.minibatch=32",
    )  # fmt: skip
    assert said.code == 0, said.both
    exp = config(tmp_path / "x")
    assert exp["algo"]["lr"] == "linear(1e-3, 0)"
    assert exp["algo"]["net"]["hidden"] == [8, 8]
    assert exp["algo"]["net"]["activation"] == "relu"
    assert exp["algo"]["minibatch"] == 32
    assert exp["run"]["seed"] == 7
    assert exp["run"]["stop"] == {"rollout/ep_rew_mean": 475.0}
    assert exp["sampler"] == {**exp["sampler"], "T": 16, "B": 4}
    assert exp["env_kwargs"] == {"max_episode_steps": 9}
    assert exp["env_checks"] == "always"
    assert exp["info_keys"] == ["a", "b"]
    assert all(row["rollout/ep_len_mean"] <= 9 for row in metrics(tmp_path / "x") if "rollout/ep_len_mean" in row)


def test_wrappers_in_order(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        "train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", "x", "--wrappers", "penstock.envs.toy:HideVelocity"
    )
    assert said.code == 0, said.both
    assert "2" in str(json.loads((tmp_path / "x" / "config.json").read_text())["spec"]["obs"])


def test_what_the_observation_leaves_out(cli: Cli, tmp_path: Path) -> None:
    env = ("train", "ppo", "--env", "tests.envs.test_wrappers:Talking", *QUIET, "--env-text", "16")
    said = cli(*env, "--wrappers", "penstock.envs.wrappers:WeightedReward", "--env-drop", "at", "--run.dir", "x",
               "--env-checks", "always", "--run.eval-episodes", "0")  # fmt: skip
    assert said.code == 0, said.both
    assert config(tmp_path / "x")["env_drop"] == ["at"]
    assert config(tmp_path / "x")["env_text"] == 16
    assert list(json.loads((tmp_path / "x" / "config.json").read_text())["spec"]["obs"]["dict"]) == ["mission"]
    again = (
        "--episodes",
        "1",
        "--max-steps",
        "20",
        "--wrappers",
        "penstock.envs.wrappers:WeightedReward",
        "--env",
        env[3],
    )
    played = cli("eval", "x", *again, "--env-text", "16", "--env-drop", "at")
    assert played.code == 0, played.both
    assert cli("eval", "x", *again, "--env-text", "16").code == 2
    for option, value in (("--env-drop", "at"), ("--env-text", "8"), ("--env-mask", "mask")):
        said = cli("eval", "x", option, value)
        assert (said.code, f"{option} {value} without --env" in said.err) == (2, True)


def test_what_is_done_to_an_environment_unasked_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.envs.make.note_on", lambda env, kwargs: f"{env} with the published preprocessing")
    said = cli("train", "ppo", "--env", "CartPole-v1", *SHORT, "--run.progress", "plain", "--run.dir", "x")
    assert "\n  CartPole-v1 with the published preprocessing\n" in said.out


def test_a_long_number_of_a_preset_is_said_short_and_kept_whole(cli: Cli) -> None:
    Path("p.toml").write_text(
        '["CartPole-v1"]\nwhy = "Found."\nalgo = {lr = 0.00027347985304408093}\nsampler = {T = 8, B = 2}\nrun = {steps = 16}\n'
    )
    line = (
        "train",
        "ppo",
        "--env",
        "CartPole-v1",
        "--preset-file",
        "p.toml",
        "--run.dir",
        "a",
        "--run.progress",
        "plain",
    )
    said = cli(*line, "--run.eval-episodes", "1")
    assert "algo.lr=0.00027348, " in said.out, said.both
    assert config(Path("a"))["algo"]["lr"] == 0.00027347985304408093


def test_presets_apply_and_say_so(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ppo.toml").write_text(
        '["CartPole-v1"]\nwhy = "Because."\nalgo = {lr = 0.5, epochs = 1}\nsampler = {T = 8, B = 2}\nrun = {steps = 16}\n'
        'imports = ["math"]\nenv_checks = "off"\n["other"]\nwhy = "Else."\nalgo = {lr = 0.25, epochs = 1}\nrun = {steps = 16}\n'
    )
    monkeypatch.setattr("penstock.run.presets._FOLDER", tmp_path)
    small = ("--run.eval-episodes", "1")
    said = cli(
        "train", "ppo", "--env", "CartPole-v1", *small, "--run.dir", "a", "--run.progress", "plain", "--import", "json"
    )
    assert said.code == 0, said.both
    assert "preset ppo/CartPole-v1: " in said.out
    assert "Because." in said.out
    exp = config(tmp_path / "a")
    assert (exp["algo"]["lr"], exp["sampler"]["T"], exp["run"]["steps"]) == (0.5, 8, 16)
    assert exp["imports"] == ["math", "json"]
    assert exp["env_checks"] == "off"
    for options, lr in (
        ((), 0.5),
        (("--algo.lr", "0.125"), 0.125),
        (("--preset", "other"), 0.25),
        (("--preset", "ppo/other"), 0.25),
    ):
        train = ("train", "ppo", "--env", "CartPole-v1", *small, *options)
        assert cli(*train, "--run.progress", "off", "--run.dir", "b").code == 0
        assert config(tmp_path / "b")["algo"]["lr"] == lr
        shutil.rmtree(tmp_path / "b")
    none = cli("train", "ppo", "--env", "CartPole-v1", *SHORT, "--run.progress", "plain", "--run.dir", "c")
    assert "no preset asked for: default settings; 128 steps (--run.steps)" in none.out
    assert config(tmp_path / "c")["algo"]["lr"] == 3e-4
    options = ("--env", "penstock.envs.toy:Constant", *SHORT[2:], "--algo.epochs", "1", "--run.dir", "d")
    assert "no preset for ppo on" in cli("train", "ppo", *options, "--run.progress", "plain").out


def test_one_run_for_each_seed(cli: Cli, tmp_path: Path) -> None:
    plain = (*SHORT, "--run.progress", "plain", "--run.dir", "x")
    said = cli("train", "a2c", "--env", "CartPole-v1", *plain, "--seeds", "1,2")
    assert said.code == 0, said.both
    assert said.out.endswith("\nall seeds in one picture: penstock plot x\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-s1", "x-s2"]
    assert [config(tmp_path / f"x-s{seed}")["run"]["seed"] for seed in (1, 2)] == [1, 2]
    assert metrics(tmp_path / "x-s1")[0]["train/value_loss"] != metrics(tmp_path / "x-s2")[0]["train/value_loss"]
    again = cli("train", "a2c", "--env", "CartPole-v1", *QUIET, "--run.dir", "x", "--seeds", "3,2")
    assert again.code == 2
    assert "x-s2 is not empty" in again.err
    assert not (tmp_path / "x-s3").exists()  # it is said before the first begins
    assert cli("train", "a2c", "--env", "CartPole-v1", *QUIET, "--run.dir", "y", "--seeds", "5").code == 0
    assert config(tmp_path / "y")["run"]["seed"] == 5


def test_warm_start(cli: Cli, tmp_path: Path, trained: Path) -> None:
    said = cli("train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", "x", "--init", str(trained))
    assert said.code == 0, said.both
    cli("train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", "y")
    a, b = metrics(tmp_path / "x")[0], metrics(tmp_path / "y")[0]
    assert a["train/value_loss"] != b["train/value_loss"]
    assert b["train/value_loss"] == metrics(trained)[0]["train/value_loss"]
    other = cli(
        "train",
        "ppo",
        "--env",
        "CartPole-v1",
        *QUIET,
        "--run.dir",
        "z",
        "--init",
        str(trained),
        "--algo.net.hidden",
        "4",
    )
    assert other.code == 5
    assert "do not fit" in other.err
    assert not (tmp_path / "z").exists()


def test_algorithm_from_outside(cli: Cli, tmp_path: Path) -> None:
    """Trained, evaluated and resumed from the folder that holds it."""
    shutil.copy(EXAMPLES / "reinforce.py", tmp_path)
    try:
        said = cli(
            "train", "reinforce:Reinforce", "--env", "CartPole-v1", *QUIET, "--run.dir", "x", "--algo.lr", "0.01"
        )
        assert said.code == 0, said.both
        assert config(tmp_path / "x")["algo"]["class"] == "reinforce:Reinforce"
        assert cli("eval", "x", "--episodes", "2").code == 0
        said = cli("resume", "x", "--run.steps", "256")
        assert said.code == 0, said.both
        assert metrics(tmp_path / "x")[-1]["step"] >= 256
    finally:
        sys.modules.pop("reinforce", None)


def test_agent_and_environment_from_outside(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(
        "import penstock as ps\nfrom penstock.envs.toy import Constant\n"
        "def agent(spec, settings):\n    return ps.ActorCritic(spec, ps.Net(hidden=(3,)))\n"
        "def env(size=1):\n    assert size == 2\n    return Constant()\n"
    )
    try:
        said = cli("train", "ppo", "--env", "outside:env", "--algo.agent", "outside:agent", "--env-kwargs", "size=2", *QUIET,
                   "--run.dir", "x")  # fmt: skip
        assert said.code == 0, said.both
        assert config(tmp_path / "x")["algo"]["agent"] == {"import": "outside:agent"}
        assert cli("eval", "x").code == 0
        assert cli("resume", "x", "--run.steps", "256").code == 0
    finally:
        sys.modules.pop("outside", None)


@pytest.mark.usefixtures("drawn")
def test_a_run_without_a_finished_episode_has_no_curve_and_is_no_failure(cli: Cli) -> None:
    said = cli("train", "a2c", "--env", "Pendulum-v1", *QUIET, "--run.eval-episodes", "0", "--run.dir", "x")
    assert said.code == 0
    assert said.err == "no learning curve drawn: no episode ended in 128 steps\n"


def test_existing_run_directory(cli: Cli, trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    said = cli("train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", str(trained))
    assert said.code == 2
    assert "nothing in it was touched" in said.err
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_learner_failure(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text(
        "from penstock.envs.toy import Constant\n"
        "class Huge(Constant):\n"
        "    def step(self, action):\n        obs, _, *rest = super().step(action)\n        return obs, 1e38, *rest\n"
    )
    try:
        said = cli("train", "a2c", "--env", "huge:Huge", *QUIET, "--run.steps", "10000", "--run.dir", "x")
    finally:
        sys.modules.pop("huge", None)
    assert said.code == 4
    assert re.search(r"NonFiniteError: .*x.crash.batch-\d+\.npz", said.err)


def test_summary_of_a_run_without_an_episode_has_no_return_of_episodes(cli: Cli) -> None:
    said = cli("train", "ppo", "--env", "Pendulum-v1", *SHORT, "--run.dir", "x", "--run.progress", "plain")
    assert said.code == 0
    assert "return, evaluation" in said.out
    assert "last episodes" not in said.out


def _found_at_once(plan: Any, same_device: bool = False) -> BenchmarkResult:
    best = Timing(with_settings(base_sampler(plan.exp), {"name": "gpu", "workers": 2}), 5.0)
    return BenchmarkResult((best,), best, 16, "", 0.0)


@pytest.mark.usefixtures("forked")
def test_auto_takes_the_batch_of_the_options_and_is_stored_as_what_it_chose(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.run.bench.cache.bench", _found_at_once)
    options = ("train", "a2c", "--env", "CartPole-v1", "--sampler", "auto", *SHORT, "--run.progress", "plain")
    first = cli(*options, "--run.dir", "x")
    assert first.code == 0, first.both
    assert "measuring which is fastest here" in first.out
    assert "kept in" in first.out
    sampler = config(tmp_path / "x")["sampler"]
    assert (sampler["T"], sampler["B"]) == (16, 4)
    again = cli(*options, "--run.dir", "y")
    assert "as measured" in again.out
    assert "measuring" not in again.out
    assert config(tmp_path / "y")["sampler"] == sampler
    assert cli(*options, "--run.dir", "y").code == 2


def test_policies_of_ones_own_with_options_by_path(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_sides.py").write_text(
        "import penstock as ps\n"
        "TWO = ps.Policies({'a': ps.PPO(), 'b': ps.PPO()}, {'agent_0': 'a', 'agent_1': 'b'})\n"
        "def make():\n    return TWO\n"
        "def nothing():\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    of = ("--env", "penstock.envs.toy:TeamBits", *QUIET, "--run.dir")
    run = tmp_path / "run"
    said = cli("train", "two_sides:TWO", *of, str(run), "--algo.algos.b.lr", "0.5", "--run.seed", "3")
    assert said.code == 0, said.err
    assert config(run)["algo"]["algos"]["b"]["lr"] == 0.5 and config(run)["run"]["seed"] == 3
    assert config(run)["algo"]["algos"]["a"]["lr"] == 3e-4
    assert cli("train", "two_sides:make", *of, str(tmp_path / "made")).code == 0
    assert "nothing() returned None" in cli("train", "two_sides:nothing", *of, str(tmp_path / "x")).err
    assert "there is no 'c'" in cli("train", "two_sides:TWO", *of, str(tmp_path / "x"), "--algo.algos.c.lr", "1").err
    assert cli("train", "two_sides:TWO", "--env", "CartPole-v1", *QUIET, "--run.dir", str(tmp_path / "x")).code == 2


def test_the_process_of_which_workers_are_forked_begins_before_anything_slow(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(fork_client, "start_ahead", lambda *args: begun.append(args))
    for sampler in ("serial", "cpu"):
        assert cli("train", "ppo", "--env", "nowhere:NoSuch", "--sampler", sampler).code
    assert begun == [(ACTING, one_thread_environment())]


def test_a_run_without_progress_prints_its_result(cli: Cli) -> None:
    said = cli("train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", "x")
    assert said.code == 0
    assert re.fullmatch(r"x: \d+ steps(, return .* episodes)?, .* \+- .* in evaluation\n", said.out)
