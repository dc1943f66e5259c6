"""A step and an update during which CUDA refuses every wait, and the waits of a batch where it tells of each."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.noise import NOTHING_HELD, Noise, Purpose
from penstock.learn.train_ops import samples
from penstock.samplers.tensors.noise import rows_on
from penstock.tensor_envs.pool import TensorPool


@pytest.fixture
def device(device: str) -> str:
    if not device.startswith("cuda"):
        pytest.skip("only CUDA tells of waits; tests/learn/test_waits.py counts them on the CPU")
    return device


@contextmanager
def no_waits(mode: str = "error") -> Generator[None, None, None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def begun(device: str) -> tuple[Any, Any]:
    env = ps.EnvConfig("penstock.tensor_envs:CartPole", {"device": device})
    sampler = ps.SerialSampler(T=16, B=64).build(env, 1)
    policy = ps.PPO(epochs=5, minibatch=256).build(sampler.spec, 0, device)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    for itr in range(2):
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    return sampler, policy


def test_a_step_does_not_wait(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, policy = begun(device)
    send, act = TensorPool.send, policy.agent.act

    def watched(call: Any) -> Any:
        def run(*args: Any) -> Any:
            with no_waits():
                return call(*args)

        return run

    monkeypatch.setattr(TensorPool, "send", watched(send))
    monkeypatch.setattr(policy.agent, "act", watched(act), raising=False)
    sampler.obtain_samples(2)
    sampler.shutdown()


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_an_update_does_not_wait(device: str, factor: float) -> None:
    sampler, policy = begun(device)
    data = policy.postprocess(sampler.obtain_samples(2)[0])
    data.rows["advantage"].mul_(factor)
    minibatch = next(iter(ps.minibatches(data, policy.minibatch, policy.shuffler())))
    before = {name: x.clone() for name, x in policy.agent.state_dict().items()}
    updates = policy.updates
    with no_waits():
        policy.learn_on_batch(minibatch)
    policy.settle()
    same = all(torch.equal(x, before[name]) for name, x in policy.agent.state_dict().items())
    assert same is (factor != factor)
    assert (policy.updates, policy.skipped) == ((updates, 1) if same else (updates + 1, 0))
    sampler.shutdown()


@pytest.mark.parametrize("index", ["uniform", "prioritized"])
def test_an_update_from_replay_on_the_device_does_not_wait(device: str, index: Any) -> None:
    """Drawing, reading, post-processing and the gradient step of FastTD3; reading of last observations, too."""
    env = ps.EnvConfig("penstock.tensor_envs:Pendulum", {"device": device, "same_step": True, "max_episode_steps": 5})
    sampler = ps.SerialSampler(T=8, B=64).build(env, 1)
    replay = ps.ReplaySettings(capacity=4_000, index=index, device="learner")
    net = ps.Net(hidden=(32,), activation="relu", normalize_obs=True)
    algo = ps.TD3(
        batch_size=256, replay_ratio=8, learning_starts=256, distributional="c51", n_step=3, replay=replay, net=net
    )
    policy = algo.build(sampler.spec, 0, device)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    for itr in range(6):
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    updates, rng = policy.updates, np.random.default_rng(0)
    with no_waits():
        for _, x in samples(policy, 3, rng):
            x = policy.postprocess(replace(x, rows={**x.rows, "update": policy.updates}))
            policy.learn_on_batch(x)
    policy.settle()
    assert (policy.updates, policy.skipped) == (updates + 3, 0)
    sampler.shutdown()


def told(call: Any) -> tuple[list[str], Any]:
    """The places at which a call waits, and its result."""
    with warnings.catch_warnings(record=True) as caught, no_waits("warn"):
        warnings.simplefilter("always")
        found = call()
    return [f"{x.filename}:{x.lineno}" for x in caught if "synchro" in str(x.message)], found


def test_a_batch_waits_a_few_times(device: str) -> None:
    sampler, policy = begun(device)
    sampling, (batch, _) = told(lambda: sampler.obtain_samples(2))
    training, _ = told(lambda env_steps=batch.env_steps: ps.train_one_step(policy, batch, env_steps))
    assert len(sampling) <= 8, sampling
    assert len(training) <= 6, training
    sampler.shutdown()


def test_noise_repeats_itself_on_the_device(device: str) -> None:
    first, again = (
        rows_on(torch.device(device), Noise(1, Purpose.ACT, 7), 4, 6, 3, False, 0, NOTHING_HELD) for _ in range(2)
    )
    assert torch.equal(first, again) and first.device.type == "cuda"
