from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.envs.toy import Constant
from penstock.run.files import rundir
from penstock.run.files.lock import RunLock
from tests.run.cartpole import CARTPOLE, RUN, at, saved


def test_default_run_dir_names_env_algorithm_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [ps.train(replace(CARTPOLE, run=replace(RUN, steps=64, eval_episodes=0))).run_dir for _ in range(2)]
    assert found[0] != found[1]
    assert all(path.parts[:3] == ("runs", "CartPole-v1", "a2c") and "-s1" in path.name for path in found)


def test_runs_that_begin_in_the_same_second_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep starts many at once; the name is taken while another is still being built."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20300101-000000")
    exp = replace(CARTPOLE, run=replace(RUN, steps=64, eval_episodes=0), env=lambda: _while_another_begins())
    others: list[Path] = []

    def _while_another_begins() -> Any:
        if not others:
            others.append(Path("x"))
            others[0] = ps.train(replace(exp, env=Constant)).run_dir
        return Constant()

    mine = ps.train(replace(exp, env=lambda: _while_another_begins())).run_dir
    assert mine != others[0]
    assert saved(mine) == saved(others[0])


# Directories


@pytest.mark.parametrize("content", ["metrics.jsonl", "unrelated.txt", ".hidden"])
def test_nothing_is_written_over(content: str, tmp_path: Path) -> None:
    (tmp_path / content).write_text("mine")
    with pytest.raises(ConfigError, match=r"not empty.*penstock resume"):
        ps.train(at(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [content]
    assert (tmp_path / content).read_text() == "mine"


def test_an_empty_directory_will_do(tmp_path: Path) -> None:
    assert ps.train(at(tmp_path, steps=64)).run_dir == tmp_path


def test_a_directory_that_fills_up_during_start_up_is_left_alone(tmp_path: Path) -> None:
    def late() -> Any:
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "metrics.jsonl").write_text("another run's")
        return Constant()

    with pytest.raises(ConfigError, match="not empty"):
        ps.train(at(tmp_path / "run", replace(CARTPOLE, env=lambda: late())))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "another run's"
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_directory_in_use(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ConfigError, match=f"in use by pid {os.getpid()}"):
        ps.train(at(tmp_path))
    ps.train(at(tmp_path, steps=64))
    with RunLock(tmp_path), pytest.raises(ConfigError, match="in use"):
        ps.resume(tmp_path, {"run.steps": 128})


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"file is a file; .*Choose another run\.dir"):
        ps.train(at(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="Not a directory"):
        ps.train(at(tmp_path / "file" / "below"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_step_may_be_given_as_a_number(tmp_path: Path) -> None:
    ps.train(at(tmp_path, steps=64))
    (step,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    ps.load(tmp_path, which=step)  # pyright: ignore[reportArgumentType]


def test_the_rate_of_a_resumed_run_stands_beside_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20,213 steps stood beside the seconds and the rate of the 10,207 that the resumed process had taken."""
    ps.train(at(tmp_path, steps=64))
    ps.resume(tmp_path, {"run.steps": 192, "run.progress": "plain"})
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "environment steps" in line)
    assert re.search(r"249 \(123 of them in [\d.]+ s, ", row)


def test_a_repository_that_came_from_elsewhere_executes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    monkeypatch.chdir(tmp_path)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], check=True, timeout=20)

    git("init", "-q")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".gitattributes").write_text("*.txt filter=x")
    git("add", ".")
    git("commit", "-qm", "x")
    commit = rundir._git()  # pyright: ignore[reportPrivateUsage]
    assert commit is not None
    (tmp_path / "a.txt").write_text("b")
    assert rundir._git() == f"{commit}-dirty"  # pyright: ignore[reportPrivateUsage]
    git("config", "core.fsmonitor", "touch EXECUTED; false")
    assert rundir._git() == f"{commit}-dirty"  # pyright: ignore[reportPrivateUsage]
    git("config", "filter.x.clean", "touch EXECUTED; cat")
    assert rundir._git() == commit  # pyright: ignore[reportPrivateUsage]
    assert not (tmp_path / "EXECUTED").exists()
