import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.agents.actor_critic import Output
from penstock.agents.distributions import Categorical
from penstock.agents.networks import Net
from penstock.algos.ppo import PPO, loss_fn, postprocess_fn
from penstock.core.batch import Inputs, TrainBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_map
from penstock.learn.train_ops import train_one_step

SPEC = EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("discrete", (), "int64", sizes=(3,)))
NO_INPUTS = Inputs(None, None, None, None)


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Fixed:
    """Answers with given logits and values."""

    def __init__(self, p: torch.Tensor, value: torch.Tensor) -> None:
        self.logits, self.value = p.log().requires_grad_(), value.clone().requires_grad_()

    def __call__(self, inputs: Inputs, state: Any = None) -> Output:
        return Output(Categorical(self.logits), self.value)


def minibatch(valid: torch.Tensor | None = None, **rows: torch.Tensor) -> TrainBatch:
    return TrainBatch(NO_INPUTS, rows, valid)


P = tensor([0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2])
ROWS = {
    "action": torch.tensor([0, 1, 2]),
    "logp": tensor(0.4, 0.4, 0.2).log(),  # ratios 1.25, 0.5, 1
    "advantage": tensor(2, -3, 1),
    "return": tensor(2, 0, 5),
}
VALUE = tensor(1, 2, 5)


def test_the_loss_by_hand():
    agent = Fixed(P, VALUE)
    cfg = PPO(clip=0.2, value_coef=0.5, entropy_coef=0.1)
    loss = loss_fn(agent, minibatch(**ROWS), cfg)  # pyright: ignore
    policy_loss = -(1.2 * 2 + 0.8 * -3 + 1.0 * 1) / 3  # clipped above, clipped below, free
    value_loss = 0.5 * (1 + 4 + 0) / 3
    entropy = -sum(p * math.log(p) for row in P.tolist() for p in row) / 3
    got = {name: float(value) for name, value in loss.metrics.items()}
    assert got == {
        "policy_gradient_loss": pytest.approx(policy_loss),
        "value_loss": pytest.approx(value_loss),
        "entropy_loss": pytest.approx(-entropy),
        "loss": pytest.approx(policy_loss + 0.5 * value_loss - 0.1 * entropy),
        "approx_kl": pytest.approx((0.25 - math.log(1.25) - 0.5 - math.log(0.5)) / 3),
        "clip_fraction": pytest.approx(2 / 3),
    }
    assert isinstance(loss.total, torch.Tensor)
    assert loss.total.item() == pytest.approx(got["loss"])
    assert all(not m.requires_grad for m in loss.metrics.values())


def test_target_kl_stops_at_one_and_a_half_times_it():
    kl = (0.25 - math.log(1.25) - 0.5 - math.log(0.5)) / 3
    for target, stops in ((None, False), (kl / 1.51, True), (kl / 1.49, False)):
        loss = loss_fn(Fixed(P, VALUE), minibatch(**ROWS), PPO(target_kl=target))  # pyright: ignore
        assert (loss.limits.get("approx_kl", math.inf) < float(loss.metrics["approx_kl"])) is stops


def test_its_gradient_by_hand():
    """Rows 0 and 1 are clipped; row 2 has -A (onehot - p) / 3. Values: coef (V - R) / 3."""
    agent = Fixed(P, VALUE)
    loss = loss_fn(agent, minibatch(**ROWS), PPO(clip=0.2, value_coef=0.5))  # pyright: ignore
    logits, value = torch.autograd.grad(loss.total, (agent.logits, agent.value))  # pyright: ignore
    torch.testing.assert_close(logits, -tensor([0, 0, 0], [0, 0, 0], [-0.5, -0.3, 0.8]) / 3)
    torch.testing.assert_close(value, 0.5 * tensor(-1, 2, 0) / 3)


def test_a_better_action_is_made_likelier_and_entropy_rewarded():
    rows = {**ROWS, "logp": P[range(3), [0, 1, 2]].log(), "advantage": tensor(1, -1, 0)}
    agent = Fixed(P, VALUE)
    (step,) = torch.autograd.grad(loss_fn(agent, minibatch(**rows), PPO()).total, agent.logits)  # pyright: ignore
    assert step[0, 0] < 0 < step[0, 1]
    assert step[1, 1] > 0 > step[1, 0]
    assert not step[2].any()
    rows["advantage"] = tensor(0, 0, 0)
    loss = loss_fn(agent, minibatch(**rows), PPO(entropy_coef=0.1))  # pyright: ignore
    (step,) = torch.autograd.grad(loss.total, agent.logits)  # pyright: ignore
    assert (step[range(3), P.argmax(-1)] > 0).all()  # the likeliest becomes less so


def test_a_mask_is_the_loss_of_what_is_left():
    valid = torch.tensor([True, False, True])
    masked = loss_fn(Fixed(P, VALUE), minibatch(valid, **ROWS), PPO(entropy_coef=0.1))  # pyright: ignore
    left = {k: v[valid] for k, v in ROWS.items()}
    free = loss_fn(Fixed(P[valid], VALUE[valid]), minibatch(**left), PPO(entropy_coef=0.1))  # pyright: ignore
    torch.testing.assert_close(masked.total, free.total)
    for name, value in masked.metrics.items():
        torch.testing.assert_close(value, free.metrics[name])
    poisoned = {k: v.masked_fill(~valid, 0 if k == "action" else 1e30) for k, v in ROWS.items()}
    again = loss_fn(Fixed(P, VALUE), minibatch(valid, **poisoned), PPO(entropy_coef=0.1))  # pyright: ignore
    torch.testing.assert_close(again.total, free.total)


def test_the_coefficients_are_those_of_the_settings():
    def total(**settings: float) -> float:
        return loss_fn(Fixed(P, VALUE), minibatch(**ROWS), PPO(**settings)).total.item()  # pyright: ignore

    base = total(value_coef=0.0)
    assert total(value_coef=2.0) - base == pytest.approx(2 * 0.5 * 5 / 3)
    wide = total(value_coef=0.0, clip=10.0)
    assert wide == pytest.approx(-(1.25 * 2 - 0.5 * 3 + 1) / 3)


class Known:
    """An agent whose values are given."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def values(self, batch: Any) -> torch.Tensor:
        return self.value

    def scaled_reward(self, reward: torch.Tensor) -> torch.Tensor:
        return 2 * reward

    def terminal(self, batch: Any) -> torch.Tensor:
        return batch.terminated

    def needed(self, inputs: Inputs) -> Inputs:
        return inputs


def test_postprocess_by_hand():
    """Two steps, a termination, a reset row, one step more; the agent doubles rewards."""
    batch = allocate_batch(SPEC, BatchSpec(4, 1), {"logp": np.float32(0)})
    batch.reward[:, 0] = [1, 2, 0, 3]
    batch.terminated[1, 0] = True
    batch.valid[:, 0] = [True, True, False, True]
    batch.info["logp"][:, 0] = [-1, -2, -3, -4]
    batch.action[:, 0] = [1, 2, 0, 1]
    tensors = tree_map(torch.from_numpy, batch)
    agent: Any = Known(torch.tensor([[1.0], [2.0], [50.0], [4.0], [8.0]]))
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


def test_settings_that_contradict_are_refused():
    for settings in ({"discount": 1.1}, {"discount": -0.1}, {"gae_lambda": 1.5}):
        with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}=.*; expected 0 to 1$"):
            PPO(**settings)
    for settings in ({"epochs": 0}, {"minibatch": 0}):
        with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}=0; expected 1 or more$"):
            PPO(**settings)


def test_the_agent_is_a_setting():
    from penstock.agents.actor_critic import ActorCritic, actor_critic

    made: list[Any] = []

    def my_agent(spec: EnvSpec, cfg: PPO) -> ActorCritic:
        made.append((spec, cfg))
        return actor_critic(spec, cfg)

    algo = PPO(agent=my_agent, lr="linear(0.5, 0)")
    assert algo.build(SPEC).agent.spec is SPEC
    assert made == [(SPEC, replace(algo, lr=0.5))]
