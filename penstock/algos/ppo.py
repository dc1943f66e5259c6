"""PPO: proximal policy optimization with a clipped surrogate (Schulman et al. 2017, arXiv:1707.06347).

Differs from the paper: value loss on minibatches, by default without clipping (Andrychowicz et al. 2021 find that
clipping it hurts), and in units of returns (`ValueScale`), advantages normalised over the whole batch, and truncated
episodes bootstrap with the value of their last observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from penstock import ops
from penstock.agents.actor_critic import ActorCritic, value_unit
from penstock.agents.distributions import kl_from
from penstock.algos.rnd import RND
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.limits import Bound, Chance, Rate, Weight
from penstock.core.spec import BatchSpec
from penstock.learn.algorithm import Loss
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, MinibatchSettings
from penstock.learn.slot_partition import moved_unit


def postprocess_fn(agent: ActorCritic, batch: SampleBatch, cfg: PPO) -> TrainBatch:
    """Advantages and returns of a batch [T, B]; values are computed here, once, not while acting."""
    value = agent.values(batch)
    advantage, return_ = ops.gae(
        agent.scaled_reward(batch.reward),
        value,
        agent.terminal(batch),
        batch.truncated,
        batch.valid,
        discount=cfg.discount,
        gae_lambda=cfg.gae_lambda,
    )
    metrics = {"explained_variance": ops.explained_variance(value[:-1], return_, batch.valid)}
    advantage = advantage / moved_unit(agent, return_, batch.valid)
    rows = {"action": batch.action, "logp": batch.info["logp"], "advantage": advantage, "return": return_}
    if cfg.value_clip is not None:
        rows["value"] = value[:-1]
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: ActorCritic, x: TrainBatch, cfg: PPO) -> Loss:
    """-min(ratio * A, clip(ratio) * A) + value_coef * (V - R)^2 / 2 - entropy_coef * H  (eq. 7 and 9)."""
    dist, value = agent(x.inputs, x.state)
    log_ratio = dist.log_prob(x["action"]) - x["logp"]
    surrogate, ratio = ops.clipped_surrogate(log_ratio, x["advantage"], cfg.clip)
    policy_loss = ops.masked_mean(surrogate, x.valid)
    if cfg.value_clip is None:
        value_loss = 0.5 * ops.squared_error(value, x["return"], x.valid)
    else:
        clip = cfg.value_clip * value_unit(agent)
        value_loss = 0.5 * ops.clipped_squared_error(value, x["return"], x["value"], clip, x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    total = policy_loss + cfg.value_coef * value_loss / value_unit(agent) ** 2 - cfg.entropy_coef * entropy
    with torch.no_grad():
        kl = ops.masked_mean(ops.approx_kl(log_ratio, ratio), x.valid)
        metrics = {
            "policy_gradient_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy_loss": -entropy.detach(),
            "loss": total.detach(),
            "approx_kl": kl,
            "clip_fraction": ops.masked_mean(((ratio - 1.0).abs() > cfg.clip).float(), x.valid),
        }
        if "moments" in x.rows:  # for lr="kl(...)"
            metrics["kl"] = ops.masked_mean(kl_from(x["moments"], dist), x.valid)
    return Loss(total, metrics, limits={} if cfg.target_kl is None else {"approx_kl": 1.5 * cfg.target_kl})


optimizer_fn = adam


@dataclass(frozen=True)
class PPO(MinibatchSettings):
    """Settings of PPO."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn)
    recurrent_batch = BatchSpec(T=32, B=8)
    reports_kl = True
    takes_stale = True
    """The ratio to the recorded log-probabilities corrects for batches of an earlier policy."""
    recomputes_logp: ClassVar[bool] = True
    """Recorded log-probabilities that differ from the learner's own by rounding alone are replaced by these."""

    gae_lambda: Chance = 0.95
    """Bias against variance of advantages, usually 0.9 to 1."""
    clip: Rate = 0.2
    """How far the probability ratio may move, usually 0.1 to 0.3."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus per nat, usually 0 to 0.02."""
    value_coef: Weight = 1.0
    """Weight of half the squared value error, usually 0.5 to 1: double the value used in libraries that weigh the full
    square. It matters for a shared body."""
    value_clip: Rate | None = None
    """How far a value may move from that before training on the batch until its loss counts no gain, in units of
    `normalize_value`, usually 0.2 in libraries that clip; None: no clipping, which Andrychowicz et al. 2021 prefer."""
    target_kl: Rate | None = None
    """Training on a batch stops at the first minibatch with `approx_kl` over 1.5 times this, usually 0.01 to 0.05;
    None: it never stops early."""
    max_grad_norm: Bound = 2.0
    """Gradients are scaled down to this norm, usually 0.5 to 10; actor and critic separately where they share
    nothing."""
    normalize_advantage: bool = True
    """Shift and scale the advantages of each batch to mean 0 and deviation 1."""
    normalize_value: bool = True
    """Learn values in units of the running root mean square of returns (`ValueScale`), and advantages too, so that the
    size of rewards does not matter."""
    rnd: RND | None = None
    """Explores by an intrinsic reward for what is new (random network distillation); None: without."""
