"""TQC: SAC with truncated mixtures of quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269).

The largest of the pooled quantiles are dropped from targets, which governs overestimation in small steps, where SAC
takes the least of two critics. Differs from the paper: all three losses of a step are taken at the same parameters,
n-step targets may be used, truncated episodes bootstrap, and there are 2 critics, not 5, as in sb3-contrib.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock import ops
from penstock.agents.continuous import ControlAgent
from penstock.algos.sac import SAC, actor_losses, alpha, optimizer_fn, replay_fn
from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Whole
from penstock.learn.algorithm import Loss
from penstock.learn.settings import AlgorithmFunctions, refuse_atoms


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: TQC) -> TrainBatch:
    """Adds `target` [N, k (M - drop)]: r + discount * (z_i - alpha log pi(a'|s')) of the least atoms z_i  (eq. 11)."""
    following = x["next"]
    noise, next_noise = x["noise"].chunk(2, -1)
    action, logp = agent.sample(following, next_noise)
    atoms = agent.target_q(following, action).transpose(0, 1).flatten(1).sort(-1).values
    kept = atoms[:, : cfg.critics * (cfg.quantiles - cfg.drop)]
    value = kept - (alpha(agent) * logp).unsqueeze(1)
    target = agent.scaled_reward(x["return"]).unsqueeze(1) + x["discount"].unsqueeze(1) * value
    return TrainBatch(x.inputs, {**x.rows, "noise": noise, "target": target}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: TQC) -> Loss:
    """Critics: quantile Huber loss, a mean over M x targets (eq. 12 and 13). Actor: alpha log pi - mean Z (eq. 14)."""
    totals, metrics = actor_losses(agent, x, cfg, lambda a: agent.q(x.inputs, a).mean((0, 2)))
    z = agent.q(x.inputs, agent.box.to_unit(x["action"]))
    each = torch.stack([ops.quantile_huber(own, x["target"]) for own in z.unbind(0)]).sum(0) / cfg.quantiles
    critic_loss = (each * x["weight"]).mean() if "weight" in x.rows else each.mean()
    metrics = {"critic_loss": critic_loss.detach(), **metrics, "q": z.detach().mean()}
    priorities = (z.detach().mean((0, 2)) - x["target"].mean(1)).abs() if "weight" in x.rows else None
    return Loss({"critic": critic_loss, **totals}, metrics, priorities)


@dataclass(frozen=True)
class TQC(SAC):
    """Settings of TQC."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = SAC.fixed | {"quantiles"}

    critics: Count = 2
    """Number of critics, usually 2 to 5; 5 in the paper."""
    quantiles: Count = 25
    """Quantiles of each critic; 25 in the paper."""
    drop: Whole = 2
    """Largest quantiles dropped for each critic, of all of them together; usually 0 to 5, more where values are
    overestimated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_atoms(self)
        if self.drop >= self.quantiles:
            raise ConfigError(f"drop={self.drop} of quantiles={self.quantiles} leaves none; expected drop < quantiles")
