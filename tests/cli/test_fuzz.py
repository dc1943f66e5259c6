"""Malformed files of settings and command lines: whatever is wrong with one is told in a line, and never by a traceback."""

from __future__ import annotations

import itertools
import random
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli.config import experiment_from
from penstock.cli.main import main
from penstock.cli.settings import experiment, train_parser
from penstock.core.errors import PenstockError
from tests.cli.short import Cli

SOUND = """
eval_env_kwargs = {max_episode_steps = 20}
run.dir = "run"
run.steps = 8
run.progress = "off"
run.stop = {"eval/mean_reward" = 475}
run.eval_episodes = 1
run.eval_slots = 1
run.log_interval = 1
run.trackers = ["tensorboard"]
run.checkpoint_interval = 8

[env]
id = "CartPole-v1"
kwargs = {max_episode_steps = 9}
info_keys = ["k"]
checks = "always"

[algo]
name = "a2c"
lr = "linear(1e-3, 0)"
discount = 0.9
net = {hidden = [8], activation = "tanh"}

[sampler]
name = "serial"
T = 4
B = 2
"""
NASTY = (
    "1e30", "9223372036854775807", "9223372036854775808", "-1", "0", "nan", "-inf", "1" + "0" * 400, "9" * 5_000,
    '""', "[]", "{}", '"os:system"', "true", "1979-05-27", "07:32:00", '"\\u0000"', '"\\u001b[2J"', "[[[[1]]]]",
    "[" * 3_000, "{a = {a = 1}}", '"' + "x" * 9_999 + '"', '"linear(1,"', '"linear(nan, 1e400)"', '"../../x"',
    '"none"', "[1, 'a', [2]]", "1.5", '"\\U0001F3B2"', "0x", "'''", "}", "\x07",
)  # fmt: skip
WORDS = (

    "1e30", "9223372036854775807", "1e400", "-1", "nan", "9" * 5_000, "", "[", "[" * 3_000, "[[1]]", "{}", "{", "os:system", "true",
    "\x1b[2J", "\udcff", "linear(1,", "a=b", "=", "..", "/dev/null", "none", "1,2", "[1,", "\x00", "x" * 9_999, ":", "a:", ":b", "a.b:c.d",
)  # fmt: skip
OPTIONS = (
    "--env", "--env-kwargs", "--wrappers", "--env-drop", "--env-text", "--env-mask", "--info-keys", "--env-checks",
    "--sampler", "--preset", "--preset-file", "--config", "--eval-env", "--eval-env-kwargs", "--algo.agent",
    "--seeds", "--init", "--import", "--algo.lr", "--algo.net.hidden", "--algo.net.cnn", "--algo.discount",
    "--algo.net.recurrent", "--sampler.T", "--sampler.B", "--sampler.name", "--run.steps", "--run.seed", "--run.stop",
    "--run.each", "--run.device", "--run.eval-episodes", "--run.learner-threads", "--run.trace", "--run", "--", "-",
    "--algo", "--run.dir", "--sampler.inner",
)  # fmt: skip


def files(draw: random.Random) -> Iterator[bytes]:
    """Sound settings with a value replaced, a character changed, a line lost or doubled, or cut short."""
    lines = SOUND.strip().split("\n")
    while True:
        kind, at = draw.randrange(4), draw.randrange(len(SOUND))
        changed = [*lines]
        i = draw.choice([k for k, line in enumerate(lines) if "=" in line])
        if kind == 0:
            parts = changed[i].split(" = ")
            k = draw.randrange(1, len(parts))
            rest = parts[k].partition(",")[1:] if "," in parts[k] and not parts[k].startswith(('"', "[")) else ("", "")
            parts[k] = draw.choice(NASTY) + "".join(rest)
            changed[i] = " = ".join(parts)
            yield "\n".join(changed).encode(errors="surrogatepass")
        elif kind == 1:
            yield SOUND.encode()[:at] + bytes([draw.randrange(256)]) + SOUND.encode()[at + 1 :]
        elif kind == 2:
            changed[i:i] = [draw.choice(lines)] if draw.random() < 0.5 else []
            del changed[draw.randrange(len(changed))]
            yield "\n".join(changed).encode()
        else:
            yield SOUND.encode()[:at]


def lines(draw: random.Random) -> Iterator[list[str]]:
    """Options of `penstock train`, of which one to three have values that are none."""
    while True:
        words = [
            w
            for _ in range(draw.randrange(1, 4))
            for w in (draw.choice(OPTIONS), *draw.choices(WORDS, k=draw.randrange(3)))
        ]
        yield ["ppo", "--env", "CartPole-v1", *words]


def read(data: bytes, folder: Path, begin: bool) -> None:
    """Reads a file of settings, and begins a run of those that are sound; every error must be one of penstock's."""
    file = folder / "x.toml"
    file.write_bytes(data)
    try:
        exp = experiment_from(file)
        if begin and exp.sampler_settings.spec.size <= 100_000:
            with ps.Run(replace(exp, run=replace(exp.run, dir=str(folder / "run"), steps=8))) as run:
                next(iter(run))
    except PenstockError as error:
        assert str(error).replace("\n", " ").isprintable()  # noqa: PT017
    else:
        tomllib.loads(data.decode())


def parse(words: list[str]) -> None:
    """Reads a command line as `train` does; every error must be one of penstock's, or the parser's own message."""
    algo, *options = words
    try:
        args, rest = train_parser().parse_known_args(options)
        experiment(algo, args, rest)
    except (PenstockError, SystemExit) as error:
        assert not isinstance(error, SystemExit) or error.code in (0, 2, None) or isinstance(error.code, str)  # noqa: PT017


@pytest.mark.parametrize("seed", range(4))
def test_malformed_files(seed: int, cli: Cli, tmp_path: Path) -> None:
    for data in itertools.islice(files(random.Random(seed)), 30):
        read(data, tmp_path, begin=False)


@pytest.mark.parametrize("seed", range(4))
def test_malformed_lines(seed: int, cli: Cli) -> None:
    for words in itertools.islice(lines(random.Random(seed)), 8):
        parse(words)


@pytest.mark.slow
def test_many_malformed_files_and_lines(cli: Cli, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    for i, data in enumerate(itertools.islice(files(random.Random(7)), 300)):
        folder = tmp_path / str(i)
        folder.mkdir()
        read(data, folder, begin=True)
    for words in itertools.islice(lines(random.Random(8)), 300):
        parse(words)


COMMANDS: list[Any] = [
    ["eval", "nowhere"], ["eval", "/dev/null"], ["eval", "run\udcff"], ["eval", "."],
    ["eval", "", "--episodes", "1e30"], ["eval", "x\0y"], ["record", "nowhere", "--dataset", "/dev/null"],
    ["resume", "nowhere", "--run.steps", "9" * 5_000], ["resume", "x\0y"], ["resume", "."],
    ["replay", "info", "nowhere"], ["plot", "nowhere"], ["plot", "x\0y"], ["launch", "nowhere/x"], ["launch", "."],
    ["launch", "ppo", "--env", "CartPole-v1", "--dir", "x\udcff"],
    ["launch", "ppo", "--env", "CartPole-v1", "--dir", "d", "--grid", "algo.lr=[[["], ["tune", "nowhere/x"],
    ["tune", "."], ["tune", "ppo", "--env", "CartPole-v1", "--search", "algo.lr=uniform(nan,1e400)"],
    ["tune", "ppo", "--env", "CartPole-v1", "--search", "algo.lr=choice("],
    ["train", "ppo", "--env", "CartPole-v1", "--run.dir", "x\0y"],
    ["train", "ppo", "--env", "CartPole-v1", "--run.dir", "x\udcff"],
    ["train", "ppo", "--env", "CartPole-v1", "--init", "x\0y"], ["train", "--config", "/dev/zero"],
    ["bench", "samplers", "CartPole-v1", ":"], ["envs", "\udcff"], ["envs", "--import", "..x"],
]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS)
def test_a_malformed_command(words: list[str], cli: Cli) -> None:
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert code not in (0, None)
