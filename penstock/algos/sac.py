"""SAC: soft actor-critic with twin critics and automatic temperature (Haarnoja et al. 2018, arXiv:1812.05905).

Differs from the paper: all three losses of a step are taken at the same parameters, n-step targets may be used, and
truncated episodes bootstrap. Entropy is that of actions scaled from the environment's bounds to [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from penstock import ops
from penstock.agents.continuous import ControlAgent, control_agent
from penstock.core.batch import TrainBatch
from penstock.core.limits import Count, Number, Positive, Rate
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.native.elementwise import exp
from penstock.replay.replay import Replay, ReplaySchedule, make_view


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: SAC) -> TrainBatch:
    """Adds `target` = r + discount * (min_k Q_target(s', a') - alpha log pi(a'|s')), a' ~ pi  (eq. 2 and 3)."""
    following = x["next"]
    noise, next_noise = x["noise"].chunk(2, -1)
    action, logp = agent.sample(following, next_noise)
    value = agent.target_q(following, action).amin(0) - alpha(agent) * logp
    target = agent.scaled_reward(x["return"]) + x["discount"] * value
    return TrainBatch(x.inputs, {**x.rows, "noise": noise, "target": target}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: SAC) -> Loss:
    """Critics: (Q - target)^2 / 2 (eq. 5). Actor: alpha log pi - min_k Q (eq. 7). Temperature: eq. 18, in log alpha."""
    action, logp = agent.sample(x.inputs, x["noise"])
    temperature = alpha(agent)
    actor_loss = (temperature * logp - agent.smallest_q(x.inputs, action)).mean()
    q = agent.q(x.inputs, agent.box.to_unit(x["action"]))
    squares, priorities = ops.critic_loss(q, x["target"], x.rows.get("weight"))
    critic_loss = 0.5 * squares
    totals = {"critic": critic_loss, "actor": actor_loss}
    entropy = -logp.detach().mean()
    if cfg.alpha == "auto":
        assert agent.log_alpha is not None
        totals["alpha"] = agent.log_alpha.squeeze(0) * (entropy - target_entropy(agent, cfg))
    metrics = {
        "critic_loss": critic_loss,
        "actor_loss": actor_loss,
        "ent_coef": temperature,
        "entropy": entropy,
        "q": q.detach()[0].mean(),
    }
    return Loss(totals, {name: value.detach() for name, value in metrics.items()}, priorities)


def alpha(agent: ControlAgent) -> torch.Tensor:
    """The temperature, without gradient."""
    assert agent.log_alpha is not None
    return exp(agent.log_alpha.detach()).squeeze(0)


def target_entropy(agent: ControlAgent, cfg: SAC) -> float:
    """-dim(A) unless set (Haarnoja et al. 2018, appendix D)."""
    return -float(agent.box.size) if cfg.target_entropy is None else cfg.target_entropy


def optimizer_fn(agent: ControlAgent, cfg: SAC) -> Optimizers:
    """An optimizer for each of critics, actor and temperature."""
    out: Optimizers = {
        "critic": make_optimizer(agent.critics.parameters(), cfg),
        "actor": make_optimizer(agent.actor.parameters(), cfg, cfg.actor_lr),
    }
    if cfg.alpha == "auto":
        assert agent.log_alpha is not None
        out["alpha"] = make_optimizer([agent.log_alpha], cfg, cfg.alpha_lr, decays=False)
    return out


def replay_fn(agent: ControlAgent, cfg: SAC) -> ReplaySchedule:
    """Transitions, two sets of noise for each (present and next action), and soft target updates."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)

    def after_update(agent: ControlAgent, cfg: SAC, updates: int) -> None:
        if updates % cfg.target_interval == 0:
            agent.update_targets(cfg.tau)

    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        noise_size=2 * agent.box.size,
        after_update=after_update,
    )


def agent_fn(spec: EnvSpec, cfg: SAC) -> ControlAgent:
    """The default agent: squashed Gaussian actor and `critics` critics."""
    return control_agent(spec, cfg)


@dataclass(frozen=True)
class SAC(OffPolicySettings):
    """Settings of SAC."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = OffPolicySettings.fixed | {"critics"}

    actor_lr: Positive | None = None
    """Step size of the actor; None for the critics' `lr`."""
    alpha_lr: Positive | None = None
    """Step size of the temperature; None for the critics' `lr`."""
    target_interval: Count = 1
    """Gradient steps between updates of the target critics."""
    alpha: Rate | Literal["auto"] = "auto"
    """Temperature, or `auto` to learn it."""
    target_entropy: Number | None = None
    """Entropy in nats, of actions scaled to [-1, 1], that `auto` aims at; None: minus the number of elements."""
    critics: Count = 2
    """Number of critics; targets and the actor use the smallest of their values."""
    agent: AgentFn = agent_fn
