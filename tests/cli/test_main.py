from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.algos import ALGOS
from penstock.cli.main import COMMANDS
from penstock.core import VERSION
from penstock.core.errors import CheckpointError, ConfigError, EnvWorkerError, NonFiniteError
from tests.cli.short import QUIET, Cli

# Help


def test_help_loads_nothing_heavy() -> None:
    """What makes it quick: 0.5 s is the bar, and torch alone takes longer. gymnasium is left out as well."""
    code = f"""
import sys
from penstock.cli.main import main
for argv in [[], ["--help"], ["-h"], ["help"], ["--version"], *([c, "--help"] for c in {list(COMMANDS)})]:
    try:
        code = main(argv)
    except SystemExit as error:
        code = error.code
    assert code in (0, None), (argv, code)
    heavy = {{"torch", "gymnasium", "numpy", "matplotlib", "rich"}} & set(sys.modules)
    assert not heavy, (argv, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"penstock {command}" in done.stdout
    assert VERSION in done.stdout


def test_every_command_is_there_and_says_what_it_does(cli: Cli) -> None:
    listed = cli("--help").out
    for command in COMMANDS:
        said = cli(command, "--help")
        assert (said.code, said.err) == (0, "")
        assert "usage: penstock" in said.out
        assert command in listed


def test_the_entry_point_and_the_module() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, timeout=200)
    assert done.stdout == f"penstock {VERSION}\n"


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m penstock envs | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


@pytest.mark.parametrize("argv", ["algos", "envs", "--help", "plot --help"])
def test_output_that_cannot_be_written_is_one_line(argv: str) -> None:
    command = f"{sys.executable} -m penstock {argv} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr == "penstock: the output could not be written: No space left on device\n"


def test_warnings_are_one_line_each(tmp_path: Path) -> None:
    code = "import warnings; from penstock.envs.shutdown import warn_of_closing as warn\n"
    code += "def run(argv): warn(['slot 0 of X in close(): a', 'slot 1 of X in close(): b']); warnings.warn('mine')"
    (tmp_path / "closes.py").write_text(code)
    code = "import sys, closes; sys.modules['penstock.cli.algos'] = closes; sys.argv = ['', 'algos']\n"
    code += "from penstock.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert lines[0] == "penstock: warning: slot 0 and 1 more of X in close(): a"
    assert lines[1].endswith("closes.py:2: UserWarning: mine")


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
    "ratio without end": (
        ["train", "sac", "--env", "Pendulum-v1", *QUIET, "--algo.replay-ratio", "inf"],
        2,
        "replay_ratio=inf; expected more than 0, finite",
    ),
    "no number": (["train", "sac", "--env", "Pendulum-v1", *QUIET, "--algo.alpha", "nan"], 2, "alpha=nan"),
    "no step size": (["train", "sac", "--env", "Pendulum-v1", *QUIET, "--algo.lr", "inf"], 2, "lr=inf; expected more than 0, finite"),
    "no support": (["train", "dqn", "--env", "CartPole-v1", *QUIET, "--algo.v-max", "inf"], 2, "v_max=inf"),
    "option": (["train", "ppo", "--env", "CartPole-v1", "--imprt", "x"], 2, "--import"),
    "run directory without a name": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", ""], 2, "run.dir=''"),
    "seeds as one": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.seed", "1,2"], 2, "--seeds 1,2"),
    "seeds as one, joined": (["train", "ppo", "--env", "CartPole-v1", "--run.seed=1,2"], 2, "--seeds 1,2"),
    "option of a part": (["train", "ppo", "--env", "CartPole-v1", "--seed", "3"], 2, "--run.seed"),
    "option without its part": (["train", "ppo", "--env", "CartPole-v1", "--steps", "3"], 2, "--run.steps"),
    "algorithm's option": (["train", "ppo", "--env", "CartPole-v1", "--algo.lrr", "1"], 2, "--algo.lr?"),
    "run's option": (["train", "ppo", "--env", "CartPole-v1", "--run.stps", "1"], 2, "--run.steps?"),
    "sampler's option": (["train", "ppo", "--env", "CartPole-v1", "--sampler.BB", "1"], 2, "--sampler.B?"),
    "left over": (["train", "ppo", "--env", "CartPole-v1", "extra"], 2, "extra"),
    "type": (["train", "ppo", "--env", "CartPole-v1", "--run.steps", "many"], 2, "run.steps='many'"),
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
    **{
        f"{line} without a run": ([*line.split(), "."], code, "expected the directory of a run, which holds config.json")
        for line, code in {
            "resume": 5, "eval": 5, "enjoy": 5, "record --dataset d": 5, "track": 5, "plot": 2, "runs": 2,
            "export --out x.onnx": 5,
        }.items()
    },
    "resume without a run": (["resume"], 2, "RUN"),
    "resume's option": (["resume", "nowhere", "--imprt", "x"], 2, "--import"),
    "resume's value": (["resume", "nowhere", "--run.steps"], 2, "--run.steps has 0 values"),
    "eval nothing": (["eval", "nowhere"], 5, "nowhere is no run directory"),
    "eval's option": (["eval", "nowhere", "--episods", "3"], 2, "--episodes"),
    "plot nothing": (["plot", "nowhere"], 2, "no run in nowhere"),
    "runs of nothing": (["runs", "nowhere"], 2, "no run in nowhere"),
    "plot's option": (["plot", "nowhere", "--metrc", "x"], 2, "--metric"),
    "launch nothing": (["launch"], 2, "ALGO, or the DIR"),
    "launch without env": (["launch", "ppo", "--dir", "x"], 2, "--env is missing"),
    "launch a search": (["launch", "ppo", "--env", "CartPole-v1", "--scheduler", "asha"], 2, "--scheduler is of a search"),
    "a sweep and a search": (
        ["tune", "ppo", "--env", "CartPole-v1", "--grid", "algo.lr=1", "--search", "sampler.T=choice(1,2)"], 2, "is a sweep"
    ),
    "launch no launch": (["launch", "nowhere/x"], 5, "holds no study.json"),
    "launch's option": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--seds", "1"], 2, "--seeds"),
    "launch's environment": (["launch", "ppo", "--env", "CartPol-v1", "--dir", "x"], 2, "'CartPole-v1'"),
    "launch's grid": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "algo.lrr=1,2"], 2, "--algo.lr?"),
    "launch's value": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "algo.lr=1e-3,zz"], 2, "'zz'"),
    "launch grid's form": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "algo.lr"], 2, "setting=value,value"),
    "launch value twice": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "algo.lr=1,1"], 2, "'1' and '1' are equal"),
    "launch seed in grid": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--grid", "run.seed=1,2"], 2, "use --seeds"),
    "launch seed": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--run.seed", "1"], 2, "use --seeds"),
    "launch run.dir": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--run.dir=y"], 2, "use --dir"),
    "launch slots": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--slots", "9999"], 2, "9999 slots on"),
    "launch auto": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--sampler", "auto", "--slots", "9999"], 2, "9999 slots"),
    "launch's sampler": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--sampler", "autto"], 2, "sampler 'autto'"),
    "launch no slots": (["launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--slots", "0"], 2, "whole number from 1"),
    "bench nothing": (["bench"], 2, "what"),
    "bench what": (["bench", "sampler", "CartPole-v1", "ppo"], 2, "samplers"),
    "bench's option": (["bench", "samplers", "CartPole-v1", "ppo", "--secnds", "3"], 2, "--seconds"),
    "bench's seconds": (["bench", "samplers", "CartPole-v1", "ppo", "--seconds", "0"], 2, "expected seconds"),
    "bench's environment": (["bench", "samplers", "CartPol-v1", "ppo"], 2, "'CartPole-v1'"),
    "bench's algorithm": (["bench", "samplers", "pppo", "CartPole-v1"], 2, "'ppo'"),
    "bench's device": (["bench", "samplers", "CartPole-v1", "ppo", "--device", "cuda:77"], 2, "use 'cpu'"),
    "bench's trace": (["bench", "samplers", "CartPole-v1", "ppo", "--trace", "x.txt"], 2, "ends in .json"),
    "trace": (["train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.trace", "x.txt"], 2, "ends in .json"),
    "envs' option": (["envs", "--imprt", "x"], 2, "--import"),
    "no such env": (["envs", "zzz"], 2, "--import"),
    "algos' option": (["algos", "--x"], 2, "unknown option --x"),
}  # fmt: skip


NEEDS_TORCH = {
    "another's preset", "ratio", "name in a module", "no algorithm in a module", "device", "env's own error",
    "launch a search", "a sweep and a search", "launch value twice", "launch seed in grid", "launch seed", "launch run.dir",
    "launch slots", "launch auto", "bench's device", "bench's trace",
}  # fmt: skip
"""Settings that contradict each other, and what only the thing itself can tell; slips of the pen are not among them."""
QUICK = {
    **{case: argv for case, (argv, _, _) in WRONG.items() if case not in NEEDS_TORCH},
    **{f"help of {name}": ["train", name, "--help"] for name in ALGOS},
    "whole help": ["train", "ppo", "--help-all"],
    "help of a sampler": ["train", "dqn", "--sampler", "async", "--sampler.inner", "cpu", "--help"],
    "record nothing": ["record", "nowhere", "--dataset", "x"],
    "export nothing": ["export", "nowhere", "--out", "x.onnx"],
    "replay nothing": ["replay", "info", "nowhere"],
    "config nothing": ["train", "--config", "nowhere.toml"],
    "preset file nothing": ["train", "ppo", "--env", "CartPole-v1", "--preset-file", "nowhere.toml"],
}
KNOWS_IDS = {
    "environment", "preset", "preset's algorithm", "run directory without a name", "trace", "bench's environment",
    "no such env", "launch's environment", "launch's value",
}  # fmt: skip
"""Those that ask Gymnasium which ids there are, after all else is found right."""


def test_help_slips_of_the_pen_and_missing_paths_load_nothing_heavy(tmp_path: Path) -> None:
    """What keeps each within half a second; a fork for each, of one process that has loaded the command line alone."""
    code = f"""
import json, os, sys
from penstock.cli.main import main
for case, argv in {QUICK!r}.items():
    pid = os.fork()
    if pid == 0:
        for fd in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        try:
            main(argv)
        except SystemExit:
            pass
        with open(str(len(os.listdir())), "w") as file:
            json.dump([case, sorted({{"torch", "gymnasium", "matplotlib", "optuna", "ray"}} & set(sys.modules))], file)
        os._exit(0)
    os.waitpid(pid, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = dict(json.loads(path.read_text()) for path in tmp_path.iterdir())
    assert loaded.keys() == QUICK.keys()
    assert not {
        case: found for case, found in loaded.items() if set(found) - ({"gymnasium"} if case in KNOWS_IDS else set())
    }


@pytest.mark.parametrize("command", sorted({argv[0] for argv, _, _ in WRONG.values()}))
def test_wrong_input(command: str, cli: Cli, tmp_path: Path) -> None:
    for case, (argv, code, message) in WRONG.items():
        if argv[0] == command:
            said = cli(*argv)
            assert said.code == code, (case, said.both)
            assert message in re.sub(r"\s+", " ", said.both.replace("│", "")), (case, said.both)
            assert "Traceback" not in said.err or code == 3
            assert not list(tmp_path.iterdir()), f"{case}: it left something"


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
