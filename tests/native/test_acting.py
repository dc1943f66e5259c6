"""Acting in one call of the kernel: the bits of the agent's own `act`, and which agents and arrays it is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.agents.agent import Agent
from penstock.core.batch import Inputs
from penstock.native.acting import Acting
from penstock.native import library

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("by_kernel")]
CASES: dict[str, tuple[Any, str]] = {
    "categorical": (ps.PPO(), "CartPole-v1"),
    "relu, no hidden layer": (ps.PPO(net=ps.Net(hidden=(), activation="relu")), "CartPole-v1"),
    "normalised": (ps.PPO(net=ps.Net(normalize_obs=True, hidden=(7, 33), activation="relu")), "Acrobot-v1"),
    "gaussian": (ps.A2C(), "Pendulum-v1"),
    "squashed": (ps.PPO(net=ps.Net(squash=True)), "MountainCarContinuous-v0"),
    "sac": (ps.SAC(net=ps.Net(hidden=(40, 30))), "Pendulum-v1"),
    "td3": (ps.TD3(), "MountainCarContinuous-v0"),
    "dqn": (ps.DQN(epsilon=0.3), "CartPole-v1"),
    "dqn, greedy evaluations with chance": (ps.DQN(epsilon=0.3, eps_eval=0.4), "Acrobot-v1"),
}


def made(name: str, seed: int = 3) -> tuple[ps.Policy, Any]:
    algo, env = CASES[name]
    live = ps.SerialSampler(T=5, B=3).build(env, seed)
    policy = algo.build(live.spec, seed=seed)
    agent = policy.agent
    agent.set_slots(5)
    if hasattr(algo, "learning_starts"):
        agent.set_exploration(algo, 10**9)
    if agent.preparation.normalizer is not None:
        rows = torch.randn(64, live.spec.obs.size) * 3.0 + 1.0
        agent.preparation.normalizer.moments[0].update(rows)
    return policy, live


def both(agent: Agent, obs: np.ndarray[Any, Any], noise: np.ndarray[Any, Any] | None) -> tuple[list[Any], list[Any]]:
    """[action, logp or None] of rows [N, ...], by `act` and in one call."""
    acting = agent.by_kernel(noise is not None)
    assert isinstance(acting, Acting)
    with torch.inference_mode():
        given = None if noise is None else torch.from_numpy(noise)
        action, info, _ = agent.act(Inputs(torch.from_numpy(obs), None, None, None), None, given)  # pyright: ignore
    action, logp = action.numpy(), info["logp"].numpy() if "logp" in info else None
    own = np.full_like(action, 7), None if logp is None else np.full_like(logp, 7.0)
    serve = acting.rows(obs[None], own[0][None], None if logp is None else own[1][None], None if noise is None else noise[None])
    assert serve is not None
    serve(0)
    return [action, logp], [*own]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("N", [1, 3, 16, 70])
@pytest.mark.parametrize("noisy", [True, False])
def test_one_call_gives_the_bits_of_act(name: str, N: int, noisy: bool) -> None:
    policy, live = made(name)
    rng = np.random.default_rng(N)
    obs = (rng.standard_normal((N, live.spec.obs.size)) * 3.0).astype(np.float32)
    noise = rng.random((N, policy.agent.noise_size), np.float32) if noisy else None
    if noisy and policy.agent.env_ranks:
        noise[:, 2] = rng.integers(-7, 9, N)  # pyright: ignore
    expected, found = both(policy.agent, obs, noise)
    for x, y in zip(expected, found):
        np.testing.assert_array_equal(x, y)
    if name.startswith("dqn") and noisy and N == 70:
        assert (found[0] != both(policy.agent, obs, None)[1][0]).any()  # some are drawn
