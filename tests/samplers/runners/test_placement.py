"""Runners give the bits of SerialSampler, whatever their number, their inner sampler and the place where they live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.samplers.runners.settings import RunnerSampler
from penstock.testing.samplers import bits, check_resume, check_sampler
from tests.samplers.placed import CASES, differences, live, run, serial
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

INNER: dict[str, Callable[..., Any]] = {
    "serial": ps.SerialSampler,
    "cpu": lambda T, B, **kwargs: ps.CpuSampler(T, B, workers=2, **kwargs),
    "alternating": lambda T, B, **kwargs: ps.AlternatingSampler(T, B, workers=2, **kwargs),
}


def runners(n: int, inner: str, T: int, B: int, backend: Any = "in-process", depth: int = 0, **kwargs: Any) -> Any:
    return RunnerSampler(runners=n, inner=INNER[inner](T, B // n, **kwargs), backend=backend, depth=depth)


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("n", [2, *slow(1, 3)])
def test_updates_are_equal_bit_for_bit(n: int, case: str) -> None:
    updates = 8 if case not in ("cnn", "gsde") else 3
    batches, parameters = serial(case, 9, 6, updates)
    there, parameters_there = run(runners(n, "serial", 9, 6), *CASES[case], updates)
    assert differences(batches, there) == []
    assert parameters == parameters_there


@pytest.mark.parametrize("inner", ["alternating", *slow("cpu")])
@pytest.mark.parametrize("reset", ["next_step", *slow("batch_end")])
def test_resets_decorrelation_and_evaluations_are_equal(inner: str, reset: str) -> None:
    kwargs = {"reset": reset, "max_decorrelation_steps": 30}
    batches, parameters = serial("lstm", 9, 6, 5, True, **kwargs)
    there, parameters_there = run(runners(2, inner, 9, 6, **kwargs), *CASES["lstm"], 5, True)
    assert differences(batches, there) == []
    assert parameters == parameters_there


def parametrised(spec: Any, settings: Any) -> Any:
    agent = ps.actor_critic(spec, settings)
    torch.nn.utils.parametrizations.spectral_norm(agent.actor.mlp.layers[0]).eval()
    return agent


@pytest.mark.parametrize("backend", ["in-process", "processes"])
def test_updates_of_an_agent_with_a_parametrised_layer_are_equal(backend: str) -> None:
    algo = ps.PPO(epochs=1, minibatch=64, agent=parametrised)
    batches, parameters = run(ps.SerialSampler(9, 6), "CartPole-v1", algo, 3)
    there, parameters_there = run(runners(2, "serial", 9, 6, backend), "CartPole-v1", algo, 3)
    assert differences(batches, there) == []
    assert parameters == parameters_there


@pytest.mark.parametrize("depth", [1, *slow(2)])
def test_rounds_ahead_are_those_of_an_async_sampler(depth: int) -> None:
    batches, parameters = run(ps.AsyncSampler(ps.SerialSampler(9, 6), depth=depth), *CASES["lstm"], 6, True)
    there, parameters_there = run(runners(2, "serial", 9, 6, depth=depth), *CASES["lstm"], 6, True)
    assert differences(batches, there) == []
    assert parameters == parameters_there


@pytest.mark.parametrize(("reset", "decorrelated"), slow(("batch_end", False), ("next_step", True)))
def test_the_contract(reset: Any, decorrelated: bool) -> None:
    settings = runners(3, "serial", 7, 6, reset=reset, max_decorrelation_steps=9 * decorrelated)
    check_sampler(settings.build, nested=True, reset=reset, decorrelated=decorrelated, batches=5)


@pytest.mark.parametrize("depth", [0, 2])
def test_resumes_exactly(depth: int) -> None:
    check_resume(runners(2, "serial", 7, 6, depth=depth).build, before=2, after=3)


PLACES: dict[str, Callable[[int], Any]] = {
    "serial": lambda depth: ps.SerialSampler(8, 6),
    "async": lambda depth: ps.AsyncSampler(ps.SerialSampler(8, 6), depth=depth),
    "2": lambda depth: runners(2, "serial", 8, 6, depth=depth),
    "3 of cpu": lambda depth: runners(3, "cpu", 8, 6, depth=depth),
}


@pytest.mark.parametrize(
    ("first", "second", "depth"),
    [("2", "serial", 0), ("async", "2", 1), ("2", "async", 1),
     *slow(("serial", "3 of cpu", 0), ("2", "3 of cpu", 0), ("2", "3 of cpu", 1))],
)  # fmt: skip
def test_goes_on_under_another_number_of_runners_or_none(first: str, second: str, depth: int) -> None:
    env, algo = CASES["lstm"]
    one, _ = live(PLACES[first](depth), env, algo)
    two, _ = live(PLACES[second](depth), env, algo)
    try:
        for itr in range(3):
            one.obtain_samples(itr)
        two.load_state_dict(one.state_dict())
        assert two.cut_slots == []
        for itr in range(3, 7):
            assert bits(one.obtain_samples(itr)[0]) == bits(two.obtain_samples(itr)[0])
    finally:
        one.shutdown()
        two.shutdown()


def test_native_batched_environments_evaluate_with_the_slots_that_they_have() -> None:
    def vector() -> Any:
        return gym.make_vec("CartPole-v1", 2, "sync", vector_kwargs={"autoreset_mode": "NextStep"})

    sampler, _ = live(RunnerSampler(2, ps.SerialSampler(8, 2), "in-process"), vector, ps.PPO())
    try:
        for itr in range(2):
            assert sampler.obtain_samples(itr)[0].valid.any()
        episodes = sampler.evaluate_agent(0, 8)
        assert np.bincount(episodes.slot).tolist() == [2, 2, 2, 2]
    finally:
        sampler.shutdown()


def test_going_on_from_a_state_takes_the_weights_of_now_whatever_their_version() -> None:
    env, algo = CASES["cartpole"]
    one, policy = live(runners(2, "serial", 8, 6), env, algo)
    two, same = live(ps.SerialSampler(8, 6), env, algo)
    try:
        for sampler in (one, two):
            sampler.obtain_samples(0)
            sampler.obtain_samples(1)
            state = sampler.state_dict()
            sampler.obtain_samples(2)
            for x in (policy if sampler is one else same).agent.parameters():
                x.data.mul_(-3.0)
            sampler.load_state_dict(state)
        assert bits(one.obtain_samples(2)[0]) == bits(two.obtain_samples(2)[0])
    finally:
        one.shutdown()
        two.shutdown()
