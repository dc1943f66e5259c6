"""A place among the workers: what is sent to its process and what it reports, and environments that cannot be sent."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.make import EnvConfig
from penstock.envs.toy.plumbing import SeedEcho
from tests.workers.first_batches import PLACES, first_batches, no_process_is_left, refuse

__all__ = ["no_process_is_left"]
pytestmark = pytest.mark.timeout(300)


def test_an_environment_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    config = EnvConfig(lambda: (lock, __import__("gymnasium").make("CartPole-v1"))[1])
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker process.*lock"):
        ps.CpuSampler(8, 4, 2).build(config)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("what", ["lock", "file"])
def test_what_cannot_be_pickled_is_named_before_a_process_starts(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_start(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse_to_start)
    with (tmp_path / "file").open("w") as file:
        config = EnvConfig(SeedEcho, {"nested": threading.Lock() if what == "lock" else file})
        text = "'_thread.lock'" if what == "lock" else "not opened for reading"
        refuse(kind, config, rf"cannot be sent to a worker process.*({text}).*inside the factory, or use SerialSampler")


@pytest.mark.parametrize("kind", PLACES)
def test_lambdas_closures_and_local_classes_are_sent(kind: str) -> None:
    scale = 3.0

    class Local(gym.RewardWrapper):
        def reward(self, reward: Any) -> float:
            return scale * float(reward)

    config = EnvConfig(lambda size: Local(SeedEcho(nested=size > 1)), {"size": 1}, wrappers=(lambda env: env,))
    there = first_batches(PLACES[kind](T=6, B=5, workers=2), config)
    assert there == first_batches(ps.SerialSampler(T=6, B=5), config)


SCRIPT = """
import hashlib
import numpy as np
import gymnasium as gym
import penstock as ps
from penstock.testing.samplers import EchoAgent, bits

print("begun", flush=True)

class Walk(gym.Env):  # of the script itself, which has no main guard
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=2).astype(np.float32)
        self.t = 0
        return self.at.copy(), {}

    def step(self, action):
        self.at += self.np_random.normal(size=2).astype(np.float32) * float(action)
        self.t += 1
        return self.at.copy(), float(self.at.sum()), False, self.t >= LENGTH, {}

LENGTH = 11
digests = []
for settings in (ps.SerialSampler(8, 5), ps.CpuSampler(8, 5, 2), ps.AlternatingSampler(8, 5, 2)):
    sampler = settings.build(Walk, 3)
    sampler.initialize(EchoAgent(sampler.spec))
    found = [bits(sampler.obtain_samples(itr)[0]) for itr in range(4)]
    digests.append(hashlib.sha256(repr(found).encode()).hexdigest())
    sampler.shutdown()
print(len(set(digests)), "digest", flush=True)
"""


@pytest.mark.parametrize("way", ["script", "stdin"])
def test_a_class_of_a_script_without_a_main_guard(way: str, tmp_path: Path) -> None:
    """`stdin` has no file to import again, as a notebook has none."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    argv, text = ([str(path)], None) if way == "script" else (["-"], SCRIPT)
    done = subprocess.run(
        [sys.executable, *argv], input=text, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["begun", "1 digest"], "the script ran again in a worker, or bits differ"
