"""ValueScale: rewards of any size are learned alike; norm groups of networks that share nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.agents.actor_critic import ValueScale, value_unit
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs.toy import Chain
from penstock.learn.rows.postprocess import as_tensors
from tests.slow import slow

NET = ps.Net(hidden=(8,))
ALGOS: dict[str, Any] = {
    "ppo": ps.PPO(net=NET, minibatch=16, epochs=2),
    "a2c": ps.A2C(net=NET),
    "impala": ps.IMPALA(net=NET),
    "appo": ps.APPO(net=NET, minibatch=16, epochs=2),
}


class Paid(gym.RewardWrapper[Any, Any]):
    """Rewards times `scale`, or always `constant`."""

    def __init__(self, env: Any, scale: float = 1.0, constant: float | None = None) -> None:
        super().__init__(env)
        self.scale, self.constant = scale, constant

    def reward(self, reward: Any) -> float:
        return float(reward) * self.scale if self.constant is None else self.constant


def paid(scale: float = 1.0, constant: float | None = None) -> Any:
    return Paid(Chain(), scale, constant)


def trained(algo: Any, env: Any, batches: int = 4) -> tuple[Any, list[dict[str, float]], Any]:
    sampler = ps.SerialSampler(T=7, B=5).build(ps.EnvConfig(env, checks="finite"), 0)
    policy = algo.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    found = [ps.train_one_step(policy, sampler.obtain_samples(k)[0]) for k in range(batches)]
    return policy, found, sampler


def test_the_unit_is_the_running_root_mean_square_and_values_stay() -> None:
    scale, head = ValueScale(), nn.Linear(3, 1)
    x = torch.randn(5, 3)
    assert torch.equal(scale(head(x)), head(x))  # nothing is known yet
    for i, mean_square in enumerate((4.0, 0.0, float("nan"), float("inf"), 12.0)):
        before = scale(head(x))
        scale.update(torch.tensor(mean_square), head)
        torch.testing.assert_close(scale(head(x)), before)
        assert float(scale.square) == pytest.approx(4.0 if i < 4 else 8.0)
    assert float(scale.unit) == pytest.approx(8.0**0.5)
    for _ in range(500):
        scale.update(torch.tensor(2.0), head)
    assert float(scale.square) == pytest.approx(2.0, rel=0.02)  # a running mean: old batches are forgotten
    assert float(scale.batches) == 502


@pytest.mark.parametrize("name", ["ppo", *slow("a2c", "impala", "appo")])
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20, *slow(2.0**-10, 2.0**5)])
def test_the_size_of_rewards_does_not_matter(name: str, scale: float) -> None:
    """By powers of two rounding is the same, so parameters of the actor agree but for what is left of adam's eps."""
    algo = ALGOS[name]
    (one, _, _), (other, _, _) = trained(algo, paid), trained(algo, lambda: paid(scale))
    for (key, a), b in zip(one.agent.actor.named_parameters(), other.agent.actor.parameters()):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4, msg=key)
    assert float(other.agent.value_scale.unit / one.agent.value_scale.unit) == pytest.approx(scale, rel=1e-2)
    assert value_unit(replace(algo, normalize_value=False).build(one.spec).agent) == 1.0


@pytest.mark.parametrize(("scale", "constant"), [(1.0, 0.0), (1.0, 5.0), (1e12, None), (1.0, 1e12)])
@pytest.mark.parametrize("name", ["ppo", *slow("a2c", "impala", "appo")])
def test_rewards_of_0_constant_and_huge_ones_train(name: str, scale: float, constant: float | None) -> None:
    policy, found, _ = trained(ALGOS[name], lambda: paid(scale, constant))
    assert all(np.isfinite(x) for metrics in found for x in metrics.values())
    assert policy.skipped == 0
    assert all(p.isfinite().all() for p in policy.agent.parameters())


@pytest.mark.parametrize("name", ["ppo", *slow("a2c", "impala", "appo")])
def test_a_reward_that_is_not_a_number_costs_its_batch_and_no_more(name: str) -> None:
    policy, _, sampler = trained(ALGOS[name], paid)
    before = {key: x.clone() for key, x in policy.agent.state_dict().items()}
    batch = sampler.obtain_samples(9)[0].copy()
    batch.reward[2, 3] = np.nan
    ps.train_one_step(policy, batch)
    scale = policy.agent.value_scale
    assert scale.unit.isfinite() and torch.equal(scale.square, before["value_scale.square"])
    assert policy.skipped > 0
    assert all(p.isfinite().all() for p in policy.agent.parameters())
    ps.train_one_step(policy, sampler.obtain_samples(10)[0])
    assert float(scale.batches) == 5.0


@pytest.mark.parametrize("name", ALGOS)
def test_a_batch_with_one_valid_row_and_one_without_any(name: str) -> None:
    policy, _, sampler = trained(ALGOS[name], paid)
    batch = sampler.obtain_samples(9)[0].copy()
    for rows in (1, 0):
        batch.valid[...] = False
        batch.valid[3, 2] = rows == 1
        found = ps.train_one_step(policy, batch)
        found.pop("train/explained_variance", None)  # nan: one row has no variance
        assert all(np.isfinite(x) for x in found.values())
        assert all(p.isfinite().all() for p in policy.agent.parameters())


def test_the_unit_is_in_the_checkpoint_and_older_parameters_have_none() -> None:
    policy, _, _ = trained(ALGOS["ppo"], paid)
    other = ALGOS["ppo"].build(policy.spec, 1)
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.agent.value_scale.unit, policy.agent.value_scale.unit)
    plain = replace(ALGOS["ppo"], normalize_value=False).build(policy.spec, 2)
    other.load_parameters(plain.agent.state_dict())  # values in the unit of rewards, and no statistics
    assert (float(other.agent.value_scale.unit), float(other.agent.value_scale.batches)) == (1.0, 0.0)


@pytest.mark.parametrize(
    "algo", [ps.PPO(), ps.MAPPO(), ps.MAPPO(net=ps.Net(recurrent="gru"))], ids=["ppo", "mappo", "mappo-gru"]
)
@pytest.mark.parametrize(
    "action", [LeafSpec("discrete", (), "int64", sizes=(2,)), LeafSpec("box", (2,), "float32")], ids=["choice", "box"]
)
def test_each_parameter_is_in_one_norm_group(algo: Any, action: LeafSpec) -> None:
    obs = LeafSpec("box", (3,), "float32")
    seen: Any = {"obs": obs, "state": obs} if isinstance(algo, ps.MAPPO) else obs
    agent = algo.build(EnvSpec(seen, action)).agent
    grouped = [id(p) for modules in agent.norm_groups().values() for m in modules for p in m.parameters()]
    assert sorted(grouped) == sorted(id(p) for p in agent.parameters())
    assert set(agent.norm_groups()) == {"actor", "critic"}


@pytest.mark.parametrize("shared", [False, True])
def test_networks_that_share_nothing_are_clipped_apart(shared: bool) -> None:
    """A critic's gradient a thousand times as large leaves the actor its own; logged by group."""
    algo = ps.PPO(net=replace(NET, shared=shared), epochs=1, minibatch=35, normalize_value=False, max_grad_norm=0.5)
    policy, _, sampler = trained(algo, lambda: paid(1000.0), 0)
    batch = as_tensors(sampler.obtain_samples(0)[0], policy.device)
    metrics = ps.train_one_step(policy, batch)
    gradient = torch.cat([p.grad.flatten() for p in policy.agent.actor.parameters()]).norm()
    if shared:
        assert metrics["train/grad_norm"] > 0.5
        assert "train/grad_norm_actor" not in metrics
    else:
        assert metrics["train/grad_norm_critic"] > 100 * metrics["train/grad_norm_actor"]
        head = torch.cat([p.grad.flatten() for p in policy.agent.head.parameters()]).norm()
        assert float((gradient**2 + head**2) ** 0.5) == pytest.approx(
            min(0.5, metrics["train/grad_norm_actor"]), rel=1e-4
        )
    assert 0.0 < metrics["train/step_rms"] < 2 * float(algo.lr)


def test_step_rms_is_what_parameters_changed_by() -> None:
    policy, _, sampler = trained(ps.PPO(net=NET, epochs=1, minibatch=35), paid, 0)
    before = torch.cat([p.detach().flatten() for p in policy.agent.parameters()])
    metrics = ps.train_one_step(policy, sampler.obtain_samples(0)[0])
    head = policy.agent.value_head
    moved = torch.cat([p.detach().flatten() for p in policy.agent.parameters()]) - before
    # The head also moved with the unit, which is no gradient step: it is left out on both sides.
    rest = torch.cat([torch.full_like(p, float(all(p is not q for q in head.parameters()))).flatten()
                      for p in policy.agent.parameters()])  # fmt: skip
    of_rest = float(((moved * rest).square().sum() / rest.sum()).sqrt())
    assert metrics["train/step_rms"] == pytest.approx(of_rest, rel=0.1)
