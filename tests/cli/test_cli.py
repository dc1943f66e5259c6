from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.main import COMMANDS, main
from penstock.core import VERSION
from penstock.core.errors import CheckpointError, ConfigError, EnvWorkerError, NonFiniteError
from penstock.run.bench.costs import Costs
from penstock.run.bench.search import Row, Verdict, base_sampler, with_settings

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SHORT = (
    "--preset", "none", "--sampler.T", "16", "--sampler.B", "4", "--run.steps", "128", "--run.eval-episodes", "1",
    "--run.tensorboard", "False", "--run.log-interval", "1",
)  # fmt: skip
QUIET = (*SHORT, "--run.progress", "off")
Cli = Callable[..., SimpleNamespace]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command in this process and in an empty folder; gives code, out and err."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*argv: str) -> SimpleNamespace:
        capsys.readouterr()
        try:
            code: Any = main(list(argv))
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, both=out + err)

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", str(run)]) == 0
    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def config(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())["experiment"]


# Help


def test_help_loads_nothing_heavy() -> None:
    """What makes it quick: 0.5 s is the bar, and torch alone takes longer. tyro and gymnasium are left out as well."""
    code = f"""
import sys
from penstock.cli.main import main
for argv in [[], ["--help"], ["-h"], ["help"], ["--version"], *([c, "--help"] for c in {list(COMMANDS)})]:
    try:
        code = main(argv)
    except SystemExit as error:
        code = error.code
    assert code in (0, None), (argv, code)
    heavy = {{"torch", "tyro", "gymnasium", "numpy", "matplotlib", "rich"}} & set(sys.modules)
    assert not heavy, (argv, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"penstock {command}" in done.stdout
    assert VERSION in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there_and_says_what_it_does(command: str, cli: Cli) -> None:
    said = cli(command, "--help")
    assert said.code == 0
    assert "usage: penstock" in said.out
    assert said.err == ""
    assert command in cli("--help").out


def test_help_of_an_algorithm_shows_every_setting(cli: Cli) -> None:
    said = cli("train", "ppo", "--help")
    assert said.code == 0
    for option in (
        "--algo.lr",
        "--algo.net.hidden",
        "--sampler.B",
        "--run.steps",
        "--run.stop",
        "--seeds",
        "--env-kwargs",
        "--init",
    ):
        assert option in said.out
    assert "--algo.alpha" not in said.out


def test_the_entry_point_and_the_module() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, timeout=200)
    assert done.stdout == f"penstock {VERSION}\n"


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m penstock envs | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


# What is wrong is named, with the nearest that is right, and the code says whose fault it is

WRONG = {
    "command": (["trian"], 2, "'train'"),
    "algorithm": (["train", "pppo", "--env", "CartPole-v1"], 2, "'ppo'"),
    "environment": (["train", "ppo", "--env", "CartPol-v1", *QUIET], 2, "'CartPole-v1'"),
    "no environment": (["train", "ppo"], 2, "--env is missing"),
    "no algorithm": (["train", "--env", "CartPole-v1"], 2, "ALGO is missing"),
    "words swapped": (["train", "CartPole-v1", "dqn"], 2, "did you mean: penstock train dqn --env CartPole-v1?"),
    "environment without its option": (["train", "dqn", "CartPole-v1"], 2, "penstock train dqn --env CartPole-v1?"),
    "algorithm last": (["train", "--env", "X-v0", "dqn"], 2, "it comes first; did you mean: penstock train dqn --env X-v0?"),
    "another's preset": (["train", "dqn", "--env", "CartPole-v1", "--preset", "sac/Pendulum-v1"], 2, "is not one of dqn, which has"),
    "ratio": (["train", "sac", "--env", "Pendulum-v1", *QUIET, "--algo.replay-ratio", "1e9"], 2, "expected at most 1,000"),
    "ratio without end": (["train", "sac", "--env", "Pendulum-v1", *QUIET, "--algo.replay-ratio", "inf"], 2, "at most 1,000"),
    "no number": (["train", "sac", "--env", "Pendulum-v1", *QUIET, "--algo.alpha", "nan"], 2, "alpha=nan"),
    "no step size": (["train", "sac", "--env", "Pendulum-v1", *QUIET, "--algo.lr", "inf"], 2, "no finite number"),
    "no support": (["train", "dqn", "--env", "CartPole-v1", *QUIET, "--algo.v-max", "inf"], 2, "v_max=inf"),
    "option": (["train", "ppo", "--env", "CartPole-v1", "--imprt", "x"], 2, "--import"),
    "option of a part": (["train", "ppo", "--env", "CartPole-v1", "--seed", "3"], 2, "--run.seed"),
    "option without its part": (["train", "ppo", "--env", "CartPole-v1", "--steps", "3"], 2, "--run.steps"),
    "algorithm's option": (["train", "ppo", "--env", "CartPole-v1", "--algo.lrr", "1"], 2, "--algo.lr "),
    "run's option": (["train", "ppo", "--env", "CartPole-v1", "--run.stps", "1"], 2, "--run.steps "),
    "sampler's option": (["train", "ppo", "--env", "CartPole-v1", "--sampler.BB", "1"], 2, "--sampler.B "),
    "left over": (["train", "ppo", "--env", "CartPole-v1", "extra"], 2, "extra"),
    "type": (["train", "ppo", "--env", "CartPole-v1", "--run.steps", "many"], 2, "--run.steps"),
    "value": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.keep", "0"], 2, "keep=0"),
    "schedule": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--algo.lr", "linear(1"], 2, "linear(start, end"),
    "choice": (["train", "ppo", "--env", "CartPole-v1", "--env-checks", "alway"], 2, "'always'"),
    "preset": (["train", "ppo", "--env", "CartPole-v1", "--preset", "CartPol-v1"], 2, "'ppo/CartPole-v1'"),
    "preset's algorithm": (["train", "ppo", "--env", "CartPole-v1", "--preset", "ppp/CartPole-v1"], 2, "'ppo/CartPole-v1'"),
    "sampler": (["train", "ppo", "--env", "CartPole-v1", "--sampler", "seril"], 2, "'serial'"),
    "seeds": (["train", "ppo", "--env", "CartPole-v1", "--seeds", "1,b"], 2, "e.g. 1,2,3"),
    "key without value": (["train", "ppo", "--env", "CartPole-v1", "--env-kwargs", "x"], 2, "key=value"),
    "module": (["train", "nowhere:X", "--env", "CartPole-v1"], 2, "cannot import 'nowhere'"),
    "name in a module": (["train", "penstock.algos.ppo:PPOO", "--env", "CartPole-v1"], 2, "'PPO'"),
    "no algorithm in a module": (["train", "penstock.algos.ppo:loss_fn", "--env", "CartPole-v1"], 2, "build(spec"),
    "agent": (["train", "ppo", "--env", "CartPole-v1", "--algo.agent", "nowhere:x"], 2, "cannot import 'nowhere'"),
    "wrapper": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--wrappers", "nowhere:x"], 2, "cannot import 'nowhere'"),
    "import": (["train", "ppo", "--env", "CartPole-v1", "--import", "nowhere"], 2, "--import nowhere"),
    "device": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.device", "cuda:77"], 2, "use 'cpu'"),
    "init": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--init", "nowhere"], 5, "nowhere is no run directory"),
    "env's own error": (
        ["train", "ppo", "--env", "penstock.envs.toy:FaultEnv", *QUIET, "--env-kwargs", "fault=raise_in_init"], 3, "licence",
    ),
    "resume nothing": (["resume", "nowhere"], 5, "nowhere is no run directory"),
    "resume without a run": (["resume"], 2, "RUN"),
    "resume's option": (["resume", "nowhere", "--imprt", "x"], 2, "--import"),
    "resume's value": (["resume", "nowhere", "--run.steps"], 2, "--run.steps has 0 values"),
    "eval nothing": (["eval", "nowhere"], 5, "nowhere is no run directory"),
    "eval's option": (["eval", "nowhere", "--episods", "3"], 2, "--episodes"),
    "plot nothing": (["plot", "nowhere"], 2, "nothing to plot in nowhere"),
    "plot's option": (["plot", "nowhere", "--metrc", "x"], 2, "--metric"),
    "launch nothing": (["launch"], 2, "ALGO, or the DIR"),
    "launch without env": (["launch", "ppo", "--dir", "x"], 2, "--env is missing"),
    "launch without dir": (["launch", "ppo", "--env", "CartPole-v1"], 2, "--dir is missing"),
    "launch no launch": (["launch", "nowhere/x"], 5, "holds no launch.json"),
    "launch's option": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--sed", "1"], 2, "--seeds"),
    "launch's environment": (["launch", "ppo", "--env", "CartPol-v1", "--dir", "x"], 2, "'CartPole-v1'"),
    "launch's grid": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "algo.lrr=1,2"], 2, "--algo.lr "),
    "launch's value": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "algo.lr=1e-3,zz"], 2, "'zz'"),
    "launch grid's form": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "algo.lr"], 2, "setting=value,value"),
    "launch value twice": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "algo.lr=1,1"], 2, "twice"),
    "launch seed in grid": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "run.seed=1,2"], 2, "use --seeds"),
    "launch seed": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--run.seed", "1"], 2, "use --seeds"),
    "launch run.dir": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--run.dir=y"], 2, "use --dir"),
    "launch slots": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--slots", "9999"], 2, "9999 slots on"),
    "launch auto": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--sampler", "auto", "--slots", "9999"], 2, "9999 slots"),
    "launch's sampler": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--sampler", "autto"], 2, "sampler 'autto'"),
    "launch no slots": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--slots", "0"], 2, "whole number from 1"),
    "bench nothing": (["bench"], 2, "what"),
    "bench what": (["bench", "sampler", "CartPole-v1", "ppo"], 2, "samplers"),
    "bench's option": (["bench", "samplers", "CartPole-v1", "ppo", "--budgt", "3"], 2, "--budget"),
    "bench's budget": (["bench", "samplers", "CartPole-v1", "ppo", "--budget", "0"], 2, "expected seconds"),
    "bench's environment": (["bench", "samplers", "CartPol-v1", "ppo"], 2, "'CartPole-v1'"),
    "bench's algorithm": (["bench", "samplers", "CartPole-v1", "pppo"], 2, "'ppo'"),
    "bench's device": (["bench", "samplers", "CartPole-v1", "ppo", "--device", "cuda:77"], 2, "use 'cpu'"),
    "bench's trace": (["bench", "samplers", "CartPole-v1", "ppo", "--trace", "x.txt"], 2, "ends in .json"),
    "trace": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.trace", "x.txt"], 2, "ends in .json"),
    "envs' option": (["envs", "--imprt", "x"], 2, "--import"),
    "no such env": (["envs", "zzz"], 2, "--import"),
    "algos' option": (["algos", "--x"], 2, "unknown option --x"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case: str, cli: Cli, tmp_path: Path) -> None:
    argv, code, message = WRONG[case]
    said = cli(*argv)
    assert said.code == code, said.both
    assert message in re.sub(r"\s+", " ", said.both.replace("│", "")), said.both
    assert "Traceback" not in said.err or code == 3
    assert not list(tmp_path.iterdir()), "it left something"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("x"), 2), (EnvWorkerError("x"), 3), (NonFiniteError("x"), 4), (CheckpointError("x"), 5)],
)
def test_exit_codes(error: Exception, code: int, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("penstock.cli.algos.run", fail)
    said = cli("algos")
    assert said.code == code
    assert said.err == f"penstock: {type(error).__name__}: x\n"


def test_interrupted_in_a_session(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.algos.run", fail)
    assert cli("algos").code == 130


# train


def test_train_says_what_it_does_and_where_it_left_it(cli: Cli, tmp_path: Path) -> None:
    said = cli("train", "a2c", "--env", "CartPole-v1", *SHORT, "--run.dir", "x", "--run.progress", "plain")
    assert said.code == 0, said.both
    for words in (
        "no preset asked for",
        "A2C on CartPole-v1",
        "seed 0",
        "stopped by",
        "penstock eval x",
        "x/plots/learning-curve.png",
    ):
        assert words in said.out
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


def test_presets_apply_and_say_so(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ppo.toml").write_text(
        '["CartPole-v1"]\nwhy = "Because."\nalgo = {lr = 0.5, minibatch = 16}\nsampler = {T = 8, B = 2}\nrun = {steps = 32}\n'
        'imports = ["math"]\nenv_checks = "off"\n["other"]\nwhy = "Else."\nalgo = {lr = 0.25}\nrun = {steps = 32}\n'
    )
    monkeypatch.setattr("penstock.run.presets._FOLDER", tmp_path)
    small = ("--run.eval-episodes", "1", "--run.tensorboard", "False")
    said = cli(
        "train", "ppo", "--env", "CartPole-v1", *small, "--run.dir", "a", "--run.progress", "plain", "--import", "json"
    )
    assert said.code == 0, said.both
    assert "preset ppo/CartPole-v1: " in said.out
    assert "Because." in said.out
    exp = config(tmp_path / "a")
    assert (exp["algo"]["lr"], exp["sampler"]["T"], exp["run"]["steps"]) == (0.5, 8, 32)
    assert exp["imports"] == ["math", "json"]
    assert exp["env_checks"] == "off"
    for options, lr in (
        ((), 0.5),
        (("--algo.lr", "0.125"), 0.125),
        (("--preset", "other"), 0.25),
        (("--preset", "ppo/other"), 0.25),
    ):
        assert (
            cli(
                "train", "ppo", "--env", "CartPole-v1", *small, *options, "--run.progress", "off", "--run.dir", "b"
            ).code
            == 0
        )
        assert config(tmp_path / "b")["algo"]["lr"] == lr
        shutil.rmtree(tmp_path / "b")
    none = cli("train", "ppo", "--env", "CartPole-v1", *SHORT, "--run.progress", "plain", "--run.dir", "c")
    assert "no preset asked for: default settings" in none.out
    assert config(tmp_path / "c")["algo"]["lr"] == 3e-4
    assert (
        "no preset for ppo on"
        in cli(
            "train",
            "ppo",
            "--env",
            "penstock.envs.toy:Constant",
            *SHORT[2:],
            "--run.dir",
            "d",
            "--run.progress",
            "plain",
        ).out
    )


def test_one_run_for_each_seed(cli: Cli, tmp_path: Path) -> None:
    said = cli("train", "a2c", "--env", "CartPole-v1", *QUIET, "--run.dir", "x", "--seeds", "1,2")
    assert said.code == 0, said.both
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


def test_a_run_without_a_finished_episode_has_no_curve_and_is_no_failure(cli: Cli) -> None:
    said = cli("train", "a2c", "--env", "Pendulum-v1", *QUIET, "--run.eval-episodes", "0", "--run.dir", "x")
    assert said.code == 0
    assert "no learning curve" in said.err


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


# resume, eval, plot, envs, algos


def test_resume_with_overrides(cli: Cli, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    said = cli("resume", "run")
    assert said.code == 2
    assert "finished its 128 steps" in said.err
    assert cli("resume", "run", "--run.steps", "2.56e2", "--run.keep=1", "--run.eval-episodes", "2").code == 0
    exp = config(tmp_path / "run")
    assert (exp["run"]["steps"], exp["run"]["keep"], exp["run"]["eval_episodes"]) == (256, 1, 2)
    assert cli("resume", "run", "--run.steps", "10000", "--run.stop", "time/total_timesteps", "400").code == 0
    assert 400 <= metrics(tmp_path / "run")[-1]["step"] < 500
    assert cli("resume", "run", "--run.stop", "time/total_timesteps", "500", "--run.progress", "plain").code == 0
    for wrong in ("--algo.lr", "--run.seed", "--run.dir"):
        said = cli("resume", "run", wrong, "1")
        assert said.code == 2
        assert f"cannot change {wrong[2:]}" in said.err
    said = cli("resume", "run", "--run.stps", "1")
    assert said.code == 2
    assert "'steps'" in said.err
    picture = tmp_path / "run" / "plots" / "learning-curve.png"
    assert picture.stat().st_mtime_ns > (trained / "plots" / "learning-curve.png").stat().st_mtime_ns


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


def test_plot(cli: Cli, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "all" / "a")
    shutil.copytree(trained, tmp_path / "all" / "b")
    said = cli("plot", "all", "--out", "two.svg", "--metric", "train/value_loss")
    assert said.code == 0, said.both
    assert said.out == "two.svg\n"
    assert (tmp_path / "two.svg").read_text().startswith("<?xml")
    assert cli("plot", "all/a", "all/b").out == "all/a/plots/rollout-ep_rew_mean.png\n"
    assert cli("plot", "all", "--out", "x.gif").code == 2
    assert cli("plot", "all", "--metric", "train/nothing").code == 2


def test_plot_names_what_is_no_run_and_remarks_on_one_without_the_metric(
    cli: Cli, trained: Path, tmp_path: Path
) -> None:
    said = cli("plot", str(trained), "nope", "nada", "--out", "x/y.png")
    assert said.code == 2
    assert "nothing to plot in nope, nada" in said.err
    assert not (tmp_path / "x").exists()
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "metrics.jsonl").touch()
    said = cli("plot", str(trained), "early", "--out", "x.png")
    assert (said.code, said.out) == (0, "x.png\n")
    assert re.fullmatch(r"penstock: left out, without a row with 'rollout/ep_rew_mean': \S+early\n", said.err)


def test_summary_of_a_run_without_an_episode_has_no_return_of_episodes(cli: Cli) -> None:
    said = cli("train", "ppo", "--env", "Pendulum-v1", *SHORT, "--run.dir", "x", "--run.progress", "plain")
    assert said.code == 0
    assert "return, evaluation" in said.out
    assert "last episodes" not in said.out


def test_plot_where_nothing_can_be_written(cli: Cli, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = cli("plot", str(trained), "--out", "file/x.png")
    assert said.code in (2, 5)
    assert "file" in said.err


def test_envs(cli: Cli) -> None:
    assert "CartPole-v1\n" in cli("envs").out
    assert cli("envs", "cartpole-v1").out.splitlines()[0] == "CartPole-v1"
    assert cli("envs", "--import", "penstock.envs.toy", "pend").code == 0


def test_algos(cli: Cli) -> None:
    out = cli("algos").out
    assert "penstock.algos.ppo:PPO" in out
    assert "CartPole-v1" in out
    assert "a2c" in out


# launch


def test_launch_a_grid_then_the_rest_of_it(cli: Cli, tmp_path: Path) -> None:
    """Two real runs; then one of them as if the launcher had been killed, and one as if it had failed."""
    grid = (
        "launch",
        "a2c",
        "--env",
        "CartPole-v1",
        "--dir",
        "x",
        "--seeds",
        "1",
        "--grid",
        "algo.lr=1e-3,2e-3",
        *SHORT,
    )
    said = cli(*grid, "--slots", "1")
    assert said.code == 0, said.both
    assert "2 of 2 runs to do, 1 at a time on" in said.out
    assert "x: 2 of 2 runs finished" in said.out
    assert [config(tmp_path / "x" / f"lr={lr}_s1")["algo"]["lr"] for lr in ("1e-3", "2e-3")] == [1e-3, 2e-3]
    assert config(tmp_path / "x" / "lr=1e-3_s1")["run"]["seed"] == 1
    file = tmp_path / "x" / "launch.json"
    state = json.loads(file.read_text())
    state["runs"]["lr=1e-3_s1"]["status"] = "running"  # it finished, and its launcher died before it noticed
    state["runs"]["lr=2e-3_s1"]["status"] = "failed"
    file.write_text(json.dumps(state))
    shutil.rmtree(tmp_path / "x" / "lr=2e-3_s1" / "checkpoints")
    said = cli(*grid)
    assert said.code == 1
    assert "nothing is left to do" in said.out
    assert "1 of 2 runs finished, 1 failed" in said.out
    said = cli("launch", "x", "--retry")
    assert said.code == 0, said.both
    assert "lr=2e-3_s1: finished" in said.out
    assert cli("launch", "x").code == 0
    assert cli("plot", "x").code == 0
    for other, message in (
        ((*grid, "--run.keep", "2"), "holds another sweep: the options of train"),
        (("launch", "x", "--seeds", "3"), "only --slots and --retry"),
        (("launch", "x", "--retry", "lr=1e-3_s1"), "it is finished"),
    ):
        said = cli(*other)
        assert said.code == 2
        assert message in said.err


def test_launch_leaves_a_folder_of_something_else_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").touch()
    said = cli("launch", "ppo", "--env", "CartPole-v1", "--dir", "x")
    assert said.code == 2
    assert "x is not empty" in said.err
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["thesis.tex"]


# bench and auto


@pytest.mark.usefixtures("forked")
def test_bench_recommends_a_setting_that_train_takes(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        "bench", "samplers", "penstock.envs.toy:Counter", "a2c", "--budget", "5", "--T", "8", "--B", "2", "--env-kwargs",
        "terminate_at=4", "--trace", "t.json",
    )  # fmt: skip
    assert said.code == 0, said.both
    for words in ("env.step", "forward of 4 rows", "hand-shake", "steps/s", "recommended", "why"):
        assert words in said.out
    command = next(line for line in said.out.splitlines() if line.startswith("penstock train"))
    assert "--sampler.T 8 --sampler.B 2" in command
    assert "terminate_at=4" in command
    done = cli(
        *command.split()[1:], "--run.steps", "32", "--run.eval-episodes", "0", "--run.progress", "off", "--run.dir", "x"
    )
    assert done.code == 0, done.both
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "t.png").stat().st_size > 10_000


def _found_at_once(exp: Any, budget_s: float, same_device: bool = False) -> Verdict:
    best = Row(with_settings(base_sampler(exp), {"name": "gpu", "workers": 2}), 1.0, 5.0)
    return Verdict(Costs(1.0, 1.0, {4: 1.0}, 1.0), (best,), best, "because", "", 0.0)


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
