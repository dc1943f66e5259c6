"""The trainable for Ray Tune: by a stand-in for its session, and by Tune itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.studies import ray_tune

RUN = ps.RunConfig(steps=512, progress="off", eval_episodes=1, log_interval=1)
EXP = ps.Experiment("CartPole-v1", ps.A2C(), ps.SerialSampler(T=16, B=4), RUN)
NEEDED = ("ray", "pandas", "pyarrow", "pydantic")


class Checkpoint:
    """A directory, as Tune's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        yield str(self.path)


class Session:
    """What a function trainable sees of Tune: a folder, a checkpoint to begin with, and reports."""

    def __init__(self, folder: Path, start: Checkpoint | None = None) -> None:
        self.folder, self._start = folder, start
        self.reports: list[dict[str, Any]] = []
        self.checkpoints: list[Checkpoint] = []
        self.Checkpoint = self

    def from_directory(self, path: Path) -> Path:
        return path

    def get_context(self) -> Session:
        return self

    def get_trial_dir(self) -> str:
        return str(self.folder)

    def get_checkpoint(self) -> Checkpoint | None:
        return self._start

    def report(self, metrics: dict[str, Any], checkpoint: Path | None = None) -> None:
        self.reports.append(metrics)
        if checkpoint is not None:
            kept = self.folder / f"checkpoint-{len(self.checkpoints)}"
            shutil.copytree(checkpoint, kept)
            self.checkpoints.append(Checkpoint(kept))


def trained(
    monkeypatch: pytest.MonkeyPatch, folder: Path, config: dict[str, Any], start: Checkpoint | None = None, **how: Any
) -> Session:
    session = Session(folder, start)
    monkeypatch.setattr(ray_tune, "_tune", lambda: session)
    ps.trainable(EXP, **how)(config)
    return session


def lr(run: Path) -> float:
    return json.loads((run / "config.json").read_text())["experiment"]["algo"]["lr"]


def test_a_trial_reports_metrics_and_checkpoints_that_are_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session = trained(monkeypatch, tmp_path, {"algo.lr": 1e-3}, report_interval=128)
    steps = [report["env_steps"] for report in session.reports]
    assert len(steps) == 4
    assert all(k * 128 <= at < k * 128 + 64 for k, at in enumerate(steps, 1))
    assert "eval/mean_reward" in session.reports[-1]
    assert all("train/value_loss" in report for report in session.reports)
    assert len(session.checkpoints) == 4
    assert lr(session.checkpoints[0].path) == 1e-3
    assert ps.load(session.checkpoints[0].path).predict([0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_fewer_checkpoints_than_reports_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session = trained(monkeypatch, tmp_path, {"algo": {"lr": 1e-3}}, report_interval=128, checkpoint_every=3)
    assert len(session.reports) == 4
    assert len(session.checkpoints) == 2
    assert lr(session.checkpoints[-1].path) == 1e-3


def test_a_trial_goes_on_from_anothers_checkpoint_with_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = trained(monkeypatch, tmp_path / "a", {"algo.lr": 1e-3}, report_interval=128)
    start = first.checkpoints[1]
    same = trained(monkeypatch, tmp_path / "b", {"algo.lr": 1e-3}, start, report_interval=128)
    other = trained(monkeypatch, tmp_path / "c", {"algo.lr": 5e-3}, start, report_interval=128)
    assert [r["env_steps"] for r in same.reports] == [r["env_steps"] for r in first.reports[2:]]
    assert other.reports[0]["env_steps"] >= 384
    assert len(other.reports) == 2
    # With the same settings it is the run that never stopped; with others their step size is used.
    assert same.reports[-1]["train/value_loss"] == first.reports[-1]["train/value_loss"]
    assert other.reports[-1]["train/value_loss"] != first.reports[-1]["train/value_loss"]
    assert lr(other.checkpoints[-1].path) == 5e-3
    assert other.reports[-1]["train/learning_rate"] == 5e-3


def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        trained(monkeypatch, tmp_path, {"algo.lrr": 1.0})
    with pytest.raises(ConfigError, match="a directory of its own"):
        ps.trainable(ps.override(EXP, {"run.dir": "x"}))
    with pytest.raises(ConfigError, match="report_interval=0"):
        ps.trainable(EXP, report_interval=0)


def started(which: str, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / "tuned.py"), which, str(folder)]
    log = open(folder / f"{which}.log", "w")  # noqa: SIM115
    return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, text=True)


def found(which: str, folder: Path) -> dict[str, Any]:
    process = started(which, folder)
    try:
        code = process.wait(timeout=900)
    finally:
        process.kill()
    said = (folder / f"{which}.log").read_text()
    assert code == 0, said[-3000:]
    return json.loads(said.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs pip install 'penstock[ray-tune]'"
)
def test_tune_itself_killed_and_restored(tmp_path: Path) -> None:
    process = started("asha", tmp_path)
    deadline = time.monotonic() + 600
    try:
        while not list(tmp_path.glob("search/*/checkpoint_*")):
            assert process.poll() is None, (tmp_path / "asha.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait(timeout=60)
    result = found("restore", tmp_path)
    assert [row["error"] for row in result["rows"]] == [None] * len(result["rows"])
    assert all(row["trained"] and row["stored"] == row["lr"] for row in result["rows"])
    assert max(row["steps"] for row in result["rows"]) >= 1024


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs pip install 'penstock[ray-tune]'"
)
def test_tune_itself_with_pbt(tmp_path: Path) -> None:
    result = found("pbt", tmp_path)
    assert [row["error"] for row in result["rows"]] == [None] * 2
    assert all(row["lr"] > 1e-6 and row["stored"] > 1e-6 for row in result["rows"])  # the bad start was left
    assert all(address.startswith("127.") for address in result["listeners"])
