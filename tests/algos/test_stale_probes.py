"""IMPALA and APPO on tasks whose exact answer is known, from actions of another policy, and with memory."""

from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from penstock.agents.networks import Net
from penstock.algos.a2c import A2C
from penstock.algos.appo import APPO
from penstock.algos.impala import IMPALA
from penstock.envs import toy
from penstock.learn.policy import Policy
from penstock.learn.rows.postprocess import as_tensors
from penstock.learn.train_ops import train_one_step
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from tests.params import slow_but

NET = Net(hidden=(32,))
SHARED: Any = {"lr": "linear(1e-2, 0)", "discount": 0.9, "max_grad_norm": 10.0, "net": NET}
FAST_A2C = A2C(entropy_coef=0.0, optimizer="adam", **SHARED)
FAST_IMPALA = IMPALA(entropy_coef=0.0, **SHARED)
FAST_APPO = APPO(epochs=8, minibatch=64, target_interval=2, **SHARED)
EACH = {"impala": FAST_IMPALA, "appo": FAST_APPO}
each = pytest.mark.parametrize("algo", EACH.values(), ids=EACH)
impala_first = pytest.mark.parametrize("algo", slow_but("impala", EACH))


def from_another(env: Any, algo: Any, batches: int) -> tuple[Policy, LiveSampler]:
    """A policy that learned from what an untrained one did, and never acted itself."""
    sampler = SerialSampler(T=16, B=16).build(env, 0)
    actor, policy = algo.build(sampler.spec, 0), algo.build(sampler.spec, 1)
    sampler.initialize(actor.agent)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy, sampler


def values(policy: Policy, sampler: LiveSampler) -> tuple[np.ndarray, np.ndarray]:
    """Observations and values of a further batch's valid rows."""
    batch = as_tensors(sampler.obtain_samples(10_000)[0], torch.device("cpu"))
    return batch.obs[:-1][batch.valid].numpy(), policy.agent.values(batch)[:-1][batch.valid].numpy()


@impala_first
def test_values_are_those_of_the_policy_that_learns_and_not_of_the_one_that_acts(algo: Any):
    """One arm pays 1, the other -1: what the uniform actor does is worth 0, what the learner would do 1."""
    policy, sampler = from_another(toy.Bandit, algo, 100 if algo is FAST_IMPALA else 20)
    assert policy.predict(np.zeros((1000, 1), np.float32), deterministic=False).mean() > 0.95
    assert np.abs(values(policy, sampler)[1] - 1).max() < 0.1


@pytest.mark.slow
def test_without_v_trace_they_are_those_of_the_one_that_acts():
    policy, sampler = from_another(toy.Bandit, FAST_A2C, 100)
    assert np.abs(values(policy, sampler)[1]).max() < 0.2


@pytest.mark.parametrize("algo", slow_but("appo", EACH))
def test_a_state_is_matched_by_one_who_only_watched(algo: Any):
    policy, sampler = from_another(toy.Match, algo, 150 if algo is FAST_IMPALA else 25)
    obs, value = values(policy, sampler)
    assert np.abs(value - 1).max() < 0.1
    actions = policy.predict(obs, deterministic=False)
    assert ((actions == 1) == (obs[:, 0] > 0)).mean() > 0.95


@impala_first
def test_batches_three_versions_old_lead_to_the_same_answer(algo: Any):
    batches, T = (200, 8) if algo is FAST_IMPALA else (30, 16)
    sampler = SerialSampler(T=T, B=16).build(toy.Match, 0)
    policy = algo.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    waiting: deque[Any] = deque()
    lags: set[int] = set()
    for itr in range(batches):
        policy.set_progress(itr / batches)
        waiting.append(sampler.obtain_samples(policy.version, policy.version)[0].copy())
        if len(waiting) > 3:
            lags.add(policy.version - int(waiting[0].version.max()))
            train_one_step(policy, waiting.popleft())
        else:
            policy.version += 1
    assert lags == {3}
    assert np.abs(values(policy, sampler)[1] - 1).max() < 0.1


@pytest.mark.slow
@each
def test_what_was_shown_before_is_repeated(algo: Any):
    net = Net(hidden=(32,), recurrent="lstm", recurrent_size=32)
    env, best = partial(toy.RepeatPrevious, 1, 3), 15
    updates_once = algo is FAST_IMPALA
    changes: Any = {"discount": 0.5, "net": net} | ({} if updates_once else {"minibatch": 256})
    algo = type(algo)(**{**SHARED, "entropy_coef": 0.0, **changes})
    batches = 150 if updates_once else 20
    sampler = SerialSampler(T=32, B=32 if not updates_once else 16).build(env, 0)
    policy = algo.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(0, 100).mean_return > 0.95 * best
