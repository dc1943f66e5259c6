"""PPO: proximal policy optimization with a clipped surrogate (Schulman et al. 2017, arXiv:1707.06347).

Differs from the paper: value loss on minibatches without clipping (Andrychowicz et al. 2021 find that clipping it
hurts), advantages normalised over the whole batch, and truncated episodes bootstrap with the value of their last
observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from penstock import ops
from penstock.agents.actor_critic import ActorCritic, actor_critic
from penstock.agents.networks import Net
from penstock.core.batch import SampleBatch
from penstock.core.config import check_fields
from penstock.core.errors import ConfigError
from penstock.core.schedule import Schedule, check_schedules, schedule_ends
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.learn.algorithm import AgentFn, Loss
from penstock.learn.minibatch import TrainBatch
from penstock.learn.optimizers import adam
from penstock.learn.policy import Policy


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
    if cfg.normalize_advantage:
        advantage = ops.normalized(advantage, batch.valid)
    metrics = {"explained_variance": ops.explained_variance(value[:-1], return_, batch.valid)}
    rows = {"action": batch.action, "logp": batch.info["logp"], "advantage": advantage, "return": return_}
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: ActorCritic, x: TrainBatch, cfg: PPO) -> Loss:
    """-min(ratio * A, clip(ratio) * A) + value_coef * (V - R)^2 / 2 - entropy_coef * H  (eq. 7 and 9)."""
    dist, value = agent(x.inputs, x.state)
    clip, entropy_coef = float(cfg.clip), float(cfg.entropy_coef)  # schedules are numbers by now
    log_ratio = dist.log_prob(x["action"]) - x["logp"]
    surrogate, ratio = ops.clipped_surrogate(log_ratio, x["advantage"], clip)
    policy_loss = ops.masked_mean(surrogate, x.valid)
    value_loss = 0.5 * ops.squared_error(value, x["return"], x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    total = policy_loss + cfg.value_coef * value_loss - entropy_coef * entropy
    with torch.no_grad():
        metrics = {
            "policy_gradient_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy_loss": -entropy.detach(),
            "loss": total.detach(),
            "approx_kl": ops.masked_mean(ops.approx_kl(log_ratio, ratio), x.valid),
            "clip_fraction": ops.masked_mean(((ratio - 1.0).abs() > clip).float(), x.valid),
        }
    return Loss(total, metrics)


optimizer_fn = adam


@dataclass(frozen=True)
class PPO:
    """Settings of PPO."""

    lr: Schedule = 3e-4
    """Adam's step size, usually 1e-4 to 1e-3; `linear(3e-4, 0)` anneals it over the run."""
    discount: float = 0.99
    """Weight of the next step's value, usually 0.9 to 0.999."""
    gae_lambda: float = 0.95
    """Bias against variance of advantages, usually 0.9 to 1."""
    clip: Schedule = 0.2
    """How far the probability ratio may move, usually 0.1 to 0.3."""
    entropy_coef: Schedule = 0.0
    """Weight of the entropy bonus per nat, usually 0 to 0.02."""
    value_coef: float = 0.5
    """Weight of half the squared value error (others weigh the whole); it matters only for a shared body."""
    epochs: int = 4
    """Passes over each batch, usually 3 to 20."""
    minibatch: int = 512
    """Rows of a gradient step; a batch is cut into round(T * B / minibatch) parts."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    normalize_advantage: bool = True
    """Shift and scale the advantages of each batch to mean 0 and deviation 1."""
    net: Net = Net()
    """Networks of the default agent."""
    agent: AgentFn = actor_critic
    """Makes the agent from (spec, settings): `my_module:my_agent_fn` on the command line."""
    batch: ClassVar[BatchSpec] = BatchSpec(T=128, B=16)
    """T and B of the sampler, where a run names none."""
    takes_stale: ClassVar[bool] = True
    """Batches of an earlier policy are corrected for by the ratio to the recorded log-probabilities."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_schedules(self)
        if not 0.0 <= self.discount <= 1.0 or not 0.0 <= self.gae_lambda <= 1.0:
            raise ConfigError(f"discount={self.discount}, gae_lambda={self.gae_lambda}; both must lie in [0, 1]")
        if self.epochs < 1 or self.minibatch < 1:
            raise ConfigError(f"epochs={self.epochs}, minibatch={self.minibatch}; both must be at least 1")
        starts, ends = zip(*(schedule_ends(getattr(self, name)) for name in ("lr", "clip")))
        if min(*starts, self.max_grad_norm) <= 0.0 or min(ends) < 0.0:
            raise ConfigError(
                f"lr={self.lr}, clip={self.clip}, max_grad_norm={self.max_grad_norm}; expected positive numbers"
            )

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu") -> Policy:
        """The live policy for an environment."""
        return Policy(
            self,
            spec,
            agent_fn=self.agent,
            postprocess_fn=postprocess_fn,
            loss_fn=loss_fn,
            optimizer_fn=optimizer_fn,
            epochs=self.epochs,
            minibatch=self.minibatch,
            max_grad_norm=self.max_grad_norm,
            seed=seed,
            device=device,
        )
