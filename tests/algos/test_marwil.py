"""MARWIL: weights and loss by hand, the running norm, and that it does better than the data where BC cannot."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.actor_critic import Output
from penstock.agents.distributions import Categorical
from penstock.algos.marwil import MARWIL, agent_fn, loss_fn, postprocess_fn, with_norm
from penstock.core.batch import Inputs, TrainBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.datasets.episode import Episode
from penstock.datasets.writer import DatasetWriter
from penstock.envs.spaces import env_spec
from penstock.envs.toy import Bandit
from penstock.learn.rows.postprocess import as_tensors

SPEC = EnvSpec(LeafSpec("box", (1,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
P = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
VALUE = torch.tensor([1.0, 2.0], dtype=torch.float64)


def batch_of(reward: list[float], terminated: list[bool], valid: list[bool]) -> ps.SampleBatch:
    batch = allocate_batch(SPEC, BatchSpec(len(reward), 1))
    batch.reward[:, 0], batch.terminated[:, 0], batch.valid[:, 0] = reward, terminated, valid
    return as_tensors(batch, torch.device("cpu"))


class Valued:
    """An agent whose value of row t is t / 10."""

    def __init__(self) -> None:
        self.advantage_square, self.advantage_batches = torch.zeros(()), torch.zeros(())

    def get_buffer(self, target: str) -> torch.Tensor:
        return getattr(self, target)

    def values(self, batch: ps.SampleBatch) -> torch.Tensor:
        return torch.arange(len(batch.first)).unsqueeze(1) / 10.0

    def scaled_reward(self, reward: torch.Tensor) -> torch.Tensor:
        return reward

    def terminal(self, batch: ps.SampleBatch) -> torch.Tensor:
        return batch.terminated

    def needed(self, inputs: Inputs) -> Inputs:
        return inputs


def test_weights_by_hand() -> None:
    """Rows 0 and 1 are an episode that ends; row 2 is its reset row; row 3 is cut by the batch and bootstraps with 0.4."""
    agent: Any = Valued()
    batch = batch_of([1, 2, 0, 4], [False, True, False, False], [True, True, False, True])
    got = postprocess_fn(agent, batch, MARWIL(discount=0.5, beta=2.0, max_weight=5.0))
    return_ = np.array([1 + 0.5 * 2, 2, 4 + 0.5 * 0.4])
    advantage = return_ - [0.0, 0.1, 0.3]
    norm = math.sqrt((advantage**2).mean())
    weight = np.minimum(np.exp(2.0 * advantage / norm), 5.0)
    valid = batch.valid.flatten()
    assert got["return"].flatten()[valid].tolist() == pytest.approx(return_)
    assert got["weight"].flatten()[valid].tolist() == pytest.approx(weight)
    assert got.metrics is not None
    assert float(got.metrics["advantage_norm"]) == pytest.approx(norm)
    assert float(got.metrics["weight_mean"]) == pytest.approx(weight.mean())
    assert float(got.metrics["weight_clipped"]) == pytest.approx((weight == 5.0).mean())


def test_the_norm_is_a_mean_at_first_and_follows_later() -> None:
    agent: Any = Valued()
    agent.values = lambda batch: torch.zeros(2, 1)
    squares: list[float] = []
    for k, reward in enumerate([1.0, 3.0, 2.0, 5.0]):
        postprocess_fn(agent, batch_of([reward], [True], [True]), MARWIL(norm_rate=0.4))
        rate = max(1 / (k + 1), 0.4)
        squares.append((squares[-1] if squares else 0.0) * (1 - rate) + rate * reward**2)
        assert float(agent.advantage_square) == pytest.approx(squares[-1])


class Fixed:
    """Answers with given probabilities and values."""

    def __init__(self) -> None:
        self.logits, self.value = P.log().requires_grad_(), VALUE.clone().requires_grad_()
        self.advantage_square = torch.tensor(4.0, dtype=torch.float64)

    def get_buffer(self, target: str) -> torch.Tensor:
        return getattr(self, target)

    def __call__(self, inputs: Inputs, state: Any = None) -> Output:
        return Output(Categorical(self.logits), self.value)


def test_the_loss_by_hand() -> None:
    rows = {"action": torch.tensor([0, 1]), "weight": torch.tensor([3.0, 0.5], dtype=torch.float64),
            "return": torch.tensor([2.0, 0.0], dtype=torch.float64)}  # fmt: skip
    agent: Any = Fixed()
    batch = TrainBatch(Inputs(None, None, None, None), rows, None)
    got = loss_fn(agent, batch, MARWIL(value_coef=0.25, entropy_coef=0.1))
    policy_loss = -(3.0 * math.log(0.5) + 0.5 * math.log(0.8)) / 2
    entropy = -sum(p * math.log(p) for row in P.tolist() for p in row) / 2
    assert {name: m.item() for name, m in got.metrics.items()} == {
        "policy_gradient_loss": pytest.approx(policy_loss),
        "value_loss": pytest.approx(0.5 * (1 + 4) / 2),
        "entropy_loss": pytest.approx(-entropy),
        "neglogp": pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2),
        "loss": pytest.approx(policy_loss + 0.25 * 0.5 * 5 / 2 / 4 - 0.1 * entropy),
    }
    logits, value = torch.autograd.grad(
        loss_fn(agent, batch, MARWIL(entropy_coef=0.0)).total, (agent.logits, agent.value)
    )
    chosen = torch.nn.functional.one_hot(rows["action"], 2)
    torch.testing.assert_close(logits, rows["weight"].unsqueeze(1) * (P - chosen) / 2)
    torch.testing.assert_close(value, (VALUE - rows["return"]) / 2 / 4)


def test_beta_0_is_behaviour_cloning() -> None:
    agent: Any = Valued()
    got = postprocess_fn(agent, batch_of([1, 2, 3], [False] * 3, [True] * 3), MARWIL(beta=0.0))
    assert got["weight"].flatten().tolist() == [1, 1, 1]


def test_settings_that_contradict_are_refused() -> None:
    for settings in (
        {"beta": -1.0},
        {"max_weight": 0.5},
        {"norm_rate": 0.0},
        {"discount": 1.1},
        {"epochs": 0},
        {"lr": 0.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            MARWIL(**settings)


def test_the_norm_is_in_the_checkpoint_and_the_networks_are_those_of_ppo() -> None:
    policy = MARWIL().build(SPEC)
    assert {"advantage_square", "advantage_batches"} <= set(policy.state_dict()["agent"])
    assert with_norm(policy.agent) is policy.agent
    ps.PPO(agent=agent_fn).build(SPEC).load_parameters(policy.agent.state_dict())  # a MARWIL run goes on online


def test_it_does_better_than_its_data(tmp_path: Path) -> None:
    """Of two arms the worse one was pulled three times in four: BC repeats that, MARWIL learns which one paid."""
    live = Bandit()
    pays = [float((live.reset(seed=0), live.step(np.int64(a)))[1][1]) for a in range(live.action_space.n)]  # pyright: ignore
    worst, best = int(np.argmin(pays)), int(np.argmax(pays))
    with DatasetWriter(tmp_path / "d", env_spec(live)) as writer:
        for i in range(64):
            obs, _ = live.reset(seed=i)
            action = np.int64(best if i % 4 == 0 else worst)
            after, reward, terminated, truncated, _ = live.step(action)
            writer.append(Episode(np.stack([obs, after]), action[None], np.float32([reward]), terminated, truncated))
    chosen: dict[str, int] = {}
    for name, algo in (("bc", ps.BC(lr=1e-2)), ("marwil", MARWIL(lr=1e-2, beta=2.0))):
        sampler = ps.OfflineSampler(str(tmp_path / "d"), T=16, B=8).build(Bandit, 1)
        policy = algo.build(sampler.spec, seed=1)
        sampler.initialize(policy.agent)
        for itr in range(60):
            ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
        chosen[name] = int(policy.predict(live.reset(seed=0)[0]))
    assert chosen == {"bc": worst, "marwil": best}
