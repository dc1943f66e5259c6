"""Evaluations are played in the sampler's place: the same episodes in each, and after whatever died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import penstock as ps
from penstock.envs.toy import LatePay
from penstock.run.trainer import Trainer
from tests.slow import slow

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*(replaced|dropped)")]
PPO = ps.PPO(minibatch=32, epochs=1, net=ps.Net(hidden=(4,)))
FLAG = "PENSTOCK_TEST_DIES"
SERIAL = ps.SerialSampler(T=8, B=2)
SAMPLERS: dict[str, Any] = {
    "serial": ps.SerialSampler(T=8, B=4),
    "cpu": ps.CpuSampler(T=8, B=4, workers=2),
    "gpu": ps.GpuSampler(T=8, B=4, workers=2),
    "alternating": ps.AlternatingSampler(T=8, B=4, workers=2),
    "async-cpu": ps.AsyncCpuSampler(inner=ps.CpuSampler(T=8, B=4, workers=2), depth=0),
    "in-process": ps.RunnerSampler(2, SERIAL, backend="in-process"),
    "processes": ps.RunnerSampler(2, SERIAL, backend="processes"),
    "runners-cpu": ps.RunnerSampler(2, ps.CpuSampler(T=8, B=2, workers=2), backend="processes"),
}


def dies() -> None:
    """Ends a process that is not the test's, once for each time that the flag is set."""
    flag = os.environ.get(FLAG, "")
    try:
        if not flag or str(os.getpid()) == Path(flag).read_text():
            return
        os.remove(flag)
    except FileNotFoundError:  # another one was first
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Level(gym.Env[Any, Any]):
    """Pays by the seed of the episode, times the level; the second level ends its process while the flag is set."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.pay = 0, self.level * ((seed or 0) % 1000 + 1)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.level == 2 and self.t == 4:
            dies()
        return np.zeros(1, np.float32), float(self.pay), self.t == 6, False, {}


class Seeded(LatePay):
    """Pays by the seed of its episode, and ends its process in its fifth move while the flag is set."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.own = seed or 0
        super().reset(seed, options)

    def play(self, agent: str, action: Any) -> None:
        super().play(agent, action)
        self.rewards[agent] = self.rewards.get(agent, 0.0) + (self.own % 1000) / 1000

    def step(self, action: Any) -> None:
        super().step(action)
        if self.t == 5:
            dies()


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not there yet; it names the process that goes on."""
    monkeypatch.setenv(FLAG, str(tmp_path / "dies"))
    return tmp_path / "dies"


def returns(sampler: Any, **given: Any) -> list[float]:
    """Of two evaluations in another environment, by slot and time, with a batch between them."""
    run = ps.RunConfig(steps=1000, progress="off", eval_episodes=7, eval_slots=4)
    flag = given.pop("flag", None)
    exp = ps.Experiment(Level, PPO, sampler, run, eval_env_kwargs={"level": 2}, **given)
    found: list[float] = []
    with Trainer(exp) as trainer:
        for _ in range(2):
            trainer.train()
            if flag is not None:
                flag.write_text(str(os.getpid()))
            _, episodes = trainer.evaluate()
            order = np.argsort(episodes.slot, kind="stable")
            found += episodes.return_[order].tolist()
            assert flag is None or not flag.exists(), "nobody died"
    return found


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return returns(SAMPLERS["serial"])


@pytest.mark.parametrize(
    "name", [*slow("gpu", "alternating", "async-cpu", "processes", "runners-cpu"), "cpu", "in-process"]
)
def test_another_environment_is_evaluated_in_every_place_alike(name: str, expected: list[float]) -> None:
    assert len(set(expected)) == 14 and all(x % 12 == 0 for x in expected)
    assert returns(SAMPLERS[name]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["restart", "drop"])
@pytest.mark.parametrize("name", ["cpu", "gpu", "alternating", "async-cpu", "processes", "runners-cpu"])
def test_the_same_episodes_are_played_after_a_death(name: str, policy: Any, expected: list[float], flag: Path) -> None:
    """Each evaluation loses a worker or runner; of dropped ones the last stays."""
    sampler = SAMPLERS[name]
    if name in ("async-cpu", "runners-cpu"):
        sampler = replace(
            sampler, inner=replace(sampler.inner, fault_policy=policy, workers=3 if policy == "drop" else 2)
        )
        if policy == "drop":
            sampler = replace(sampler, inner=replace(sampler.inner, B=sampler.inner.B + 2))
    elif policy == "drop":
        more = {"runners": 3} if name == "processes" else {"workers": 3, "B": 6}
        sampler = replace(sampler, **more, fault_policy=policy)
    assert returns(sampler, flag=flag) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "alternating", "processes"])
def test_agents_in_turn_play_the_same_episodes_after_a_death(name: str, flag: Path) -> None:
    algo = ps.Policies({"x": PPO})
    found: list[list[float]] = []
    for kill in (False, True):
        live = SAMPLERS[name].build(algo.seat(Seeded), seed=0)
        live.initialize(algo.build(live.specs).agents)
        live.obtain_samples(0)
        if kill:
            flag.write_text(str(os.getpid()))
        found.append(sorted(live.evaluate_agent(1, 24).return_.round(4).tolist()))
        live.shutdown()
    assert not flag.exists()
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "async-cpu", "processes"])
def test_an_id_that_only_this_script_registers_is_evaluated_elsewhere(name: str, expected: list[float]) -> None:
    gym.register("PlacesHeldOut-v0", lambda: Level(2))
    try:
        run = ps.RunConfig(steps=1000, progress="off", eval_episodes=7, eval_slots=4)
        with Trainer(ps.Experiment(Level, PPO, SAMPLERS[name], run, eval_env="PlacesHeldOut-v0")) as trainer:
            assert trainer.plan.env.evaluation is not None
            trainer.train()
            _, found = trainer.evaluate()
    finally:
        del gym.registry["PlacesHeldOut-v0"]
    assert found.return_[np.argsort(found.slot, kind="stable")].tolist() == expected[:7]


def test_a_sampler_that_does_not_know_of_eval_env_leaves_it_to_the_run(expected: list[float]) -> None:
    class Own(ps.SerialSampler):
        hosts_eval_env = False

    run = ps.RunConfig(steps=1000, progress="off", eval_episodes=7, eval_slots=4)
    with Trainer(ps.Experiment(Level, PPO, Own(T=8, B=4), run, eval_env_kwargs={"level": 2})) as trainer:
        assert trainer.plan.env.evaluation is None
        trainer.train()
        _, found = trainer.evaluate()
    assert found.return_[np.argsort(found.slot, kind="stable")].tolist() == expected[:7]


def test_an_environment_of_evaluations_is_named_in_one_place() -> None:
    config = ps.EnvConfig(Level, evaluation=ps.EnvConfig(Level, {"level": 2}))
    with pytest.raises(ps.ConfigError, match=r"env is an EnvConfig with evaluation=.*give that as .* eval_env"):
        ps.Experiment(config, PPO)


class Lethal(Level):
    """The second level ends its process whenever it lives beside training, not in the check before."""

    def step(self, action: Any) -> Any:
        if self.level == 2 and Path(os.environ[FLAG]).exists():
            os._exit(9)
        return super().step(action)


@pytest.mark.slow
def test_an_evaluation_that_breaks_again_and_again_is_an_error(flag: Path) -> None:
    run = ps.RunConfig(steps=64, progress="off", eval_episodes=4)
    exp = ps.Experiment(Lethal, PPO, SAMPLERS["cpu"], run, eval_env_kwargs={"level": 2})
    with Trainer(exp) as trainer:
        trainer.train()
        flag.write_text(str(os.getpid()))
        with pytest.raises(ps.EnvWorkerError, match=r"worker \d was replaced 5 times within 10 minutes"):
            trainer.evaluate()


SCRIPT = """
import penstock as ps
from tests.run.playing.test_evaluation_places import Level, FLAG
import os

if __name__ == "__main__":
    run = ps.RunConfig(steps=100, dir="run", progress="off", eval_episodes=6, eval_interval=10**6, eval_slots=4)
    sampler = ps.CpuSampler(T=8, B=4, workers=2)
    algo = ps.PPO(minibatch=32, epochs=1)
    where = "tests.run.playing.test_evaluation_places:Level"
    with ps.Run(ps.Experiment(where, algo, sampler, run, eval_env_kwargs={"level": 2})) as live:
        for k, _ in enumerate(live):
            if k == 2:
                open(os.environ[FLAG], "w").write("0")
    print("evaluated", live.result.metrics["eval/mean_reward"] > 0)
"""


@pytest.mark.slow
def test_a_run_survives_a_crash_of_its_evaluation_environment(tmp_path: Path, flag: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and "evaluated True" in done.stdout, done.stderr
    assert not flag.exists()
