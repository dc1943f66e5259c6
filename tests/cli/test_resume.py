from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.short import Cli, config, metrics

# resume, eval, plot, envs, algos


@pytest.mark.usefixtures("drawn")
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
    assert cli("resume", "run", "--run.each", "None", "--run.stop", "time/total_timesteps", "600").code == 0
    assert config(tmp_path / "run")["run"]["each"] is None
    said = cli("resume", "run", "--run.stps", "1")
    assert said.code == 2
    assert "'steps'" in said.err
    picture = tmp_path / "run" / "plots" / "learning-curve.png"
    assert picture.stat().st_mtime_ns > (trained / "plots" / "learning-curve.png").stat().st_mtime_ns
