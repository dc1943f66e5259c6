from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.short import SHORT, Cli, config
from tests.params import slow_but

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
