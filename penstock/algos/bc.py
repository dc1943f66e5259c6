"""BC: behaviour cloning, maximum likelihood of a dataset's actions.

Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation".

Differs from the paper: the likelihood of any action space instead of a squared error, and an optional entropy bonus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock import ops
from penstock.agents.actor_critic import ActorCritic
from penstock.agents.agent import output_of
from penstock.agents.networks import Net
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.limits import Bound, Chance, Count, Rate, Weight
from penstock.learn.algorithm import Loss
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, MinibatchSettings


def postprocess_fn(agent: ActorCritic, batch: SampleBatch, cfg: BC) -> TrainBatch:
    """Observations and actions of a batch [T, B]; rewards play no part."""
    return TrainBatch(agent.needed(batch.inputs_t), {"action": batch.action}, batch.valid, batch.state)


def loss_fn(agent: ActorCritic, x: TrainBatch, cfg: BC) -> Loss:
    """-log pi(a|s) - entropy_coef * H, the mean over steps of the dataset."""
    dist = output_of(agent, agent(x.inputs, x.state), "dist")
    neglogp = -ops.masked_mean(dist.log_prob(x["action"]), x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    total = neglogp - cfg.entropy_coef * entropy
    metrics = {"neglogp": neglogp, "entropy_loss": -entropy, "loss": total}
    return Loss(total, {name: value.detach() for name, value in metrics.items()})


optimizer_fn = adam


@dataclass(frozen=True)
class BC(MinibatchSettings):
    """Settings of BC."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn)
    offline: ClassVar[bool] = True
    """Learns from a dataset, which an OfflineSampler plays back."""

    lr: Rate = 1e-3
    """Adam's step size, usually 1e-4 to 1e-3."""
    discount: Chance = 0.99
    """Discount of the returns that `net.normalize_reward` scales rewards by; the loss uses no return."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus per nat, usually 0; up to 0.01 keeps a policy from becoming certain on few data."""
    epochs: Count = 1
    """Passes over each batch; the sampler passes over the dataset by itself."""
    minibatch: Count = 256
    """Rows of a gradient step; a batch is cut into round(T * B / minibatch) parts."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm."""
    net: Net = Net()
    """Networks of the default agent; its critic is not trained."""
