"""Acting in one call of the kernel: the bits of the agent's own `act`, and which agents and arrays it is for."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import penstock as ps
from penstock.agents.actor_critic import ActorCritic
from penstock.agents.agent import Agent
from penstock.core.batch import Inputs
from penstock.core.tree import tree_leaves
from penstock.native.acting import Acting

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("by_kernel")]
CASES: dict[str, tuple[Any, str]] = {
    "categorical": (ps.PPO(), "CartPole-v1"),
    "relu, no hidden layer": (ps.PPO(net=ps.Net(hidden=(), activation="relu")), "CartPole-v1"),
    "normalised": (ps.PPO(net=ps.Net(normalize_obs=True, hidden=(7, 33), activation="relu")), "Acrobot-v1"),
    "elu": (ps.PPO(net=ps.Net(hidden=(7, 33), activation="elu")), "Acrobot-v1"),
    "norms": (ps.PPO(net=ps.Net(hidden=(7, 33), norm="layer", normalize_obs=True)), "Acrobot-v1"),
    "sac with norms": (ps.SAC(net=ps.Net(hidden=(40, 30), activation="relu", norm="layer")), "Pendulum-v1"),
    "dqn with norms": (ps.DQN(epsilon=0.3, net=ps.Net(hidden=(64,), norm="layer")), "CartPole-v1"),
    "gaussian": (ps.A2C(), "Pendulum-v1"),
    "squashed": (ps.PPO(net=ps.Net(squash=True)), "MountainCarContinuous-v0"),
    "sac": (ps.SAC(net=ps.Net(hidden=(40, 30))), "Pendulum-v1"),
    "td3": (ps.TD3(), "MountainCarContinuous-v0"),
    "dqn": (ps.DQN(epsilon=0.3), "CartPole-v1"),
    "dqn, greedy evaluations with chance": (ps.DQN(epsilon=0.3, eps_eval=0.4), "Acrobot-v1"),
}


SAMPLERS: list[Any] = [
    ps.SerialSampler(T=9, B=6),
    ps.CpuSampler(T=9, B=6, workers=2),
    ps.GpuSampler(T=9, B=6, workers=2, device="cpu"),
    ps.AlternatingSampler(T=9, B=6, workers=2, device="cpu"),
]


def made(name: str, seed: int = 3) -> tuple[ps.Policy, Any]:
    algo, env = CASES[name]
    live = ps.SerialSampler(T=5, B=3).build(env, seed)
    policy = algo.build(live.spec, seed=seed)
    agent = policy.agent
    agent.set_slots(5)
    if hasattr(algo, "learning_starts"):
        agent.set_exploration(algo, 10**9)
    if agent.preparation.normalizer is not None:
        rows = torch.randn(64, live.spec.obs.size, generator=torch.Generator().manual_seed(1)) * 3.0 + 1.0
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
    serve = acting.rows(
        obs[None], own[0][None], None if logp is None else own[1][None], noise if noise is None else noise[None]
    )
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
    if noise is not None and policy.agent.env_ranks:
        noise[:, 2] = rng.integers(-7, 9, N)
    expected, found = both(policy.agent, obs, noise)
    for x, y in zip(expected, found):
        np.testing.assert_array_equal(x, y)
    if name.startswith("dqn") and noisy and N == 70:
        assert (found[0] != both(policy.agent, obs, None)[1][0]).any()  # some are drawn


class Doubled(nn.Module):
    """A layer of the user's own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.layer(x)


class OtherAgent(ActorCritic):
    def act(self, inputs: Inputs, state: Any, noise: Any) -> Any:
        action, info, state = super().act(inputs, state, noise)
        return 1 - action, info, state


def hooked(agent: Any) -> None:
    agent.actor.mlp.layers[0].register_forward_hook(lambda *_: None)


def hooked_head(agent: Any) -> None:
    agent.head.register_forward_pre_hook(lambda *_: None)


def replaced(agent: Any) -> None:
    agent.actor.mlp.layers[1] = Doubled(agent.actor.mlp.layers[1])


def in_double(agent: Any) -> None:
    agent.double()


def parametrised(agent: Any) -> None:
    nn.utils.parametrizations.weight_norm(agent.head.linear)


def acts_by_another(agent: Any) -> None:
    agent.act = functools.partial(Agent.act, agent)


def other_class(agent: Any) -> None:
    agent.__class__ = OtherAgent


def of_more_inputs(agent: Any) -> None:
    agent.head.linear = nn.Linear(65, 2)


def of_more_outputs(agent: Any) -> None:
    agent.head.linear = nn.Linear(64, 3)


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        hooked_head,
        replaced,
        in_double,
        parametrised,
        acts_by_another,
        other_class,
        of_more_inputs,
        of_more_outputs,
    ],
)
def test_what_is_no_longer_plain_acts_by_itself(change: Any) -> None:
    policy, _ = made("categorical")
    assert policy.agent.by_kernel(True) is not None
    change(policy.agent)
    assert policy.agent.by_kernel(True) is None


@pytest.mark.parametrize(
    ("algo", "env"),
    [
        (ps.PPO(net=ps.Net(recurrent="lstm")), "CartPole-v1"),
        (ps.PPO(net=ps.Net(shared=True, actor_hidden=(8,))), "CartPole-v1"),
        (ps.PPO(net=ps.Net(use_sde=True)), "Pendulum-v1"),
        (ps.PPO(net=ps.Net(activation="gelu")), "CartPole-v1"),
        (ps.PPO(), "FrozenLake-v1"),
        (ps.DQN(dueling=True), "CartPole-v1"),
        (ps.DQN(noisy=True), "CartPole-v1"),
        (ps.DQN(distributional="quantile"), "CartPole-v1"),
        (ps.SAC(net=ps.Net(use_sde=True)), "Pendulum-v1"),
        (ps.SAC(learning_starts=100), "Pendulum-v1"),  # uniform actions in the beginning
    ],
)
def test_agents_of_other_parts_act_by_themselves(algo: Any, env: str) -> None:
    live = ps.SerialSampler(T=1, B=1).build(env, 1)
    assert algo.build(live.spec, seed=1).agent.by_kernel(True) is None


def test_an_agent_that_records_its_values_acts_by_itself() -> None:
    agent: Any = made("dqn")[0].agent
    agent._records_q = True
    assert agent.by_kernel(True) is None


def test_statistics_in_another_precision_are_not_read_as_they_lie() -> None:
    agent = made("normalised")[0].agent.float()
    assert agent.by_kernel(True) is None


def test_nobody_looks_on_or_torch_runs_it() -> None:
    agent = made("categorical")[0].agent
    for watched in (torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
        with watched:
            assert agent.by_kernel(True) is None
    assert agent.by_kernel(True) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"obs": np.zeros((2, 3, 4))},
        {"obs": np.zeros((2, 3, 5), np.float32)},
        {"obs": np.zeros((2, 6, 4), np.float32)[:, ::2]},
        {"obs": np.zeros((2, 3, 8), np.float32)[:, :, ::2]},
        {"action": np.zeros((2, 3), np.int32)},
        {"action": np.zeros((2, 3, 2), np.int64)},
        {"logp": None},
        {"logp": np.zeros((2, 3))},
        {"noise": np.zeros((2, 3, 2), np.float32)},
        {"noise": np.zeros((2, 2, 1), np.float32)},
        {"obs": {"x": np.zeros((2, 3, 4), np.float32)}},
    ],
)
def test_arrays_that_the_kernel_would_misread_are_left(change: dict[str, Any]) -> None:
    acting = made("categorical")[0].agent.by_kernel(True)
    assert acting is not None
    fitting: dict[str, Any] = {
        "obs": np.zeros((2, 3, 4), np.float32), "action": np.zeros((2, 3), np.int64),
        "logp": np.zeros((2, 3), np.float32), "noise": np.zeros((2, 3, 1), np.float32),
    }  # fmt: skip
    assert acting.rows(**fitting) is not None
    assert acting.rows(**fitting | change) is None


def batches(name: str, sampler: Any) -> list[bytes]:
    algo, env = CASES[name]
    live = sampler.build(env, 3)
    try:
        policy = algo.build(live.spec, seed=3)
        live.initialize(policy.agent)
        if hasattr(algo, "learning_starts"):
            policy.agent.set_exploration(algo, 10**9)
        found = [live.obtain_samples(itr)[0] for itr in range(3)]
        return [np.asarray(x).tobytes() for batch in found for x in tree_leaves((batch.action, batch.info, batch.obs))]
    finally:
        live.shutdown()


@pytest.mark.parametrize(
    "name",
    ["categorical", *(pytest.param(x, marks=pytest.mark.slow) for x in ("normalised", "gaussian", "sac", "dqn"))],
)
def test_batches_of_every_sampler_are_those_of_act(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        calls: list[int] = []
        patched.setattr(Acting, "rows", lambda *_: calls.append(1))
        expected = batches(name, ps.SerialSampler(T=9, B=6))
        assert len(calls) == 3
    for sampler in SAMPLERS:
        assert batches(name, sampler) == expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_predict_is_that_of_act(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for by_one_call in (True, False):
        policy, live = made(name)
        if not by_one_call:
            monkeypatch.setattr(type(policy.agent), "by_kernel", lambda *_: None)
        obs = np.random.default_rng(1).standard_normal((7, live.spec.obs.size)).astype(np.float32)
        given = obs, obs[2], obs[:0], obs[::-1], np.asfortranarray(obs)
        found.append([policy.predict(x, deterministic=deterministic) for x in given])
    for x, y in zip(*found):
        assert type(x) is type(y)
        np.testing.assert_array_equal(x, y)
        assert np.asarray(x).dtype == np.asarray(y).dtype


def test_a_greedy_choice_with_nan_is_torchs() -> None:
    agent: Any = made("dqn")[0].agent
    obs = np.zeros((3, 4), np.float32)
    with torch.no_grad():
        agent.online.advantage.bias.copy_(torch.tensor([0.5, math.nan]))
    expected, found = both(agent, obs, None)
    np.testing.assert_array_equal(expected[0], found[0])
    assert found[0].tolist() == [1, 1, 1]
