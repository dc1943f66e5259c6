"""MARWIL: monotonic advantage re-weighted imitation learning (Wang et al. 2018, "Exponentially weighted imitation learning
for batched historical data", NeurIPS).

Differs from the paper: returns are bootstrapped with V where a batch cuts an episode or a time limit cut it, weights are
bounded by `max_weight` (as in Peng et al. 2019, arXiv:1910.00177), advantages are computed once for each batch, and the
value error counts in units of c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock import ops
from penstock.agents.actor_critic import actor_critic
from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.core.batch import SampleBatch
from penstock.core.config import check_fields
from penstock.core.errors import ConfigError
from penstock.core.schedule import Schedule, check_schedules, schedule_value
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.learn.algorithm import AgentFn, Loss
from penstock.learn.minibatch import TrainBatch
from penstock.learn.optimizers import adam
from penstock.learn.policy import Policy


def agent_fn(spec: EnvSpec, settings: Any) -> Agent:
    """The default agent with MARWIL's running norm; other algorithms go on with a MARWIL run by it (`--algo.agent`)."""
    return with_norm(actor_critic(spec, settings))


def with_norm(agent: Agent) -> Agent:
    """The agent, with buffers for the running mean of A^2 and how many batches made it; checkpoints hold them."""
    if "advantage_square" not in dict(agent.named_buffers()):
        agent.register_buffer("advantage_square", torch.zeros(()))
        agent.register_buffer("advantage_batches", torch.zeros(()))
    return agent


def postprocess_fn(agent: Any, batch: SampleBatch, cfg: MARWIL) -> TrainBatch:
    """Returns R and weights exp(beta * (R - V) / c) of a batch [T, B]; c^2 is the running mean of (R - V)^2 (section 4)."""
    value = agent.values(batch)
    return_ = ops.discounted_return(
        agent.scaled_reward(batch.reward),
        value,
        agent.terminal(batch),
        batch.truncated,
        batch.valid,
        discount=cfg.discount,
    )
    advantage = return_ - value[:-1]
    agent.advantage_batches += 1.0
    rate = (1.0 / agent.advantage_batches).clamp(min=cfg.norm_rate)
    agent.advantage_square += rate * (ops.masked_mean(advantage.square(), batch.valid) - agent.advantage_square)
    norm: Tensor = agent.advantage_square.sqrt() + 1e-8
    weight = (cfg.beta * advantage / norm).exp().clamp(max=cfg.max_weight)
    metrics = {
        "explained_variance": ops.explained_variance(value[:-1], return_, batch.valid),
        "advantage_norm": norm,
        "weight_mean": ops.masked_mean(weight, batch.valid),
        "weight_clipped": ops.masked_mean((weight >= cfg.max_weight).float(), batch.valid),
    }
    rows = {"action": batch.action, "weight": weight, "return": return_}
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: Any, x: TrainBatch, cfg: MARWIL) -> Loss:
    """-w * log pi(a|s) + value_coef * ((V - R) / c)^2 / 2 - entropy_coef * H  (algorithm 1; beta = 0 is behaviour cloning)."""
    dist, value = agent(x.inputs, x.state)
    logp = dist.log_prob(x["action"])
    policy_loss = -ops.masked_mean(x["weight"] * logp, x.valid)
    value_loss = 0.5 * ops.squared_error(value, x["return"], x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    # In units of c: large returns would leave the policy nothing of a gradient that is clipped as a whole.
    scaled = value_loss / (agent.advantage_square + 1e-8)
    total = policy_loss + cfg.value_coef * scaled - float(cfg.entropy_coef) * entropy
    metrics = {
        "policy_gradient_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": -entropy,
        "loss": total,
        "neglogp": -ops.masked_mean(logp, x.valid),
    }
    return Loss(total, {name: value.detach() for name, value in metrics.items()})


optimizer_fn = adam


@dataclass(frozen=True)
class MARWIL:
    """Settings of MARWIL."""

    lr: Schedule = 1e-3
    """Adam's step size, usually 1e-4 to 1e-3."""
    beta: float = 1.0
    """How much better actions count for more, usually 0.5 to 3; 0 imitates all alike."""
    discount: float = 0.99
    """Weight of the next step's reward in returns, usually 0.9 to 0.999."""
    value_coef: float = 1.0
    """Weight of half the squared value error in units of c^2, whatever the size of rewards."""
    entropy_coef: Schedule = 0.0
    """Weight of the entropy bonus per nat, usually 0."""
    max_weight: float = 20.0
    """Largest weight of a step, so that a few steps cannot rule a batch."""
    norm_rate: float = 0.01
    """How fast c^2 follows the mean of A^2, a batch; the first batches count alike."""
    epochs: int = 1
    """Passes over each batch; the sampler passes over the dataset by itself."""
    minibatch: int = 256
    """Rows of a gradient step; a batch is cut into round(T * B / minibatch) parts."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    net: Net = Net()
    """Networks of the default agent."""
    agent: AgentFn = actor_critic
    """Makes the agent from (spec, settings): `my_module:my_agent_fn` on the command line."""
    batch: ClassVar[BatchSpec] = BatchSpec(T=128, B=16)
    """T and B of the sampler, where a run names none."""
    offline: ClassVar[bool] = True
    """It learns from the actions of others: a dataset, played back by an OfflineSampler."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_schedules(self)
        if not 0.0 <= self.discount <= 1.0 or not 0.0 < self.norm_rate <= 1.0:
            raise ConfigError(
                f"discount={self.discount}, norm_rate={self.norm_rate}; expected [0, 1] and a positive rate up to 1"
            )
        if self.epochs < 1 or self.minibatch < 1:
            raise ConfigError(f"epochs={self.epochs}, minibatch={self.minibatch}; both must be at least 1")
        if self.beta < 0.0 or self.max_weight < 1.0:
            raise ConfigError(f"beta={self.beta}, max_weight={self.max_weight}; expected 0 or more, and 1 or more")
        if min(schedule_value(self.lr, 0.0), self.max_grad_norm) <= 0.0:
            raise ConfigError(f"lr={self.lr}, max_grad_norm={self.max_grad_norm}; expected positive numbers")

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu") -> Policy:
        """The live policy for an environment."""
        make = self.agent
        return Policy(
            self,
            spec,
            agent_fn=lambda spec, cfg: with_norm(make(spec, cfg)),
            postprocess_fn=postprocess_fn,
            loss_fn=loss_fn,
            optimizer_fn=optimizer_fn,
            epochs=self.epochs,
            minibatch=self.minibatch,
            max_grad_norm=self.max_grad_norm,
            seed=seed,
            device=device,
        )
