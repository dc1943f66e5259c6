"""`check_apart`: an environment that ends or hangs its process is an error, and nothing is left."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.toy.faults import FaultEnv
from penstock.envs.toy.plumbing import SeedEcho
from penstock.workers import env_check
from penstock.workers.env_check import check_apart
from tests.slow import slow
from tests.workers.first_batches import no_process_is_left

__all__ = ["no_process_is_left"]
pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("apart", "forked", "no_process_is_left")]

QUICK, LONG = (ps.CpuSampler(step_timeout_s=limit_s, start_timeout_s=limit_s) for limit_s in (1.0, 100.0))


class Misbehaves(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, way: str, where: str, render_mode: str | None = None) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.way, self.where = way, where
        self.act("construction")

    def act(self, place: str) -> None:
        if place == self.where:
            if self.way == "hang":
                time.sleep(1000)
            if self.way == "raise":
                raise ValueError("the arm fell off")
            if self.way == "exit":
                sys.exit(0)
            if self.way == "crash":
                ctypes.string_at(0)
            os._exit(0)

    def reset(self, **kwargs: Any) -> Any:
        self.act("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.act("step")
        return super().step(action)

    def render(self) -> Any:
        self.act("render")
        return np.zeros((8, 8, 3), np.uint8)

    def close(self) -> None:
        self.act("close")
        super().close()


SEEN = {"os_exit": "exit code 0", "crash": r"signal 11 \(SIGSEGV\)", "hang": "no progress for 1 s"}
PLACES = {"construction": "its construction", "reset": r"reset\(\) with seed \d+",
          "step": r"step\(\) at step 0 of the episode with seed \d+; last action [01]", "render": r"render\(\)",
          "close": r"close\(\)"}  # fmt: skip


CASES = [("os_exit", where) for where in PLACES]
CASES += slow(
    *(("crash", where) for where in PLACES), *(("hang", where) for where in ("construction", "step", "close"))
)


@pytest.mark.parametrize(("way", "where"), CASES)
def test_a_death_or_hang_is_an_error_that_names_the_call(way: str, where: str) -> None:
    seen = "not started within 1 s" if way == "hang" and where != "step" else SEEN[way]
    config = EnvConfig(Misbehaves, {"way": way, "where": where, "render_mode": "rgb_array"})
    match = rf"(?s)check of .*Misbehaves.* in {PLACES[where]}: .*{seen}"
    with pytest.raises(EnvWorkerError, match=match) as caught:
        check_apart(config, 0, QUICK if way == "hang" else LONG)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("where", ["construction", "reset", "step"])
@pytest.mark.parametrize("way", ["raise", "exit"])
def test_an_exception_is_an_error_with_its_traceback(way: str, where: str) -> None:
    config = EnvConfig(Misbehaves, {"way": way, "where": where})
    seen = "ValueError: the arm fell off" if way == "raise" else "SystemExit: 0"
    with pytest.raises(EnvWorkerError, match=rf"(?s){seen}.*Traceback.*in act"):
        check_apart(config, 0, LONG)


def test_an_error_in_close_is_a_warning_said_here() -> None:
    config = EnvConfig(Misbehaves, {"way": "raise", "where": "close"})
    with pytest.warns(
        UserWarning, match=r"Misbehaves in close\(\): ValueError: the arm fell off; it is let go"
    ) as seen:
        assert check_apart(config, 0, LONG).reproducible
    assert len(seen) == 1


def test_the_report_and_the_errors_are_those_of_check_env() -> None:
    assert check_apart(SeedEcho, 3).spec == check_env(SeedEcho, seed=3).spec
    report = check_apart(EnvConfig(FaultEnv, {"fault": "unseeded"}))
    assert not report.reproducible
    assert report.steps == 30
    for config in (EnvConfig(FaultEnv, {"fault": "wrong_shape"}), EnvConfig("NoSuch-v0")):
        with pytest.raises((EnvContractError, ConfigError)) as here:
            check_env(config)
        with pytest.raises(type(here.value)) as there:
            check_apart(config)
        assert str(there.value) == str(here.value)


def test_the_environment_is_never_made_here(tmp_path: Path) -> None:
    def make() -> gym.Env[Any, Any]:
        (tmp_path / str(os.getpid())).touch()
        return gym.make("CartPole-v1")

    check_apart(make)
    assert [path.name for path in tmp_path.iterdir()] != [str(os.getpid())]
    assert len(list(tmp_path.iterdir())) == 1


def test_an_id_that_only_this_process_has_registered_is_known_there() -> None:
    gym.register("OnlyHere-v0", entry_point=lambda: SeedEcho())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert check_apart("OnlyHere-v0").steps == 30
    finally:
        del gym.registry["OnlyHere-v0"]


def test_a_factory_that_cannot_travel_is_checked_here_with_a_warning() -> None:
    lock = threading.Lock()
    with pytest.warns(UserWarning, match=r"checked in this process, which a crash .*cannot be sent .*lock"):
        assert check_apart(lambda: (lock, gym.make("CartPole-v1"))[1]).steps == 30


def test_so_is_one_that_another_process_cannot_load() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return _only_in, (os.getpid(),)

    odd = Odd()
    with pytest.warns(UserWarning, match=r"another process cannot load it \(ValueError: made elsewhere\)"):
        check_apart(lambda: (odd, gym.make("CartPole-v1"))[1])


def _only_in(pid: int) -> None:
    raise ValueError("made elsewhere")


def test_so_is_everything_where_there_are_no_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a remark at each start would be of no use: the run steps it here as well
        assert check_apart("CartPole-v1").steps == 30


def test_limits_are_those_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def workers(count: int, seed: int, faults: Any, step_s: float, start_s: float, **given: Any) -> Any:
        raise Asked(step_s, start_s)

    monkeypatch.setattr(env_check, "Workers", workers)
    limits = {
        ps.CpuSampler(step_timeout_s=7.0, start_timeout_s=8.0): (7.0, 8.0),
        ps.SerialSampler(start_timeout_s=9.0): (9.0, 9.0),
        None: (60.0, 300.0),
    }
    for settings, expected in limits.items():
        with pytest.raises(Asked) as asked:
            check_apart("CartPole-v1", 0, settings)
        assert asked.value.args == expected


def test_training_with_any_sampler_checks_apart(tmp_path: Path) -> None:
    for sampler in (ps.SerialSampler(T=4, B=2), ps.CpuSampler(T=4, B=2, workers=1)):
        exp = ps.Experiment(
            EnvConfig(Misbehaves, {"way": "os_exit", "where": "construction"}),
            ps.PPO(),
            sampler,
            ps.RunConfig(steps=8, dir=str(tmp_path / "run"), progress="off"),
        )
        with pytest.raises(EnvWorkerError, match="its construction: ended with exit code 0"):
            ps.train(exp)
        assert not (tmp_path / "run").exists()
