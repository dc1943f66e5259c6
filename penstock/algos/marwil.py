"""MARWIL: monotonic advantage re-weighted imitation learning.

Wang et al. 2018, "Exponentially weighted imitation learning for batched historical data", NeurIPS. Differs from the
paper: returns are bootstrapped with V where a batch or a time limit cuts an episode, weights are bounded by
`max_weight` (as in Peng et al. 2019, arXiv:1910.00177), advantages are computed once for each batch, and the value
error counts in units of c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from penstock import ops
from penstock.agents.actor_critic import actor_critic
from penstock.agents.agent import Agent
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.limits import Bound, Chance, Count, Limit, Rate, Share, Weight
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import Loss
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, MinibatchSettings
from penstock.learn.slot_partition import batch_mean
from penstock.native.elementwise import exp


def agent_fn(spec: EnvSpec, settings: Any) -> Agent:
    """The default agent with MARWIL's running norm; by it other algorithms go on with a MARWIL run (`--algo.agent`)."""
    return with_norm(actor_critic(spec, settings))


def with_norm(agent: Agent) -> Agent:
    """The agent, with buffers for the running mean of A^2 and how many batches made it; checkpoints hold them."""
    if "advantage_square" not in dict(agent.named_buffers()):
        agent.register_buffer("advantage_square", torch.zeros(()))
        agent.register_buffer("advantage_batches", torch.zeros(()))
    return agent


def postprocess_fn(agent: Agent, batch: SampleBatch, cfg: MARWIL) -> TrainBatch:
    """Returns R and weights exp(beta * (R - V) / c) of a batch [T, B]; c^2: running mean of (R - V)^2 (section 4)."""
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
    square, batches = agent.get_buffer("advantage_square"), agent.get_buffer("advantage_batches")
    batches += 1.0
    rate = (1.0 / batches).clamp(min=cfg.norm_rate)
    square += rate * (batch_mean(advantage.square(), batch.valid) - square)
    norm = square.sqrt() + 1e-8
    weight = exp(cfg.beta * advantage / norm).clamp(max=cfg.max_weight)
    metrics = {
        "explained_variance": ops.explained_variance(value[:-1], return_, batch.valid),
        "advantage_norm": norm,
        "weight_mean": ops.masked_mean(weight, batch.valid),
        "weight_clipped": ops.masked_mean((weight >= cfg.max_weight).float(), batch.valid),
    }
    rows = {"action": batch.action, "weight": weight, "return": return_}
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: Agent, x: TrainBatch, cfg: MARWIL) -> Loss:
    """-w * log pi(a|s) + value_coef * ((V - R) / c)^2 / 2 - entropy_coef * H  (algorithm 1; BC with beta = 0)."""
    dist, value = agent(x.inputs, x.state)
    logp = dist.log_prob(x["action"])
    policy_loss = -ops.masked_mean(x["weight"] * logp, x.valid)
    value_loss = 0.5 * ops.squared_error(value, x["return"], x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    # In units of c: large returns would leave the policy nothing of the gradient of a shared body.
    scaled = value_loss / (agent.get_buffer("advantage_square") + 1e-8)
    total = policy_loss + cfg.value_coef * scaled - cfg.entropy_coef * entropy
    metrics = {
        "policy_gradient_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": -entropy,
        "loss": total,
        "neglogp": -ops.masked_mean(logp, x.valid),
    }
    return Loss(total, {name: value.detach() for name, value in metrics.items()})


optimizer_fn = adam


def _agent_with_norm(spec: EnvSpec, cfg: MARWIL) -> Agent:
    return with_norm(cfg.agent(spec, cfg))


@dataclass(frozen=True)
class MARWIL(MinibatchSettings):
    """Settings of MARWIL."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, agent=_agent_with_norm)
    offline: ClassVar[bool] = True
    """Learns from a dataset, which an OfflineSampler plays back."""

    lr: Rate = 1e-3
    """Adam's step size, usually 1e-4 to 1e-3."""
    discount: Chance = 0.99
    """Weight of the next step's reward in returns, usually 0.9 to 0.999."""
    beta: Weight = 1.0
    """Weight of the advantage in an action's weight, usually 0.5 to 3; 0 imitates all actions alike."""
    value_coef: Weight = 1.0
    """Weight of half the squared value error over c^2, which does not depend on the size of rewards."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus per nat, usually 0."""
    max_weight: Annotated[float, Limit(1.0, math.inf)] = 20.0
    """Largest weight of a step, so that a few steps cannot dominate a batch."""
    norm_rate: Share = 0.01
    """Share of a batch in c^2, the running mean of A^2; the first batches count equally."""
    epochs: Count = 1
    """Passes over each batch; the sampler passes over the dataset by itself."""
    minibatch: Count = 256
    """Rows of a gradient step; a batch is cut into round(T * B / minibatch) parts."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm."""
