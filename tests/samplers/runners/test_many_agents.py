"""Environments of many agents on runners: the batches of one sampler of all slots, and a runner that is lost."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from tests.samplers.many import agents_of, bits
from tests.samplers.test_many_agents import THREE, echoes

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]


@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_rounds_are_the_batches_of_one_sampler_of_all_slots(kind: str) -> None:
    config = echoes(kind, THREE)
    runners = ps.RunnerSampler(2, ps.SerialSampler(5, 2), backend="processes").build(config, 3)
    alone = ps.SerialSampler(5, 4).build(config, 3)
    try:
        for each in (runners, alone):
            each.initialize(agents_of(each))
        for k in range(8):
            (one, episodes), (other, others) = alone.obtain_samples(k), runners.obtain_samples(k)
            assert bits(one) == bits(other), k
            assert repr(episodes.to_plain()) == repr(others.to_plain())
            if k == 3:
                assert repr(alone.evaluate_agent(k, 5).to_plain()) == repr(runners.evaluate_agent(k, 5).to_plain())
            if k == 5:
                runners.load_state_dict(alone.state_dict())
                alone.load_state_dict(runners.state_dict())
    finally:
        runners.shutdown()
        alone.shutdown()


@pytest.mark.parametrize("kind", ["parallel", "turns"])
@pytest.mark.parametrize("mode", ["rounds", "ready"])
def test_batches_that_wait_are_resumed_with_their_steps(kind: str, mode: Any) -> None:
    settings = ps.RunnerSampler(2, ps.SerialSampler(5, 2), backend="in-process", mode=mode, depth=2)
    whole, resumed = settings.build(echoes(kind, THREE), 3), settings.build(echoes(kind, THREE), 3)
    try:
        for each in (whole, resumed):
            each.initialize(agents_of(each))
        for k in range(4):
            whole.obtain_samples(k)
        resumed.load_state_dict(whole.state_dict())
        assert resumed.cut_slots == []
        for k in range(4, 9):
            (one, episodes), (other, others) = whole.obtain_samples(k), resumed.obtain_samples(k)
            assert one.env_steps == other.env_steps > 0, k
            assert bits(one) == bits(other), k
            assert repr(episodes.to_plain()) == repr(others.to_plain())
    finally:
        whole.shutdown()
        resumed.shutdown()
