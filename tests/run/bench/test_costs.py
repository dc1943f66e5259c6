from __future__ import annotations

import time
from typing import Any

import pytest

import penstock as ps
from penstock.envs.check import check_env
from penstock.run.bench.costs import Costs, measure_env, measure_forward, measure_handshake
from tests.run.bench.short import ENV

# The parts


pytestmark = pytest.mark.usefixtures("nothing_left_set")


def test_an_environment_that_takes_2_ms_is_measured_so() -> None:
    config = ps.EnvConfig(_slow)
    median, high = measure_env(config, 0, 0.05)
    assert 2_000 <= median <= high


def test_an_environment_of_tensors_is_measured_by_slot() -> None:
    config = ps.EnvConfig("penstock.tensor_envs:CartPole", {"num_envs": 8})
    median, high = measure_env(config, 0, 0.02, 8)
    assert 0 < median <= high


def _slow() -> Any:
    from penstock.envs.toy import Counter

    class Slow(Counter):
        def act(self, action: Any) -> tuple[float, bool, bool]:
            time.sleep(0.002)
            return super().act(action)

    return Slow()


def test_forward_and_handshake_take_some_time() -> None:
    spec = check_env(ENV).spec
    agent = ps.A2C().build(spec).agent
    assert measure_forward(agent, spec, 4, 0.02) > 1
    assert measure_handshake(0.02) > 0.5


def test_forward_between_two_measured_counts_lies_on_a_line() -> None:
    parts = Costs(1, 1, {4: 10.0, 12: 30.0}, 1)
    assert parts.forward(8) == 20.0
    assert parts.forward(5) == 20.0  # padded to 8 rows
    assert parts.forward(1) == 10.0
