"""PPO's stop, its rows by hand, normalised advantages and the agent of its settings; see test_on_policy_conformance.py."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.agents.networks import Net
from penstock.algos import appo, ppo
from penstock.algos.appo import APPO
from penstock.algos.mappo import MAPPO
from penstock.algos.ppo import PPO, loss_fn, postprocess_fn
from penstock.core.batch import TrainBatch, allocate_batch
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.core.tree import tree_map
from penstock.learn.train_ops import train_one_step
from tests.algos.by_hand import KNOWN, ROWS, SPEC, Fixed, Known, P, four_rows, minibatch, tensor


def test_target_kl_stops_at_one_and_a_half_times_it():
    kl = (0.25 - math.log(1.25) - 0.5 - math.log(0.5)) / 3
    for target, stops in ((None, False), (kl / 1.51, True), (kl / 1.49, False)):
        loss = loss_fn(Fixed(), minibatch(**ROWS), PPO(target_kl=target))  # pyright: ignore
        assert (loss.limits.get("approx_kl", math.inf) < float(loss.metrics["approx_kl"])) is stops


def test_a_better_action_is_made_likelier_and_entropy_rewarded():
    rows = {**ROWS, "logp": P[range(3), [0, 1, 2]].log(), "advantage": tensor(1, -1, 0)}
    agent = Fixed()
    (step,) = torch.autograd.grad(loss_fn(agent, minibatch(**rows), PPO()).total, agent.logits)  # pyright: ignore
    assert step[0, 0] < 0 < step[0, 1]
    assert step[1, 1] > 0 > step[1, 0]
    assert not step[2].any()
    rows["advantage"] = tensor(0, 0, 0)
    loss = loss_fn(agent, minibatch(**rows), PPO(entropy_coef=0.1))  # pyright: ignore
    (step,) = torch.autograd.grad(loss.total, agent.logits)  # pyright: ignore
    assert (step[range(3), P.argmax(-1)] > 0).all()  # the likeliest becomes less so


def test_the_coefficients_are_those_of_the_settings():
    def total(**settings: float) -> float:
        return loss_fn(Fixed(), minibatch(**ROWS), PPO(**settings)).total.item()  # pyright: ignore

    base = total(value_coef=0.0)
    assert total(value_coef=2.0) - base == pytest.approx(2 * 0.5 * 5 / 3)
    wide = total(value_coef=0.0, clip=10.0)
    assert wide == pytest.approx(-(1.25 * 2 - 0.5 * 3 + 1) / 3)


def test_postprocess_by_hand():
    tensors = tree_map(torch.from_numpy, four_rows([-1, -2, -3, -4]))
    agent: Any = Known(KNOWN)
    cfg = PPO(discount=0.5, gae_lambda=0.5, normalize_advantage=False)
    data = postprocess_fn(agent, tensors, cfg)
    # errors 2 + 1 - 1 = 2, 4 - 2 = 2, -, 6 + 4 - 4 = 6; the first carries a quarter of the second
    assert data["advantage"][:, 0].tolist() == [2.5, 2, 0, 6]
    assert data["return"][:, 0].tolist() == [3.5, 4, 50, 10]
    assert torch.equal(data["logp"], tensors.info["logp"])
    assert torch.equal(data["action"], tensors.action)
    assert data.valid is not None
    assert torch.equal(data.valid, tensors.valid)
    assert data.inputs.obs.shape == (4, 1, 2)
    assert data.state is None
    raw = np.array([2.5, 2, 6])
    explained = 1 - np.var(raw) / np.var([3.5, 4, 10])
    assert data.metrics is not None
    assert float(data.metrics["explained_variance"]) == pytest.approx(explained, rel=1e-5)


def test_advantages_are_normalised_over_the_batch_not_the_minibatch():
    policy = PPO(minibatch=4, epochs=1, net=Net(hidden=(8,))).build(SPEC)
    batch = allocate_batch(SPEC, BatchSpec(16, 2), {"logp": np.float32(0)})
    rng = np.random.default_rng(0)
    batch.reward[...] = rng.normal(size=(16, 2))
    batch.valid[...] = True
    parts: list[torch.Tensor] = []
    inner = policy.loss_fn

    def watched(agent: Any, x: TrainBatch, cfg: Any) -> Any:
        parts.append(x["advantage"])
        return inner(agent, x, cfg)

    policy.loss_fn = watched
    train_one_step(policy, batch)
    whole = torch.cat(parts)
    assert whole.mean().abs() < 1e-6
    assert whole.std().item() == pytest.approx(1, abs=1e-5)
    assert max(p.mean().abs() for p in parts) > 0.1


def test_the_agent_is_a_setting():
    from penstock.agents.actor_critic import ActorCritic, actor_critic

    made: list[Any] = []

    def my_agent(spec: EnvSpec, cfg: PPO) -> ActorCritic:
        made.append((spec, cfg))
        return actor_critic(spec, cfg)

    algo = PPO(agent=my_agent, lr="linear(0.5, 0)")
    assert algo.build(SPEC).agent.spec is SPEC
    assert made == [(SPEC, replace(algo, lr=0.5))]


@pytest.mark.parametrize("algo", [PPO, MAPPO, APPO])
def test_values_are_clipped_beside_those_before_training(algo: Any):
    """ROWS: values 1, 2, 5 for 2, 0, 5; within 0.5 of 0, 2, 4 they are 0.5, 2, 4.5."""
    module = appo if algo is APPO else ppo
    rows = {**ROWS, "value": tensor(0, 2, 4)}
    for clip, expected in ((None, 5 / 3), (0.5, (2.25 + 4 + 0.25) / 3)):
        loss = module.loss_fn(Fixed(), minibatch(**rows), algo(value_clip=clip))  # pyright: ignore
        assert float(loss.metrics["value_loss"]) == pytest.approx(0.5 * expected)
    data = postprocess_fn(Known(KNOWN), tree_map(torch.from_numpy, four_rows([-1, -2, -3, -4])), PPO(value_clip=0.5))  # pyright: ignore
    assert torch.equal(data["value"], KNOWN[:-1])
