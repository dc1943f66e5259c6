"""How an experiment becomes a run: how far it is carried, and how often its environment is checked."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import pytest

import penstock as ps
import penstock.workers.env_check as checking
from penstock.run.experiment import Experiment
from penstock.run.plan import Plan
from penstock.run.trainer import Trainer
from tests.params import slow_but

PACKAGE = Path(ps.__file__).parent
RETURNS = 5
"""So often the way of an experiment leads back into a module. It was 11 when each Trainer resolved it by itself."""


class Walk:
    """The modules of the functions that hold an experiment or its plan, one after the other."""

    def __init__(self) -> None:
        self.stays: list[str] = []
        self._calls: list[str | None] = []

    def watch(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self._calls.append(self._room(frame))
            self._stay(self._calls[-1])
        elif event == "return" and self._calls and self._calls.pop() is not None:
            self._stay(next((room for room in reversed(self._calls) if room is not None), None))

    def _room(self, frame: FrameType) -> str | None:
        """The module of a function that is given one; reading its own attributes leads nowhere."""
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        names = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - {"self"}
        held = any(isinstance(frame.f_locals.get(name), (Experiment, Plan)) for name in names)
        return str(file.relative_to(PACKAGE)) if held and PACKAGE in file.parents else None

    def _stay(self, room: str | None) -> None:
        if room is not None and [room] != self.stays[-1:]:
            self.stays.append(room)


def test_an_experiment_is_carried_straight_to_its_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ps.RunConfig(steps=64, dir=str(tmp_path / "run"), progress="off", eval_episodes=0)
    exp = Experiment("CartPole-v1", ps.PPO(epochs=1, minibatch=32), ps.SerialSampler(T=16, B=4), run)
    walk, train, before = Walk(), Trainer.train, sys.getprofile()

    def first(self: Trainer) -> Any:
        sys.setprofile(before)
        return train(self)

    monkeypatch.setattr(Trainer, "train", first)
    sys.setprofile(walk.watch)
    try:
        ps.train(exp)
    finally:
        sys.setprofile(before)
    assert {"run/loop.py", "run/plan.py", "run/trainer.py"} <= set(walk.stays)
    assert len(walk.stays) - len(set(walk.stays)) <= RETURNS, " -> ".join(walk.stays)


STARTS = {
    "serial": ps.SerialSampler(T=4, B=3),
    "auto": "auto",
    "cpu": ps.CpuSampler(T=4, B=3, workers=2),
    "async": ps.AsyncSampler(ps.SerialSampler(T=4, B=3)),
    "in-process": ps.RunnerSampler(3, ps.SerialSampler(T=4, B=1), backend="in-process"),
    "processes": ps.RunnerSampler(3, ps.SerialSampler(T=4, B=1), backend="processes"),
    "ray": ps.RunnerSampler(3, ps.SerialSampler(T=4, B=1), backend="ray", num_cpus=0.5),
    "learners": ps.SerialSampler(T=4, B=3),
}


@pytest.mark.parametrize("start", slow_but("serial in-process", [*STARTS]))
def test_an_environment_is_checked_once_a_start(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check is a process of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_TEST_CHECKS", str(tmp_path / "checks"))
    sampler: Any = STARTS[start]
    learners = 3 if start == "learners" else 1
    run = ps.RunConfig(steps=12, progress="off", eval_episodes=0, learners=learners)
    exp = Experiment("tests.run.test_setting_up:Noted", ps.PPO(epochs=1, minibatch=6), sampler, run)
    with Trainer(exp) as trainer:
        trainer.train()
    assert len(set((tmp_path / "checks").read_text().splitlines())) == 1


def Noted() -> Any:
    """CartPole, which notes the process where a check makes it."""
    if any(frame.name == "check_env" for frame in traceback.extract_stack()):
        with open(os.environ["PENSTOCK_TEST_CHECKS"], "a") as file:
            file.write(f"{os.getpid()}\n")
    return gymnasium.make("CartPole-v1")


def test_a_plan_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.of(Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T=16, B=4)))
    stored = pickle.dumps(plan)
    assert pickle.loads(stored) == plan
    monkeypatch.setattr("penstock.run.plan.VERSION", "9.9")
    with pytest.raises(ps.ConfigError, match=r"made by penstock 0\.2\.0 came to penstock 9\.9; install one version"):
        pickle.loads(stored)


def test_a_plan_whose_environment_has_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.of(Experiment(f"{__name__}:Changing", ps.PPO(), ps.SerialSampler(T=16, B=4)))
    monkeypatch.setattr(Changing, "size", 3)
    with pytest.raises(ps.ConfigError, match=r"agent was built for .*shape=\(2,\).*environment has .*shape=\(3,\)"):
        Trainer(plan)


class Changing(gymnasium.Env[Any, Any]):
    """Its observation is as long as `size` says."""

    size = 2
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (self.size,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(self.size, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(self.size, np.float32), 0.0, True, False, {}


def test_a_plan_is_taken_in_place_of_its_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    exp = Experiment("CartPole-v1", ps.PPO(epochs=1, minibatch=32), ps.SerialSampler(T=16, B=4))
    plan = Plan.of(exp)
    assert Plan.of(plan) is plan

    def refuse(*args: Any) -> Any:
        raise AssertionError("checked again")

    monkeypatch.setattr(checking, "_checked", refuse)
    with Trainer(plan) as trainer, ps.EnvRunnerGroup(plan, 2, "in-process") as group:
        assert trainer.train()["time/iterations"] == 1
        assert group.sample().reward.shape == (16, 8)
