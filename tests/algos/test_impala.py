"""IMPALA's targets by hand, its ratios, and rows that are too old; losses are in test_on_policy_conformance.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.agents.networks import Net
from penstock.algos.a2c import A2C, postprocess_fn as a2c_postprocess_fn
from penstock.algos.appo import APPO
from penstock.algos.impala import IMPALA, postprocess_fn
from penstock.core.batch import SampleBatch, TrainBatch, allocate_batch
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_map
from penstock.envs.toy import Masked, RepeatPrevious
from penstock.learn.policy import Policy
from penstock.learn.rows.postprocess import as_tensors
from penstock.learn.train_ops import train_one_step
from penstock.ops import vtrace
from penstock.samplers.serial import SerialSampler
from tests.algos.by_hand import KNOWN, SPEC, Known, four_rows

LSTM = Net(hidden=(8,), recurrent="lstm", recurrent_size=4, prev_action=True, prev_reward=True)


def test_postprocess_by_hand():
    """Two steps, a termination, a reset row, one step more; rewards count twice, ratios are 1/2, 3, -, 1."""
    batch = four_rows(np.log([0.5, 0.2, 0.1, 0.5]))
    p = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2], [0.3, 0.5, 0.2], [0.1, 0.1, 0.8]])
    agent: Any = Known(KNOWN, p.unsqueeze(1))
    cfg = IMPALA(discount=0.5, vtrace_lambda=0.5, rho_bar=2.0, c_bar=1.0)
    data = postprocess_fn(agent, tree_map(torch.from_numpy, batch), cfg)
    # errors 2 + 1 - 1 = 2, 4 - 2 = 2, -, 6 + 4 - 4 = 6; weights 1/2, 2, -, 1
    assert data["target"][:, 0].tolist() == pytest.approx([1 + 1 + 0.25 * 0.5 * 4, 2 + 4, 50, 4 + 6])
    assert data["advantage"][:, 0].tolist() == pytest.approx([0.5 * (2 + 0.25 * 4), 4, 0, 6])
    assert data.metrics is not None
    assert float(data.metrics["rho_mean"]) == pytest.approx((0.5 + 2 + 1) / 3)
    assert float(data.metrics["rho_clipped"]) == pytest.approx(1 / 3)


def test_ratios_that_rounding_may_have_made_are_not_counted_as_clipped():
    batch = allocate_batch(SPEC, BatchSpec(3, 1), {"logp": np.float32(0)})
    batch.valid[...] = True
    batch.info["logp"][:, 0] = np.log([0.5 / 2.01, 0.5 / 2.03, 0.5])
    agent: Any = Known(torch.zeros(4, 1), torch.tensor([[[0.5, 0.25, 0.25]]]).expand(4, 1, 3))
    data = postprocess_fn(agent, tree_map(torch.from_numpy, batch), IMPALA(rho_bar=2.0))
    assert data.metrics is not None
    assert float(data.metrics["rho_clipped"]) == pytest.approx(1 / 3)


def collected(algo: Any, env: Any, batches: int = 1, T: int = 16, B: int = 6) -> tuple[Policy, SampleBatch]:
    """A policy and the last of so many batches that it collected, of which it was trained on all but the last."""
    sampler = SerialSampler(T=T, B=B).build(env, 3)
    policy = algo.build(sampler.spec, 3)
    sampler.initialize(policy.agent)
    batch = sampler.obtain_samples(0)[0]
    for itr in range(1, batches):
        train_one_step(policy, batch)
        batch = sampler.obtain_samples(itr)[0]
    return policy, batch.copy()


@pytest.mark.parametrize("net", [Net(hidden=(8,)), Net(hidden=(8,), shared=True), LSTM], ids=["mlp", "shared", "lstm"])
@pytest.mark.parametrize("env", ["CartPole-v1", RepeatPrevious, Masked, "Pendulum-v1"])
def test_on_policy_its_rows_are_those_of_a2c(env: Any, net: Net):
    policy, batch = collected(IMPALA(net=net, lr=1e-2, vtrace_lambda=0.9, normalize_value=False), env, batches=3)
    tensors = as_tensors(batch, torch.device("cpu"))
    data = policy.postprocess(tensors)
    plain: Any = a2c_postprocess_fn(policy.agent, tensors, A2C(gae_lambda=0.9))  # pyright: ignore
    torch.testing.assert_close(data["advantage"], plain["advantage"], rtol=1e-4, atol=1e-4)
    valid = tensors.valid
    torch.testing.assert_close(data["target"][valid], plain["return"][valid], rtol=1e-4, atol=1e-4)
    assert data.metrics is not None
    assert float(data.metrics["rho_mean"]) == pytest.approx(1, abs=1e-4)
    assert float(data.metrics["rho_clipped"]) == 0
    assert (data.state is None) is not net.is_recurrent


@pytest.mark.parametrize("net", [Net(hidden=(8,)), LSTM], ids=["mlp", "lstm"])
def test_ratios_are_to_the_policy_about_to_be_updated(net: Net):
    """Of a batch that an earlier policy collected, row by row, in one forward as in many."""
    policy, batch = collected(IMPALA(net=net, lr=0.1, normalize_value=False), "CartPole-v1")
    for _ in range(3):
        train_one_step(policy, batch)
    tensors = as_tensors(batch, torch.device("cpu"))
    with torch.no_grad():
        inputs = tensors.inputs_t if net.is_recurrent else tensors.inputs_t.flat()
        dist, _ = policy.agent(inputs, tensors.state)
        action = tensors.action if net.is_recurrent else tensors.action.flatten()
        log_ratio = dist.log_prob(action).reshape(tensors.valid.shape) - tensors.info["logp"]
    value = policy.agent.values(tensors)
    rows = tensors.reward, value, tensors.terminated, tensors.truncated, tensors.valid
    target, advantage = vtrace(log_ratio, *rows, discount=0.99)
    data = policy.postprocess(tensors)
    valid = tensors.valid
    assert (log_ratio[valid].exp() - 1).abs().max() > 0.1
    torch.testing.assert_close(data["target"][valid], target[valid], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(data["advantage"], advantage, rtol=1e-4, atol=1e-4)
    assert not data["advantage"].requires_grad and not data["target"].requires_grad


@pytest.mark.parametrize("algo", [IMPALA(net=Net(hidden=(8,))), APPO(net=Net(hidden=(8,)))], ids=["impala", "appo"])
def test_rows_that_are_too_old_are_left_out_and_counted(algo: Any):
    policy, batch = collected(replace(algo, max_lag=2), "CartPole-v1")
    policy.version = 7
    batch.version[...] = 5
    batch.version[3:9, 1] = 4
    stale = int(batch.valid[3:9, 1].sum())
    assert stale == 6
    kept = batch.valid.copy()
    seen: list[torch.Tensor] = []
    inner = policy.postprocess_fn

    def watched(agent: Any, x: Any, cfg: Any) -> TrainBatch:
        data = inner(agent, x, cfg)
        seen.extend((x.valid, data["target"]))
        return data

    policy.postprocess_fn = watched
    metrics = train_one_step(policy, batch)
    assert seen[0].sum() == kept.sum() - stale
    assert not seen[0][3:9, 1].any()
    assert metrics["train/stale_rows"] == stale
    assert (batch.valid == kept).all()  # the record says what was collected
    tensors = as_tensors(batch, torch.device("cpu"))
    value = policy.agent.values(tensors)
    assert not torch.equal(seen[1][2, 1], value[2, 1])  # row 2 is trained on, and bootstraps
    other = algo.build(policy.spec)
    other.load_state_dict(policy.state_dict())
    assert other.stale_rows == stale
    assert train_one_step(other, batch)["train/stale_rows"] == stale  # max_lag=None: none is added
    state = policy.state_dict()
    del state["counters"]["stale_rows"]
    other.load_state_dict(state)
    assert other.stale_rows == 0


@pytest.mark.parametrize("net", [Net(hidden=(8,)), LSTM], ids=["mlp", "lstm"])
def test_nothing_is_learned_from_a_batch_that_is_too_old(net: Net):
    policy, batch = collected(IMPALA(net=net, max_lag=0), "CartPole-v1")
    train_one_step(policy, batch)
    before = [x.clone() for x in policy.agent.parameters()]
    assert train_one_step(policy, batch)["train/stale_rows"] == batch.env_steps
    assert policy.updates == 1
    assert all(map(torch.equal, before, policy.agent.parameters()))
