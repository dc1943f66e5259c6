"""Activity of a runner's environments in its note: what its owner says of one that hangs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import penstock as ps
import penstock.actors.note as note
from penstock.core.noise import env_seed
from penstock.envs.make import EnvConfig
from penstock.envs.pools.factory import pool_for
from penstock.envs.pools.settings import RESETTING, STEPPING, PoolSettings
from penstock.envs.toy import TeamBits
from penstock.samplers.runners.activity import Activity, described, note_evaluation
from tests.samplers.placed import live
from tests.samplers.runners.test_faults import Seeded
from tests.slow import slow

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("env", [Seeded, TeamBits])
def test_the_environment_at_work_is_described_by_slot_step_and_seed(env: Any) -> None:
    words = np.zeros(note.WORDS, np.int64)
    activity = Activity(words)
    episode_table = activity.episode_table(3)
    config: Any = EnvConfig(env) if env is Seeded else ps.Policies({"x": ps.PPO()}).seat(env)
    pool = pool_for(config, 7, slice(3, 6), PoolSettings(activity=activity.activity, episode_table=episode_table))
    assert described(words.tolist(), "Env", 7) == "", "nothing is at work"
    activity.activity[:] = memoryview(np.array([2, STEPPING, 0, 3, 9, 0]))
    episode_table[2, 0], episode_table[2, 2] = 4, 5
    seed = env_seed(7, 5, 4)
    assert described(words.tolist(), "Env", 7) == f"slot 5 of Env in step() at episode 4, step 3, seed {seed}"
    activity.activity[1] = RESETTING
    assert described(words.tolist(), "Env", 7) == f"slot 5 of Env in reset() at episode 4, step 0, seed {seed}"
    activity.activity[1] = 0
    pool.close()
    assert described(words.tolist(), "Env", 7) == ""


def test_evaluations_have_their_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.zeros(note.WORDS, np.int64)
    monkeypatch.setattr(note, "_own", words)
    monkeypatch.setattr(note, "_watched", True)
    note_evaluation(2**41 + 1)
    activity = Activity(words)
    activity.episode_table(2)[:] = 77
    activity.episode_table(2, True)[1, :3] = 3, 0, 10
    activity.activity[:] = memoryview(np.array([1, STEPPING, 0, 0, 12, 1]))
    seed = env_seed(2**41 + 1, 1, 3, True)
    found = described(words.tolist(), "Env", 7)
    assert found == f"evaluation slot 1 of Env in step() at episode 3, step 1, seed {seed}"


def test_an_episode_table_that_has_no_room_is_not_read() -> None:
    words = np.zeros(note.WORDS, np.int64)
    activity = Activity(words)
    large = activity.episode_table(10**5)
    large[...] = 5
    activity.activity[:] = memoryview(np.array([1, STEPPING, 0, 0, 12, 0]))
    assert len(large) == 10**5 and described(words.tolist(), "Env", 7) == ""


class Hangs(Seeded):
    """Slot 1 hangs in its 20th step."""

    def __init__(self, slot: int = 0) -> None:
        super().__init__()
        self.slot, self.steps = slot, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.slot == 1 and self.steps == 20:
            time.sleep(1000)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize("backend", slow("processes", "ray"))
def test_a_hang_names_slot_step_and_seed_and_the_line(backend: Any) -> None:
    if backend == "ray":
        pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
    settings = ps.RunnerSampler(1, ps.SerialSampler(8, 2), backend, deadline_s=3.0, fault_policy="raise")
    sampler, _ = live(settings, Hangs, ps.PPO(epochs=1))
    try:
        with pytest.raises(ps.EnvWorkerError) as raised:
            for itr in range(10):
                sampler.obtain_samples(itr)
    finally:
        sampler.shutdown()
    text = str(raised.value)
    assert "no answer within 3 s" in text and "at work: slot 1 of " in text and "Hangs in step() at episode" in text, (
        text
    )
    assert "test_activity.py" in text and "in step" in text, "its stacks"
