"""Asynchronous training from replay: the ratio is exact whichever side is slow, and every row is sampled, kept and counted once."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import penstock as ps
from penstock.run.trainer import Trainer
from tests.params import slow_but

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

T, B, BATCHES, STARTS, BATCH = 4, 2, 60, 20, 8
REPLAY = ps.ReplaySettings(capacity=2_000)
SETTINGS: dict[str, Any] = {"learning_starts": STARTS, "batch_size": BATCH, "net": ps.Net(hidden=(8,))}
DQN = ps.DQN(**SETTINGS, replay_ratio=5.0, replay=REPLAY)
PRIORITIZED = ps.DQN(**SETTINGS, replay_ratio=5.0, replay=ps.ReplaySettings(capacity=2_000, index="prioritized"))
SAC = ps.SAC(**SETTINGS, replay_ratio=3.0, replay=REPLAY)


@dataclass(frozen=True)
class Counted:
    """Makes environments that observe the number of their calls, and tell it in a file of their own as they go."""

    folder: str
    continuous: bool
    step_s: float = 0.0

    def __call__(self) -> gym.Env[Any, Any]:
        return _Counted(self)


class _Counted(gym.Env[Any, Any]):
    def __init__(self, settings: Counted) -> None:
        self.observation_space = spaces.Box(0.0, 1e6, (1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32) if settings.continuous else spaces.Discrete(2)
        self._settings, self._calls, self._left = settings, -1, 0
        path = Path(settings.folder) / f"{os.getpid()}-{id(self)}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, 9))
        return self._call(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self._settings.step_s)
        self._left -= 1
        return self._call(), 1.0, self._left == 0, False, {}

    def close(self) -> None:
        os.close(self._file)

    def _call(self) -> Any:
        self._calls += 1
        os.pwrite(self._file, (self._calls + 1).to_bytes(8, "little"), 0)
        return np.array([self._calls], np.float32)


def calls(folder: Path) -> list[int]:
    """Of the training environments, none of which lives in this process."""
    theirs = [path for path in folder.iterdir() if not path.name.startswith(f"{os.getpid()}-")]
    return sorted(int.from_bytes(path.read_bytes(), "little") for path in theirs)[-B:]


CASES = {
    "the learner is slower": (DQN, ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1, weights="newest"), 1e-3, 0.0),
    "the environment is slower": (SAC, ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1, weights="newest"), 0.0, 2e-3),
    "workers, two batches ahead": (PRIORITIZED, ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2), depth=2, weights="newest"), 0.0, 0.0),
}  # fmt: skip
"""Settings, sampler, and seconds that an update and a step take longer."""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("case", slow_but(["workers, two batches ahead"], [*CASES]))
def test_the_ratio_holds_on_both_sides_and_no_row_is_lost(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algo, sampler, update_s, step_s = CASES[case]
    env = Counted(str(tmp_path), algo is SAC, step_s)
    exp = ps.Experiment(env, algo, sampler, ps.RunConfig(steps=10**6, seed=1), env_checks="off")
    with Trainer(exp) as trainer:
        own: Any = trainer.policy.replay_schedule
        update = trainer.policy.learn_on_batch
        monkeypatch.setattr(trainer.policy, "learn_on_batch", lambda x: (time.sleep(update_s), update(x))[1])
        for k in range(BATCHES):
            metrics = trainer.train()
            # The learner has taken every update that is due: it waits for rows, not the other way round.
            assert own.trained == max(0, own.collected - STARTS) * algo.replay_ratio // BATCH
            # The sampler has begun no batch before it was asked to: it waits for updates.
            assert max(calls(tmp_path)) <= (k + 1 + sampler.depth) * T + 1
            assert 0 <= metrics["sampler/lag_min"] <= metrics["sampler/lag_max"] <= sampler.depth
            if own.trained:
                assert metrics["replay/ratio"] == own.trained * BATCH / (own.collected - STARTS)
        sampled = sum(calls(tmp_path))
        assert sampled >= B * BATCHES * T
        storage = own.replay.storage
        rows = np.arange(storage.head + 1)
        assert storage.head == BATCHES * T
        for b in range(B):  # an observation is the number of its call: all of them, each once, in order
            assert storage.obs(storage.places(rows, np.full(len(rows), b))).ravel().tolist() == rows.tolist()
            assert storage.first(storage.places(rows[:1], np.full(1, b)))[0]
        valid = sum(int(storage.valid(storage.places(rows[:-1], np.full(len(rows) - 1, b))).sum()) for b in range(B))
        assert valid == own.collected == own.replay.appended == trainer.env_steps
        assert abs(own.trained * BATCH / (own.collected - STARTS) / algo.replay_ratio - 1.0) < 0.02
