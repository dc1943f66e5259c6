from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium as gym
import pytest

import penstock as ps
from penstock.run.log import MetricsLog
from penstock.run.trainer import Trainer
from tests.params import slow_but

PACKAGE = Path(ps.__file__).parent
FRAMES_TO_OPTIMIZER = 4
FRAMES_TO_ENV = 6
FILES_AN_ITERATION = 27
FROM_REPLAY = {"sac", "dqn-per"}
FRAMES_FROM_REPLAY = 5
FILES_FROM_REPLAY = 29
OVER_RUNNERS = {"ppo-runners"}
FRAMES_OVER_RUNNERS = 9
FILES_OVER_RUNNERS = 33
PARTS = {"ppo-normalised-boxes": 1, "ppo-lstm": 1}
"""Optional parts chosen, each a file of its own."""
NET = ps.Net(hidden=(16,), activation="relu")
CASES = {
    "ppo": ("CartPole-v1", ps.PPO(epochs=2, minibatch=32)),
    "a2c": ("CartPole-v1", ps.A2C()),
    "impala": ("CartPole-v1", ps.IMPALA()),
    "appo": ("CartPole-v1", ps.APPO(epochs=2, minibatch=32)),
    "ppo-normalised-boxes": (
        "Pendulum-v1",
        ps.PPO(minibatch=32, net=ps.Net(normalize_obs=True, normalize_reward=True)),
    ),
    "ppo-lstm": ("CartPole-v1", ps.PPO(epochs=2, minibatch=32, net=ps.Net(recurrent="lstm", recurrent_size=8))),
    "ppo-runners": ("CartPole-v1", ps.PPO(epochs=2, minibatch=32)),
    "sac": (
        "Pendulum-v1",
        ps.SAC(batch_size=16, replay_ratio=8, learning_starts=32, net=NET, replay=ps.ReplaySettings(capacity=1_000)),
    ),
    "dqn-per": (
        "CartPole-v1",
        ps.DQN(
            batch_size=16,
            replay_ratio=8,
            learning_starts=32,
            net=NET,
            replay=ps.ReplaySettings(capacity=1_000, index="prioritized"),
        ),
    ),
}


each_case = pytest.mark.parametrize("case", slow_but("ppo impala ppo-lstm ppo-runners sac", [*CASES]))


def live(case: str, **more: Any) -> Trainer:
    env, algo = CASES[case]
    sampler: Any = ps.SerialSampler(T=16, B=4)
    if case in OVER_RUNNERS:
        sampler = ps.RunnerSampler(2, ps.SerialSampler(T=16, B=2), "in-process")
    return Trainer(ps.Experiment(env, algo, sampler, ps.RunConfig(steps=10_000), **more))


def ours(frame: FrameType | None) -> list[str]:
    """Frames of the package from `Trainer.train` to the frame given, as file:function."""
    path: list[str] = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if PACKAGE in file.parents:
            path.append(f"{file.relative_to(PACKAGE)}:{frame.f_code.co_name}")
            if path[-1] == "run/trainer.py:train":
                return path[::-1]
        frame = frame.f_back
    raise AssertionError(f"not called from Trainer.train: {path[::-1]}")


def recorded(inner: Callable[..., Any], paths: list[list[str]]) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        paths.append(ours(sys._getframe(1)))
        return inner(*args, **kwargs)

    return record


@each_case
def test_frames_to_the_optimizer(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[list[str]] = []
    with live(case) as trainer:
        trainer.train()
        for optimizer in trainer.policy.optimizers.values():
            monkeypatch.setattr(optimizer, "step", recorded(optimizer.step, paths))
        trainer.train()
    assert paths
    longest = max(paths, key=len)
    assert len(longest) <= (FRAMES_FROM_REPLAY if case in FROM_REPLAY else FRAMES_TO_OPTIMIZER), "\n".join(longest)


@each_case
def test_frames_to_the_environment(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[list[str]] = []
    counting = False

    class Watched(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            if counting:
                paths.append(ours(sys._getframe(1)))
            return self.env.step(action)

    with live(case, wrappers=(Watched,)) as trainer:
        trainer.train()
        counting = True
        trainer.train()
    assert paths
    longest = max(paths, key=len)
    assert len(longest) <= (FRAMES_OVER_RUNNERS if case in OVER_RUNNERS else FRAMES_TO_ENV), "\n".join(longest)


@each_case
def test_files_that_run_in_a_steady_iteration(case: str, tmp_path: Path) -> None:
    """Sample, train, log: what a reader must open to know all that happens. RLlib: 71 for PPO on CartPole.

    The native kernel's functions stand where torch's and numpy's do, and are not counted either.
    """
    files: dict[str, int] = {}

    def count(frame: FrameType, event: str, arg: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents and PACKAGE / "native" not in file.parents:
            name = str(file.relative_to(PACKAGE))
            files[name] = files.get(name, 0) + 1

    log = MetricsLog(tmp_path)
    with live(case) as trainer:
        for _ in range(3):
            log.write(trainer.env_steps, trainer.train())
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            metrics = trainer.train()
            log.write(trainer.env_steps, metrics)
        finally:
            sys.setprofile(before)
    log.close()
    shown = "\n".join(f"{n:5} calls  {name}" for name, n in sorted(files.items()))
    limit = FILES_FROM_REPLAY if case in FROM_REPLAY else FILES_AN_ITERATION
    limit = FILES_OVER_RUNNERS if case in OVER_RUNNERS else limit + PARTS.get(case, 0)
    assert len(files) <= limit, f"{len(files)} files, at most {limit}:\n{shown}"
