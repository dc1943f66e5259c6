"""Errors and warnings of environments as the driver shows them, wherever the environments are."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import EnvWorkerError
from tests.samplers.placed import live
from tests.samplers.runners.test_faults import Seeded

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked")]


class Speechless(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


class Mute(gym.Env[Any, Any]):
    """Raises in the fourth step of an episode an error that cannot be shown."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == 4:
            raise Speechless
        return np.zeros(2, np.float32), 0.0, False, False, {}


SERIAL = ps.SerialSampler(8, 2)


@pytest.mark.parametrize(
    "settings",
    [SERIAL, ps.CpuSampler(8, 2, workers=1), ps.AsyncSampler(SERIAL), ps.RunnerSampler(1, SERIAL, "in-process"),
     ps.RunnerSampler(1, SERIAL, "processes"), ps.RunnerSampler(1, ps.CpuSampler(8, 2, workers=1), "processes")],
    ids=["serial", "cpu", "async", "in-process", "processes", "processes of cpu"],
)  # fmt: skip
def test_an_error_that_cannot_be_shown_keeps_its_place(settings: Any) -> None:
    sampler, _ = live(settings, Mute, ps.PPO(epochs=1))
    try:
        with pytest.raises(EnvWorkerError) as raised:
            sampler.obtain_samples(0)
    finally:
        sampler.shutdown()
    text = str(raised.value)
    assert "slot 0 of " in text and "in step() at episode 0, step 3, seed " in text, text
    assert "Speechless, whose own __str__ raises KeyError" in text
    assert "raise Speechless" in text, "its traceback"


class Hot(Seeded):
    """Warns in each step with another text, from two lines of code."""

    def step(self, action: Any) -> Any:
        warnings.warn(f"the motor has {self.at + self.t} degrees", stacklevel=1)
        if self.t == 3:
            warnings.warn("half of the way", DeprecationWarning, stacklevel=1)
        return super().step(action)


def test_warnings_of_a_line_of_code_are_shown_once_and_then_counted() -> None:
    settings = ps.RunnerSampler(2, ps.SerialSampler(20, 2), "in-process")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler, _ = live(settings, Hot, ps.PPO())
        for itr in range(4):
            sampler.obtain_samples(itr)
        sampler.shutdown()
    texts = [str(w.message) for w in caught if "runner 1" in str(w.message)]
    assert [text for text in texts if "half of" in text] == texts[1:2]
    motor = [text for text in texts if "degrees" in text]
    assert len(motor) == 3, motor
    assert "(number" not in motor[0]
    assert f"(number 10 of UserWarnings from {__file__}:" in motor[1]
    assert "(number 100 of UserWarnings from " in motor[2]
