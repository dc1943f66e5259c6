"""The trainable for Ray Tune: by a stand-in for its session, and by Tune itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.distributed import tune
from penstock.distributed.tune import trainable

ROOT = Path(__file__).parent.parent.parent
RUN = ps.RunConfig(steps=512, progress="off", eval_episodes=1, tensorboard=False, log_interval=1)
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
    monkeypatch.setattr(tune, "_tune", lambda: session)
    trainable(EXP, **how)(config)
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
        trainable(ps.override(EXP, {"run.dir": "x"}))
    with pytest.raises(ConfigError, match="report_interval=0"):
        trainable(EXP, report_interval=0)


def script(which: str, folder: Path) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "distributed" / "tuned.py"), which, str(folder)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs pip install 'penstock[ray-tune]'"
)
def test_tune_itself_with_asha_pbt_and_restore(tmp_path: Path) -> None:
    (tmp_path / "asha").mkdir()
    found = script("asha", tmp_path / "asha")
    assert [row["error"] for row in found["rows"]] == [None] * 3
    assert all(row["trained"] and row["stored"] == row["lr"] for row in found["rows"])
    assert max(row["steps"] for row in found["rows"]) >= 1024
    again = script("restore", tmp_path / "asha")
    assert sorted(row["lr"] for row in again["rows"]) == sorted(row["lr"] for row in found["rows"])
    (tmp_path / "pbt").mkdir()
    found = script("pbt", tmp_path / "pbt")
    assert [row["error"] for row in found["rows"]] == [None] * 2
    assert all(row["lr"] > 1e-6 and row["stored"] > 1e-6 for row in found["rows"])  # the bad start was left
    assert all(address.startswith(("127.", "[::1]", "::1")) for address in found["listeners"])
