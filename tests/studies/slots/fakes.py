"""A command that stands for `penstock train`, and sweeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.machine import Machine, read_machine
from penstock.core.spec import specs_to_plain
from penstock.envs.check import check_env
from penstock.studies.space import SEED
from penstock.studies.study import Study, make_study
from penstock.studies.trial import Run
from penstock.studies.tune import sweep_settings

ROOT = Path(__file__).parent.parent.parent.parent
FAKE = """
import json, os, pathlib, signal, sys, time
command, *rest = sys.argv[1:]
run = pathlib.Path(rest[0] if command == "resume" else rest[rest.index("--run.dir") + 1])
print("cpus", sorted(os.sched_getaffinity(0)), "cuda", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
print("trusts", os.environ.get("PENSTOCK_TRUST"), flush=True)
assert command == "resume" or not run.exists() or not any(run.iterdir()), "not empty"
run.mkdir(parents=True, exist_ok=True)
(run / "pid").write_text(str(os.getpid()))
what = run.name.split("=")[1].split("_")[0] if "=" in run.name else "ok"
def save(*_):
    (run / "checkpoints" / "000000000007").mkdir(parents=True)
    raise SystemExit(143)
if what != "deaf":
    signal.signal(signal.SIGTERM, save)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run / "metrics.jsonl").write_text(json.dumps({"step": 5, "rollout/ep_rew_mean": 2.5, "eval/mean_reward": 4.5}) + "\\n")
if what == "bad" or (what == "once" and not (run.parent / "again").exists()):
    if what == "once":
        (run.parent / "again").touch()
    print("the licence has expired", file=sys.stderr)
    raise SystemExit(3)
if what == "dead":
    os.kill(os.getpid(), signal.SIGKILL)
if what in ("slow", "deaf") and command == "train":
    time.sleep(1000)
"""
"""Stands for `penstock train` and `resume`: what it does is the value in its name."""


def stand_in(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this text be `penstock.__main__` in every process that is started from now on, in the folder."""
    inside = folder / "stand-in"
    inside.mkdir()
    (inside / "__main__.py").write_text(text)
    (folder / "sitecustomize.py").write_text(f"import penstock\npenstock.__path__.insert(0, {str(inside)!r})\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))  # the working folder is not searched
    # A text of the same size written within the same second would be taken for the compiled one.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


class Seen:
    """A display that remembers."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.most = 0

    def started(self, run: Run, slot: int) -> None:
        self.events.append(f"{run.name} in {slot}")

    def ended(self, run: Run) -> None:
        self.events.append(f"{run.name} {run.status}")

    def note(self, text: str) -> None:
        self.events.append(text)

    def refresh(self, running: Mapping[str, float]) -> None:
        self.most = max(self.most, len(running))


def queue_of(folder: Path, *values: str, seeds: tuple[int, ...] = (0,)) -> Study:
    """A sweep over these values, all of which are one experiment to penstock."""
    exp = ps.Experiment(
        "CartPole-v1", ps.A2C(), ps.SerialSampler(T=16, B=4), ps.RunConfig(steps=900, progress="plain", eval_episodes=1)
    )
    spec = specs_to_plain(check_env(exp.env_config, seed=0).spec)
    exps = [replace(exp, run=replace(exp.run, seed=seed)) for _ in values or "_" for seed in seeds]
    space = {**({"algo.what": values} if values else {}), SEED: seeds}
    return make_study(folder, [(one, spec) for one in exps], sweep_settings(exps, space), retries=0)


def runs_of(study: Study) -> list[Run]:
    return [trial.run for trial in study.search.trials]


def machines(n: int) -> list[Machine]:
    cpus = read_machine().cpus
    return [Machine(((cpus[k % len(cpus)],),), (0,)) for k in range(n)]


def statuses(study: Study) -> dict[str, str]:
    return {run.name: run.status for run in runs_of(study)}
