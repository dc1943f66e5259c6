"""Where work is placed changes nothing but speed: every sampler gives the bits of SerialSampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps
from penstock.envs.make import EnvConfig
from penstock.envs.toy import BitFlip
from penstock.testing.samplers import bits, check_resume, check_sampler
from tests.samplers.placed import CASES, PLACES, differences, live, run, serial
from tests.slow import slow

pytestmark = pytest.mark.timeout(300)


QUICK = [("cpu-2", "cartpole"), ("gpu-1", "cnn"), ("alternating-2", "pendulum"), ("async-cpu-0", "gsde")]  # fmt: skip
"""Every agent and every sampler."""
EVERYWHERE = [(place, case) for place in ("cpu-2", "gpu-2", "alternating-2") for case in CASES if (place, case) not in QUICK] + [
    ("async-cpu-0", "lstm"), ("async-serial-0", "pendulum"), ("async-alternating-0", "cnn"),
]  # fmt: skip
"""Every agent in each way to place work."""
MORE = [("cpu-1", "pendulum"), ("cpu-3", "lstm"), ("alternating-3", "lstm"), ("alternating-3", "pendulum"),
        ("no-overlap", "cartpole"), ("no-overlap", "lstm"), ("async-serial-0", "lstm")]  # fmt: skip
"""Other numbers of workers and groups."""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("place", "case"), [*QUICK, *slow(*EVERYWHERE, *MORE)])
def test_twenty_updates_are_equal_bit_for_bit_wherever_work_is_placed(case: str, place: str) -> None:
    compare_with_serial(case, place)


@pytest.mark.parametrize(
    ("place", "case"), [("gpu-2", "pendulum"), *slow(*(x for x in (*QUICK, *EVERYWHERE) if x != ("gpu-2", "pendulum")))]
)
def test_twenty_updates_are_equal_with_workers_that_begin_as_users_do(case: str, place: str) -> None:
    """Whose workers are no forks of this process."""
    compare_with_serial(case, place)


@pytest.fixture
def two_threads() -> Any:
    """Of torch in this process, as `run.learner_threads=2` sets it; workers have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.usefixtures("forked", "two_threads")
@pytest.mark.parametrize("place", ["cpu-2", "gpu-2"])
def test_agents_act_with_one_thread_however_many_the_learner_has(place: str) -> None:
    """Logits of 18 choices for 4 rows are a product that MKL divides among threads."""
    case = EnvConfig(BitFlip, {"n": 18}), ps.PPO(epochs=1, minibatch=64)
    assert not differences(run(PLACES[place](16, 4), *case, 2)[0], run(ps.SerialSampler(16, 4), *case, 2)[0])


def compare_with_serial(case: str, place: str) -> None:
    updates = 20 if case not in ("cnn", "gsde") else 4
    batches, parameters = serial(case, 16, 7, updates)
    there, parameters_there = run(PLACES[place](16, 7), *CASES[case], updates)
    assert differences(batches, there) == []
    assert parameters == parameters_there


SHARES = [("cpu", 5, 1), ("cpu", 13, 4), ("gpu", 3, 1), ("gpu", 13, 4), ("alternating", 5, 1), ("alternating", 10, 2),
          ("alternating", 13, 4)]  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("place", "B", "workers"), SHARES)
def test_uneven_shares_change_nothing(place: str, B: int, workers: int) -> None:
    kinds = {"cpu": ps.CpuSampler, "gpu": ps.GpuSampler, "alternating": ps.AlternatingSampler}
    batches, parameters = serial("pendulum", 12, B, 3)
    there, parameters_there = run(kinds[place](12, B, workers), *CASES["pendulum"], 3)
    assert differences(batches, there) == []
    assert parameters == parameters_there


RESETS = [("gpu-2", "next_step"), ("alternating-3", "batch_end"), *slow(
    ("cpu-2", "next_step"), ("cpu-2", "batch_end"), ("alternating-3", "next_step"), ("no-overlap", "batch_end"),
    ("async-cpu-0", "batch_end"))]  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("place", "reset"), RESETS)
def test_reset_modes_decorrelation_and_evaluations_change_nothing(place: str, reset: str) -> None:
    kwargs = {"reset": reset, "max_decorrelation_steps": 30}
    batches, parameters = serial("lstm", 9, 7, 6, True, **kwargs)
    there, parameters_there = run(PLACES[place](9, 7, **kwargs), *CASES["lstm"], 6, True)
    assert differences(batches, there) == []
    assert parameters == parameters_there
    quiet, quiet_parameters = serial("lstm", 9, 7, 6, **kwargs)
    assert differences([x for x in there if isinstance(x[0], dict)], quiet) == []
    assert quiet_parameters == parameters


CONTRACTS = [
    ("gpu-2", "batch_end", False), ("async-serial-0", "next_step", True),
    *slow(("cpu-2", "next_step", False), ("alternating-3", "batch_end", False), ("no-overlap", "next_step", False),
          ("async-alternating-0", "batch_end", False)),
]  # fmt: skip
"""The rest is in test_contract.py."""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("place", "reset", "decorrelated"), CONTRACTS)
def test_the_contract(place: str, reset: Any, decorrelated: bool) -> None:
    settings = PLACES[place](7, 6, reset=reset, max_decorrelation_steps=9 * decorrelated)
    consecutive = "async" in place  # works ahead, so it begins where it is told and goes on
    check_sampler(
        settings.build, nested=place == "cpu-2", reset=reset, decorrelated=decorrelated, batches=6 + consecutive
    )


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", ["no-overlap", *slow("alternating-2", "async-cpu-0")])
def test_resumes_exactly(place: str) -> None:
    check_resume(PLACES[place](7, 6).build, before=1, after=2)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("first", "second"), [("serial", "alternating-2"), ("gpu-1", "cpu-2")])
def test_resumes_exactly_in_another_sampler(first: str, second: str) -> None:
    env, algo = CASES["lstm"]
    one, _ = live(PLACES[first](8, 7), env, algo)
    two, _ = live(PLACES[second](8, 7), env, algo)
    try:
        for itr in range(3):
            one.obtain_samples(itr)
        two.load_state_dict(one.state_dict())
        assert two.cut_slots == []
        for itr in range(3, 6):
            assert bits(one.obtain_samples(itr)[0]) == bits(two.obtain_samples(itr)[0])
    finally:
        one.shutdown()
        two.shutdown()
