"""Discrete SAC: soft actor-critic for choices, with expectations over actions (Christodoulou 2019, arXiv:1910.07207).

Differs from the paper: all three losses of a step are taken at the same parameters, n-step targets may be used,
truncated episodes bootstrap, masked actions count for nothing, and the target entropy is a smaller share of the largest
one (`entropy_share`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from penstock import ops
from penstock.agents.discrete_control import DiscreteControlAgent, discrete_control_agent
from penstock.core.batch import TrainBatch
from penstock.core.limits import Chance, Count, Positive, Rate, Whole
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.native.elementwise import exp, log
from penstock.replay.replay import Replay, ReplaySchedule, make_view


def postprocess_fn(agent: DiscreteControlAgent, x: TrainBatch, cfg: DiscreteSAC) -> TrainBatch:
    """Adds `target` = r + discount * sum_a pi(a|s') (min_k Q_target(s', a) - alpha log pi(a|s'))  (eq. 2, 3 and 10)."""
    following = x["next"]
    logp = agent(following)
    value = (exp(logp) * (agent.target_q(following).amin(0) - alpha(agent) * logp)).sum(-1)
    target = agent.scaled_reward(x["return"]) + agent.unless_stuck(following, x["discount"]) * value
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_fn(agent: DiscreteControlAgent, x: TrainBatch, cfg: DiscreteSAC) -> Loss:
    """Critics: (Q - target)^2 / 2 (eq. 4). Actor: sum_a pi (alpha log pi - min_k Q) (eq. 12). Temperature: eq. 11."""
    q = agent.q(x.inputs)
    index = agent.index(x["action"]).view(1, -1, 1).expand(len(q), -1, 1)
    squares, priorities = ops.critic_loss(q.gather(2, index).squeeze(2), x["target"], x.rows.get("weight"))
    critic_loss = 0.5 * squares
    logp = agent(x.inputs)
    p = exp(logp)
    actor_loss = (p * (alpha(agent) * logp - q.detach().amin(0))).sum(-1).mean()
    totals = {"critic": critic_loss, "actor": actor_loss}
    entropy = -(p * logp).detach().sum(-1)
    if cfg.alpha == "auto":
        wanted = cfg.entropy_share * log(agent.legal_count(x.inputs))
        totals["alpha"] = (agent.log_alpha * (entropy - wanted).mean()).mean()
    metrics = {
        "critic_loss": critic_loss,
        "actor_loss": actor_loss,
        "ent_coef": alpha(agent),
        "entropy": entropy.mean(),
        "q": q[0].mean(),
    }
    return Loss(totals, {name: value.detach() for name, value in metrics.items()}, priorities)


def alpha(agent: DiscreteControlAgent) -> Tensor:
    """The temperature, without gradient."""
    return exp(agent.log_alpha.detach()).squeeze(0)


def optimizer_fn(agent: DiscreteControlAgent, cfg: DiscreteSAC) -> Optimizers:
    """An optimizer for each of critics, actor and temperature."""
    out: Optimizers = {
        "critic": make_optimizer(agent.critics.parameters(), cfg),
        "actor": make_optimizer(agent.actor.parameters(), cfg, cfg.actor_lr),
    }
    if cfg.alpha == "auto":
        out["alpha"] = make_optimizer([agent.log_alpha], cfg, cfg.alpha_lr, decays=False)
    return out


def replay_fn(agent: DiscreteControlAgent, cfg: DiscreteSAC) -> ReplaySchedule:
    """Transitions, and soft target updates."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)

    def after_update(agent: DiscreteControlAgent, cfg: DiscreteSAC, updates: int) -> None:
        if updates % cfg.target_interval == 0:
            agent.update_targets(cfg.tau)

    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        after_update=after_update,
    )


def agent_fn(spec: EnvSpec, cfg: DiscreteSAC) -> DiscreteControlAgent:
    """The default agent: categorical actor and `critics` critics."""
    return discrete_control_agent(spec, cfg)


@dataclass(frozen=True)
class DiscreteSAC(OffPolicySettings):
    """Settings of discrete SAC."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = OffPolicySettings.fixed | {"critics"}

    actor_lr: Positive | None = None
    """Step size of the actor; None for the critics' `lr`."""
    alpha_lr: Positive | None = None
    """Step size of the temperature; None for the critics' `lr`."""
    batch_size: Count = 64
    """Transitions of a gradient step, usually 64 to 512; 64 in the paper."""
    replay_ratio: Positive = 64.0
    """Rows trained on for each row collected; 64 with batch_size 64 is a gradient step for each environment step."""
    learning_starts: Whole = 1_000
    """Steps of random actions before the first gradient step."""
    target_interval: Count = 1
    """Gradient steps between updates of the target critics."""
    alpha: Rate | Literal["auto"] = "auto"
    """Temperature, or `auto` to learn it."""
    entropy_share: Chance = 0.5
    """Entropy that `auto` aims at, as a share of the largest one, log(legal actions); usually 0.2 to 0.98.

    The paper's 0.98 lets a policy of two actions take the better one in 58 of 100 steps; 0.5 in 89.
    """
    critics: Count = 2
    """Number of critics; targets and the actor use the smallest of their values."""
    agent: AgentFn = agent_fn
