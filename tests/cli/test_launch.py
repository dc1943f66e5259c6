from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.config import to_plain
from tests.cli.short import SHORT, Cli, config
from tests.params import slow_but
from tests.studies.slots import fakes

# launch


@pytest.mark.parametrize("begun", slow_but([], ["forked", "as users' are"]))
def test_launch_a_grid_then_the_rest_of_it(
    begun: str, cli: Cli, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two real runs; then one of them as if the launcher had been killed, and one as if it had failed."""
    if begun == "forked":
        request.getfixturevalue("launched")
    grid = (
        "launch", "a2c", "--env", "CartPole-v1", "--dir", "x", "--seeds", "1", "--grid", "algo.lr=1e-3,2e-3", *SHORT,
    )  # fmt: skip
    said = cli(*grid, "--slots", "1")
    assert said.code == 0, said.both
    assert "x: 2 of 2 trials to do, 1 at a time" in said.out
    assert "x: 2 of 2 trials finished" in said.out
    assert [config(tmp_path / "x" / f"lr={lr}_s1")["algo"]["lr"] for lr in ("1e-3", "2e-3")] == [1e-3, 2e-3]
    assert config(tmp_path / "x" / "lr=1e-3_s1")["run"]["seed"] == 1
    assert "train it:  penstock train a2c --env CartPole-v1 --preset-file x/best.toml" in said.out
    file = tmp_path / "x" / "study.json"
    state = json.loads(file.read_text())
    first, second = state["trials"]
    first |= {"state": "running", "scores": {}}  # it finished, and its launcher died before it noticed
    first["run"]["status"] = "running"
    second |= {"state": "failed", "scores": {}}
    second["run"]["status"] = "failed"
    file.write_text(json.dumps(state))
    shutil.rmtree(tmp_path / "x" / "lr=2e-3_s1" / "checkpoints")
    said = cli(*grid)
    assert said.code == 1
    assert "nothing is left to do" in said.out
    assert "1 of 2 trials finished, 1 failed" in said.out
    said = cli("launch", "x", "--retry")
    assert said.code == 0, said.both
    assert "lr=2e-3_s1: score" in said.out
    assert cli("launch", "x").code == 0
    assert cli("plot", "x").code == 0
    for other, message in (
        ((*grid, "--run.keep", "2"), "holds another sweep: run.keep was"),
        (("launch", "x", "--seeds", "3"), "x has its settings already, and --seeds was given"),
        (("launch", "x", "--retry", "lr=1e-3_s1"), "no such failed run in x"),
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


@pytest.fixture
def stood_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs are the fake of tests/studies/slots/fakes.py; gives where a sweep goes."""
    fakes.stand_in(fakes.FAKE, tmp_path, monkeypatch)
    return tmp_path / "x"


def stored(folder: Path) -> dict[str, Any]:
    """The experiments of the runs of a sweep by name."""
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("settings/*/config.json")}
    return {name: plain["experiment"] for name, plain in found.items()}


def test_each_environment_of_a_grid_has_its_preset_and_specs(cli: Cli, stood_in: Path) -> None:
    said = cli("launch", "ppo", "--grid", "env=CartPole-v1,Pendulum-v1", "--dir", "x", "--slots", "1")
    assert said.code == 0, said.both
    exps = stored(stood_in)
    for env in ("CartPole-v1", "Pendulum-v1"):
        assert exps[f"env={env}_s0"]["algo"] == to_plain(ps.preset("ppo", env))["algo"]
    specs = [json.loads(path.read_text())["spec"] for path in sorted(stood_in.glob("settings/*/config.json"))]
    assert specs[0] != specs[1]
    assert "best of" not in said.out  # scores of two environments
    assert cli("launch", "x").code == 0  # all of it is read again


@pytest.mark.parametrize(
    ("words", "measure"),
    [
        (("--sampler", "auto"), ["s0"]),
        (("--grid", "sampler=auto,serial"), ["sampler=auto_s0"]),
        ((), []),
    ],
)
def test_runs_measure_on_their_own_cpus(words: tuple[str, ...], measure: list[str], cli: Cli, stood_in: Path) -> None:
    said = cli("launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--slots", "1", *words)
    assert said.code == 0, said.both
    auto = [path.stem for path in stood_in.glob("logs/*") if "--sampler auto" in path.read_text().splitlines()[0]]
    assert auto == measure


def test_a_failure_is_shown_with_the_end_of_its_log_and_tune_goes_on_with_a_sweep(cli: Cli, stood_in: Path) -> None:
    grid = ("launch", "ppo", "--env", "CartPole-v1", "--dir", "x", "--slots", "1", "--grid", "run.progress=plain,off")
    failing = fakes.FAKE.replace('what == "bad"', 'what == "off"').replace(
        "the licence", r"\x1b[2J\x1b]0;x\x07the licence"
    )
    (stood_in.parent / "stand-in" / "__main__.py").write_text(failing)
    said = cli(*grid)
    assert said.code == 1, said.both
    for words in (
        "progress=off_s0 failed: exit code 3 (environment)", "its log: x/logs/progress=off_s0.log, which ends",
        r"  | \x1b[2J\x1b]0;x\x07the licence has expired", "once more: penstock launch x --retry", "x: 1 of 2 trials finished, 1 failed",
        "curves:    penstock plot x",
    ):  # fmt: skip
        assert words in said.out
    assert r"exit code 3 (environment): \x1b[2J" in said.out and not {"\x1b", "\x07"} & {*said.both}
    (stood_in.parent / "stand-in" / "__main__.py").write_text(fakes.FAKE)
    said = cli("tune", "x", "--retry", "progress=off_s0", "--parallel", "1")
    assert said.code == 0, said.both
    assert "x: 2 of 2 trials finished" in said.out
    log = stood_in / "logs" / "progress=off_s0.log"
    assert "trusts None" in log.read_text()
    (stood_in.parent / "stand-in" / "__main__.py").write_text(fakes.FAKE.replace('what == "bad"', 'what == "off"'))
    shutil.rmtree(stood_in)
    assert cli(*grid).code == 1
    assert cli("launch", "x", "--retry", "--trust").code == 1
    assert f"trusts {stood_in.resolve()}" in log.read_text()  # of what a stranger's runs name, too
