"""IQL: losses against a slow loop over rows, expectiles and policies of known answers, and what does not fit it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.algos.iql import agent_fn
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs import toy
from tests.algos.filled import BOX, CHOICE, Chance, assert_gradients_equal, drawn, filled
from tests.algos.test_control_probes import Lever
from tests.algos.test_rebrac import unit

OBS = LeafSpec("box", (2,), "float32")
CFG = ps.IQL(batch_size=24, discount=0.8, expectile=0.8, beta=2.0, max_weight=3.0, net=ps.Net(hidden=(8,)),
             replay=ps.ReplaySettings(capacity=600))  # fmt: skip


def q_values(agent: Any, critics: Any, x: ps.Inputs, action: Any) -> torch.Tensor:
    """[critics] of one row."""
    if hasattr(agent, "box"):
        return critics(x, x.obs, unit(action)[None])[:, 0]
    return critics(x, x.obs)[:, 0, int(action) - 2]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("action", [BOX, CHOICE], ids=["box", "choice"])
def test_losses_and_gradients_equal_a_slow_loop(action: Any, n_step: int) -> None:
    cfg = replace(CFG, n_step=n_step)
    policy, record = filled(cfg, partial(Chance, action))
    agent: Any = policy.agent
    drawing, x = drawn(policy)
    with torch.no_grad():
        ready = policy.postprocess_fn(agent, x, cfg)
    found: Any = policy.loss_fn(agent, ready, cfg)
    total, clipped = torch.zeros(()), 0
    for t, b in zip(drawing.unit, drawing.slot):
        one, taken = record.inputs(t, b), record.at(t, "action", b)
        gain, weight, following = record.transition(t, b, n_step, cfg.discount)
        with torch.no_grad():
            target = gain + weight * float(agent(following).value)
            least = float(q_values(agent, agent.target_q, one, taken).min())
        dist, value = agent(one)
        u = least - value[0]
        share = 0.8 if u > 0 else 1.0 - 0.8
        pull = min(math.exp(2.0 * float(u.detach())), 3.0)
        clipped += pull == 3.0
        logp = dist.log_prob(torch.as_tensor(taken)[None])[0]
        total = (
            total + (q_values(agent, agent.q, one, taken) - target).square().sum() + share * u.square() - pull * logp
        )
    total = total / len(drawing.unit)
    torch.testing.assert_close(found.total, total, rtol=1e-4, atol=1e-4)
    assert 0 < clipped < len(drawing.unit)
    assert found.metrics["weight_clipped"].item() == pytest.approx(clipped / len(drawing.unit))
    learning = [p for p in agent.parameters() if p.requires_grad]
    assert_gradients_equal(found.total, total, learning)
    assert found.priorities is None


def learned(env: Any, algo: ps.IQL, batches: int = 8) -> Any:
    """The agent that has learned from what an untrained policy did, whose choices are even."""
    sampler = ps.SerialSampler(T=32, B=8).build(env, 0)
    sampler.initialize(algo.build(sampler.spec, 1).agent)
    policy = algo.build(sampler.spec, 0)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy.agent


FAST: dict[str, Any] = {"lr": "linear(2e-2, 0)", "discount": 0.9, "batch_size": 64, "replay_ratio": 12.0, "tau": 0.2,
                            "net": ps.Net(hidden=(32,)), "replay": ps.ReplaySettings(capacity=4_000)}  # fmt: skip
SIGNS = ps.Inputs(torch.tensor([[-1.0], [1.0]]), None, None, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("expectile", [0.5, 0.9])
def test_v_is_the_expectile_and_the_policy_its_exponent(expectile: float) -> None:
    """Q is 1 and -1 alike: V = 2 expectile - 1; and pi of the better is exp(2 beta) times that of the worse."""
    dist, value = learned(toy.Match, ps.IQL(**FAST, expectile=expectile, beta=1.0))(SIGNS)
    assert value.tolist() == pytest.approx([2 * expectile - 1] * 2, abs=0.12)
    odds = dist.log_prob(torch.tensor([0, 1])) - dist.log_prob(torch.tensor([1, 0]))
    assert odds.tolist() == pytest.approx([2.0, 2.0], abs=0.45)


def test_the_better_action_of_a_box_is_imitated() -> None:
    action, _, _ = learned(partial(Lever, toy.Match), ps.IQL(**FAST, beta=10.0), 5).act(SIGNS, None, None)
    assert action[0] < 0.0 < action[1]


def test_ends() -> None:
    rows = ps.Inputs(torch.tensor([[0.0], [1.0], [2.0]]), None, None, None)  # pyright: ignore[reportArgumentType]
    assert learned(toy.ThreeStep, ps.IQL(**FAST), 6)(rows).value.tolist() == pytest.approx([2.71, 1.9, 1.0], abs=0.15)


def test_time_limits() -> None:
    endless = learned(partial(toy.Endless, 2), replace(ps.IQL(**FAST), discount=0.5), 6)
    assert endless(SIGNS._replace(obs=torch.zeros(1, 1))).value.item() == pytest.approx(2.0, abs=0.1)


def test_a_policy_of_iql_goes_on_in_another_algorithm() -> None:
    """PPO takes its parameters, by IQL's agent function, and does not train the critics."""
    spec = EnvSpec(OBS, LeafSpec("box", (1,), "float32", low=-1.0, high=1.0))
    policy = ps.IQL(net=ps.Net(hidden=(8,))).build(spec)
    agent = ps.PPO(net=ps.Net(hidden=(8,)), agent=agent_fn).build(spec).agent
    agent.load_state_dict(policy.agent.state_dict())
    assert agent_fn(spec, ps.IQL()).get_submodule("q") is not None


@pytest.mark.parametrize(("settings", "action", "message"), [
    ({"net": ps.Net(recurrent="lstm")}, LeafSpec("discrete", (), "int64", sizes=(2,)), "BC and MARWIL learn with memory"),
    ({}, LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 0)), r"IQL needs a box or one discrete.*use MARWIL"),
    ({}, LeafSpec("box", (1,), "float32"), "IQL needs finite action bounds"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(settings: Any, action: LeafSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.IQL(**settings).build(EnvSpec(OBS, action))


def test_parts_of_an_observation_are_refused() -> None:
    spec = EnvSpec({"a": OBS, "b": OBS}, LeafSpec("discrete", (), "int64", sizes=(2,)))
    with pytest.raises(ConfigError, match=r"net.actor_keys=\('a',\).*env_drop"):
        ps.IQL(net=ps.Net(actor_keys=("a",))).build(spec)
    for expectile in (0.0, 1.0, 1.5, "linear(0.5, 1)"):  # at 0 and 1 the losses know one side alone
        with pytest.raises(
            ConfigError, match=rf"expectile={re.escape(str(expectile))}; expected more than 0, less than 1"
        ):
            ps.IQL(expectile=expectile)
    assert ps.IQL(expectile="linear(0.5, 0.99)").expectile == "linear(0.5, 0.99)"
