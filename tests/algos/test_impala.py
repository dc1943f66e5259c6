"""IMPALA's targets and loss by hand, its ratios, and what it does with rows that are too old."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.agents.actor_critic import Output
from penstock.agents.distributions import Categorical
from penstock.agents.networks import Net
from penstock.algos.a2c import A2C, postprocess_fn as a2c_postprocess_fn
from penstock.algos.appo import APPO
from penstock.algos.impala import IMPALA, loss_fn, postprocess_fn
from penstock.core.batch import Inputs, SampleBatch, TrainBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_map
from penstock.envs.toy import Masked, RepeatPrevious
from penstock.learn.policy import Policy, as_tensors
from penstock.learn.train_ops import train_one_step
from penstock.ops import vtrace
from penstock.samplers.serial import SerialSampler

SPEC = EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("discrete", (), "int64", sizes=(3,)))
P = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]], dtype=torch.float64)
VALUE = torch.tensor([1.0, 2, 5], dtype=torch.float64)
ROWS = {
    "action": torch.tensor([0, 1, 2]),
    "advantage": torch.tensor([2.0, -3, 1], dtype=torch.float64),
    "target": torch.tensor([2.0, 0, 5], dtype=torch.float64),
}
LSTM = Net(hidden=(8,), recurrent="lstm", recurrent_size=4, prev_action=True, prev_reward=True)


class Fixed:
    """Answers with given probabilities and values."""

    def __init__(self) -> None:
        self.logits, self.value = P.log().requires_grad_(), VALUE.clone().requires_grad_()

    def __call__(self, inputs: Inputs, state: Any = None) -> Output:
        return Output(Categorical(self.logits), self.value)


def loss(agent: Fixed, valid: torch.Tensor | None = None, **settings: float) -> Any:
    batch = TrainBatch(Inputs(None, None, None, None), ROWS, valid)
    return loss_fn(agent, batch, IMPALA(**settings))  # pyright: ignore


def test_the_loss_by_hand():
    got = loss(Fixed(), value_coef=0.5, entropy_coef=0.1)
    policy_loss = -(2 * math.log(0.5) - 3 * math.log(0.2) + math.log(0.2)) / 3
    entropy = -sum(p * math.log(p) for row in P.tolist() for p in row) / 3
    assert {name: m.item() for name, m in got.metrics.items()} == {
        "policy_gradient_loss": pytest.approx(policy_loss),
        "value_loss": pytest.approx(0.5 * 5 / 3),
        "entropy_loss": pytest.approx(-entropy),
        "loss": pytest.approx(policy_loss + 0.5 * 0.5 * 5 / 3 - 0.1 * entropy),
    }
    assert got.total.item() == got.metrics["loss"].item()
    assert not any(m.requires_grad for m in got.metrics.values())


def test_its_gradient_by_hand():
    agent = Fixed()
    logits, value = torch.autograd.grad(loss(agent, entropy_coef=0.0).total, (agent.logits, agent.value))
    chosen = torch.nn.functional.one_hot(ROWS["action"], 3)
    torch.testing.assert_close(logits, -ROWS["advantage"].unsqueeze(1) * (chosen - P) / 3)
    torch.testing.assert_close(value, 0.5 * (VALUE - ROWS["target"]) / 3)


def test_a_mask_leaves_rows_out():
    agent = Fixed()
    valid = torch.tensor([True, False, True])
    logits, value = torch.autograd.grad(loss(agent, valid, entropy_coef=0.1).total, (agent.logits, agent.value))
    assert not logits[1].any()
    assert value.tolist() == [pytest.approx(0.5 * -1 / 2), 0, 0]


class Known:
    """An agent whose probabilities and values are given, for every row [T+1, B] of a batch."""

    def __init__(self, p: torch.Tensor, value: torch.Tensor) -> None:
        self.logits, self.value = p.log(), value

    def __call__(self, inputs: Inputs, state: Any = None) -> Output:
        assert inputs.obs.ndim == 2
        return Output(Categorical(self.logits.flatten(0, 1)), self.value.flatten())

    def scaled_reward(self, reward: torch.Tensor) -> torch.Tensor:
        return 2 * reward

    def terminal(self, batch: Any) -> torch.Tensor:
        return batch.terminated

    def needed(self, inputs: Inputs) -> Inputs:
        return inputs


def test_postprocess_by_hand():
    """Two steps, a termination, a reset row, one step more; rewards count twice, ratios are 1/2, 3, -, 1."""
    batch = allocate_batch(SPEC, BatchSpec(4, 1), {"logp": np.float32(0)})
    batch.reward[:, 0] = [1, 2, 0, 3]
    batch.terminated[1, 0] = True
    batch.valid[:, 0] = [True, True, False, True]
    batch.info["logp"][:, 0] = np.log([0.5, 0.2, 0.1, 0.5])
    batch.action[:, 0] = [1, 2, 0, 1]
    p = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2], [0.3, 0.5, 0.2], [0.1, 0.1, 0.8]])
    agent: Any = Known(p.unsqueeze(1), torch.tensor([[1.0], [2.0], [50.0], [4.0], [8.0]]))
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
    agent: Any = Known(torch.tensor([[[0.5, 0.25, 0.25]]]).expand(4, 1, 3), torch.zeros(4, 1))
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
    policy, batch = collected(IMPALA(net=net, lr=1e-2, vtrace_lambda=0.9), env, batches=3)
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
    policy, batch = collected(IMPALA(net=net, lr=0.1), "CartPole-v1")
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


def test_settings_that_contradict_are_refused():
    for algo in (IMPALA, APPO):
        for settings, message in (
            ({"discount": 1.1}, r"^discount=1\.1; expected 0 to 1$"),
            ({"vtrace_lambda": -0.5}, r"^vtrace_lambda=-0\.5; expected 0 to 1$"),
            ({"rho_bar": 0.0}, r"^rho_bar=0\.0; expected more than 0$"),
            ({"c_bar": 2.0}, r"^c_bar=2\.0, rho_bar=1\.0; expected c_bar <= rho_bar$"),
            ({"max_lag": -1}, r"^max_lag=-1; expected 0 or more$"),
        ):
            with pytest.raises(ConfigError, match=message):
                algo(**settings)
        assert algo(rho_bar=math.inf, c_bar=3.0, max_lag=0).takes_fragments
