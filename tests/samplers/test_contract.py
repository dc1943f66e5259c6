"""The suites over samplers with worker processes, in the combinations of settings that test_placement.py leaves out."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.samplers.live import LiveSampler
from penstock.testing.pools import echo_config
from penstock.testing.samplers import EchoAgent, bits, check_resume, check_sampler
from tests.samplers.placed import PLACES
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

CONTRACTS = [
    ("gpu-1", "batch_end", False),
    *slow(("cpu-3", "batch_end", True), ("gpu-2", "next_step", True), ("alternating-2", "batch_end", True),
          ("alternating-3", "next_step", False), ("no-overlap", "batch_end", True)),
]  # fmt: skip


@pytest.mark.parametrize(("place", "reset", "decorrelated"), CONTRACTS)
def test_the_contract(place: str, reset: Any, decorrelated: bool) -> None:
    build = PLACES[place](7, 6, reset=reset, max_decorrelation_steps=9 * decorrelated).build
    check_sampler(build, nested=True, reset=reset, decorrelated=decorrelated, batches=5)


RESUMES = [
    ("alternating-2", "batch_end", False, True),
    *slow(("cpu-2", "batch_end", True, True), ("gpu-2", "batch_end", False, False), ("alternating-3", "next_step", True, True),
          ("no-overlap", "batch_end", True, True)),
]  # fmt: skip


@pytest.mark.parametrize(("place", "reset", "nested", "decorrelated"), RESUMES)
def test_a_resumed_sampler_goes_on_with_the_same_bits(place: str, reset: Any, nested: bool, decorrelated: bool) -> None:
    build = PLACES[place](7, 6, reset=reset, max_decorrelation_steps=9 * decorrelated).build
    check_resume(build, nested=nested, before=1, after=2)


MOVES = [
    ("serial", "cpu-4", "next_step"), ("cpu-2", "serial", "batch_end"), ("serial", "alternating-3", "batch_end"),
    *slow(("alternating-3", "cpu-1", "next_step"), ("no-overlap", "serial", "batch_end"), ("serial", "gpu-2", "batch_end"),
          ("gpu-1", "no-overlap", "next_step")),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "reset"), MOVES)
def test_a_state_goes_on_in_another_sampler(first: str, second: str, reset: str) -> None:
    """Batches, episodes and evaluations, with episodes that began before the first batch; then back again."""
    config = echo_config(nested=reset == "batch_end")
    settings = [PLACES[place](7, 6, reset=reset, max_decorrelation_steps=9) for place in (first, second, first)]
    one, two, three = (each.build(config, 3) for each in settings)
    try:
        for each in (one, two, three):
            each.initialize(EchoAgent(each.spec))
        for itr in range(2):
            one.obtain_samples(itr)
        two.load_state_dict(one.state_dict())
        for itr in range(2, 4):
            assert _outcome(two, itr) == _outcome(one, itr)
        three.load_state_dict(two.state_dict())
        for itr in range(4, 6):
            assert _outcome(three, itr) == _outcome(one, itr)
        assert one.cut_slots == two.cut_slots == three.cut_slots == []
        assert _evaluation(one) == _evaluation(two) == _evaluation(three)
    finally:
        for each in (one, two, three):
            each.shutdown()


def _outcome(sampler: LiveSampler, itr: int) -> Any:
    batch, episodes = sampler.obtain_samples(itr)
    return bits(batch), episodes.return_.tobytes(), episodes.length.tobytes(), episodes.slot.tobytes()


def _evaluation(sampler: LiveSampler) -> Any:
    found = [sampler.evaluate_agent(6, 5, deterministic=deterministic) for deterministic in (True, False)]
    return [(each.return_.tobytes(), each.length.tobytes()) for each in found]


@pytest.mark.parametrize("place", ["cpu-4", "alternating-2", "alternating-3"])
def test_a_slot_keeps_its_bits_in_another_place_among_the_rows(place: str) -> None:
    """torch rounds layers of 2 to 11 outputs differently in each place of four rows where their inputs are no fours."""

    def batches(settings: Any) -> Any:
        sampler = settings.build("CartPole-v1", 3)
        try:
            policy = ps.PPO(net=ps.Net(hidden=(50, 9))).build(sampler.spec, seed=3)
            sampler.initialize(policy.agent)
            return [_outcome(sampler, itr) for itr in range(4)]
        finally:
            sampler.shutdown()

    assert batches(PLACES[place](7, 6)) == batches(PLACES["serial"](7, 6))
