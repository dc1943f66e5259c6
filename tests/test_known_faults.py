"""Faults that are known and not mended yet, each by its number in the record of what the outside found.

A test that passes fails here (`strict`): then the fault is mended, and the test moves to the part that mended it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.envs.toy import LatePay, TeamBits

PPO = ps.PPO(minibatch=32, epochs=1, net=ps.Net(hidden=(4,)))
TWO = ps.Policies({"a": PPO, "b": PPO}, {"agent_0": "a", "agent_1": "b"})
BITS = "penstock.envs.toy:TeamBits"


def fault(number: str, text: str) -> Any:
    return pytest.mark.xfail(strict=True, reason=f"{number}: {text}")


def run_of(folder: Path, name: str, **run: Any) -> ps.RunConfig:
    return ps.RunConfig(
        dir=str(folder / name), progress="off", tensorboard=False, eval_episodes=0, **{"steps": 32, **run}
    )


CRASHING = """
import os, sys, numpy as np, gymnasium as gym, penstock as ps
from gymnasium import spaces

class Fine(gym.Env):
    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 6, False, {}

class Exits(Fine):
    def step(self, action):
        if os.path.exists("flag"):
            os.remove("flag")
            os._exit(9)
        return super().step(action)

if __name__ == "__main__":
    run = ps.RunConfig(steps=100, dir="run", progress="off", eval_episodes=6, eval_interval=10**6)
    sampler = ps.CpuSampler(T=8, B=4, workers=2, fault_policy="restart")
    algo = ps.PPO(minibatch=32, epochs=1)
    with ps.Run(ps.Experiment("crashing:Fine", algo, sampler, run, eval_env="crashing:Exits")) as live:
        for k, _ in enumerate(live):
            if k >= 2:
                open("flag", "w").close()
    print("evaluated", live.result.metrics["eval/mean_reward"])
"""


@fault("M7", "eval_env runs in the driver, so that a crash there ends the run without a word")
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_crash_of_an_evaluation_environment_is_healed_as_one_of_training_is(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "crashing.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and "evaluated 6.0" in done.stdout


class Seeded(LatePay):
    """Pays by the seed of its episode, and ends its process in its fifth move while a file says so."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.own = seed or 0
        super().reset(seed, options)

    def play(self, agent: str, action: Any) -> None:
        super().play(agent, action)
        self.rewards[agent] = self.rewards.get(agent, 0.0) + (self.own % 1000) / 1000

    def step(self, action: Any) -> None:
        super().step(action)
        flag = os.environ.get("PENSTOCK_TEST_DIES", "")
        if flag and self.t == 5 and os.path.exists(flag):
            os.remove(flag)
            os._exit(9)


@fault("M8", "an evaluation that loses a worker plays other episodes")
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_evaluation_that_loses_a_worker_plays_the_same_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "dies"
    monkeypatch.setenv("PENSTOCK_TEST_DIES", str(flag))
    algo = ps.Policies({"x": PPO})
    returns: list[list[float]] = []
    for kill in (False, True):
        live = ps.CpuSampler(T=8, B=4, workers=2, fault_policy="restart").build(algo.seat(Seeded), seed=0)
        live.initialize(algo.build(live.specs).agents)
        live.obtain_samples(0)
        if kill:
            flag.touch()
        returns.append(sorted(live.evaluate_agent(1, 24).return_.round(4).tolist()))
        live.shutdown()
    assert not flag.exists()
    assert returns[0] == returns[1]


def test_the_environments_above_play() -> None:
    """So that no fault above is one of its own environment."""
    assert ps.check_env(Seeded).agents is not None
    assert np.isfinite(ps.check_env(TeamBits).step_s)
