"""Runners on the command line: named with what is inside them, trained, gone on with, evaluated and swept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.cli.settings import experiment, train_parser
from tests.cli.short import QUIET, Cli, config, metrics

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

OTHERS = ("--run.steps", "128", "--run.eval-episodes", "1", "--run.progress", "off",
          "--run.log-interval", "1")  # fmt: skip
RUNNERS = ("--sampler", "runners", "--sampler.backend", "in-process", "--sampler.runners", "2", "--preset", "none",
           "--sampler.inner.T", "16", "--sampler.inner.B", "2", *OTHERS)  # fmt: skip


def meant(*options: str) -> Any:
    args, rest = train_parser().parse_known_args(["--env", "CartPole-v1", *options])
    return experiment("ppo", args, rest)[0].sampler


def test_the_slots_of_the_preset_are_shared() -> None:
    preset = ps.preset("ppo", "CartPole-v1").sampler_settings.spec
    for n in (1, 2, 4):
        assert meant("--sampler", "runners", "--sampler.runners", str(n)).spec == preset
    found = meant(
        "--sampler=runners", "--sampler.runners=4", "--sampler.inner=cpu", "--sampler.inner.workers=8",
        "--sampler.depth", "1", "--sampler.backend", "processes", "--sampler.address", "auto",
    )  # fmt: skip
    assert found == ps.RunnerSampler(
        4, ps.CpuSampler(preset.T, preset.B // 4, workers=8), "processes", depth=1, address="auto"
    )
    assert meant("--sampler", "async", "--sampler.inner", "gpu") == ps.AsyncSampler(ps.GpuSampler(*preset))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sampler", "runners", "--sampler.runners", "7"), "sampler.runners=7 for the B="),
        (("--sampler", "runners", "--sampler.inner", "cpuu"), "sampler.inner='cpuu'; did you mean 'cpu' or 'gpu'?"),
        (("--sampler", "runners", "--sampler.B", "4"), "unknown option --sampler.B; did you mean --sampler.inner.B?"),
        (("--sampler", "runners", "--sampler.workers", "4"), "it is --sampler.inner.workers of --sampler.inner cpu, gpu"),
        (("--sampler", "cpu", "--sampler.runners", "4"), "it is --sampler.runners of --sampler runners"),
        (("--sampler", "cpu", "--sampler.inner", "gpu"), "no sampler inside it; those that have one: --sampler async"),
        (("--sampler", "runners", "--sampler.mode", "ready"), "PPO needs the same slots in every batch"),
    ],
)  # fmt: skip
def test_mistakes_bring_the_fix(options: tuple[str, ...], says: str, cli: Cli, tmp_path: Path) -> None:
    said = cli("train", "ppo", "--env", "CartPole-v1", *options, "--run.dir", "run", *OTHERS)
    assert said.code == 2
    assert says in said.err
    assert not (tmp_path / "run").exists()


def test_help_lists_the_settings_of_what_is_inside(cli: Cli) -> None:
    said = cli("train", "ppo", "--sampler", "runners", "--sampler.inner", "cpu", "--help-all").out
    assert "--sampler.address" in said
    assert "--sampler.inner.workers" in said
    assert "--sampler.inner.workers" not in cli("train", "ppo", "--sampler", "runners", "--help").out


def test_a_run_goes_on_with_other_runners_or_none_and_ends_with_the_same_bits(cli: Cli, tmp_path: Path) -> None:
    train = ("train", "ppo", "--env", "CartPole-v1")
    assert cli(*train, *QUIET, "--run.steps", "256", "--run.dir", "whole").code == 0
    assert cli(*train, *RUNNERS, "--run.dir", "run").code == 0
    assert config(tmp_path / "run")["sampler"]["class"] == "penstock.samplers.runners.settings:RunnerSampler"
    assert metrics(tmp_path / "run")[-1]["group/runners"] == 2
    assert cli("resume", "run", "--sampler.runners", "4", "--run.steps", "192").code == 0
    stored = config(tmp_path / "run")["sampler"]
    assert (stored["runners"], stored["inner"]["B"]) == (4, 1)
    assert cli("resume", "run", "--sampler", "serial", "--run.steps", "256").code == 0
    assert config(tmp_path / "run")["sampler"]["B"] == 4
    one, two = (ps.load(tmp_path / name).agent.state_dict() for name in ("whole", "run"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert cli("eval", "run", "--episodes", "2").code == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sampler.runners", "3"), "sampler.runners=3 for the B=4"),
        (("--sampler.inner.B", "3"), "B is 6, and was 4"),
        (("--sampler", "serial", "--sampler.T", "9"), "T is 9, and was 16"),
        (("--sampler.depth", "1"), "depth is 1, and was 0"),
        (("--sampler.rnners", "4"), "has no 'rnners'; did you mean 'runners'"),
        (("--sampler", "seriall"), "unknown sampler 'seriall'; did you mean 'serial'"),
        (("--algo.lr", "1"), "the sampler where it collects the same batches"),
    ],
)  # fmt: skip
def test_a_run_does_not_go_on_with_other_batches(
    options: tuple[str, ...], says: str, cli: Cli, tmp_path: Path, run_of_runners: Path
) -> None:
    before = (run_of_runners / "config.json").read_bytes()
    said = cli("resume", str(run_of_runners), *options, "--run.steps", "256")
    assert said.code == 2
    assert says in said.err
    assert (run_of_runners / "config.json").read_bytes() == before


def test_a_run_of_runners_is_made_again_and_measured(cli: Cli, tmp_path: Path, run_of_runners: Path) -> None:
    again = ("--config", str(run_of_runners), *OTHERS, "--run.dir", "again")
    assert cli("train", *again, "--sampler.runners", "1", "--sampler.inner", "cpu").code == 0
    stored = config(tmp_path / "again")["sampler"]
    assert (stored["runners"], stored["inner"]["class"], stored["inner"]["B"]) == (
        1, "penstock.samplers.cpu:CpuSampler", 4,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
def test_a_sweep_over_runners(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        "launch", "ppo", "--env", "CartPole-v1", "--preset", "none", "--sampler", "runners", "--sampler.inner.T", "16",
        "--sampler.backend", "in-process", "--algo.epochs", "1", *OTHERS, "--grid", "sampler.runners=1,4",
        "--dir", "sweep", "--slots", "1",
    )  # fmt: skip
    assert said.code == 0, said.both
    batch = ps.PPO().batch.B
    for n in (1, 4):
        stored = config(tmp_path / "sweep" / f"runners={n}_s0")["sampler"]
        assert (stored["runners"], stored["inner"]["B"]) == (n, batch // n)


@pytest.fixture(scope="module")
def run_of_runners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runners") / "run"
    sampler = ps.RunnerSampler(2, ps.SerialSampler(16, 2), "in-process")
    settings = ps.RunConfig(steps=128, dir=str(run), eval_episodes=1, progress="off")
    ps.train(ps.Experiment("CartPole-v1", ps.PPO(epochs=1), sampler, settings))
    return run
