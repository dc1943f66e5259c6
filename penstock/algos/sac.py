"""SAC: soft actor-critic with twin critics and automatic temperature (Haarnoja et al. 2018, arXiv:1812.05905).

Differs from the paper: all three losses of a step are taken at the same parameters, n-step targets may be used, and
truncated episodes bootstrap. Entropy is that of actions scaled from the environment's bounds to [-1, 1].
`distributional="c51"` makes it FastSAC (Seo et al. 2025, arXiv:2512.01996), with the settings of docs/sac.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from penstock import ops
from penstock.agents.continuous import ControlAgent, control_agent
from penstock.agents.distributions import mean_std, squashed_sample, standard_normal
from penstock.core.batch import TrainBatch
from penstock.core.limits import Count, Limit, Number, Positive, Rate
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings, check_atoms
from penstock.native.elementwise import exp, log_softmax, softmax
from penstock.replay.replay import Replay, ReplaySchedule, make_view


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: SAC) -> TrainBatch:
    """Adds `target` = r + discount * (min_k Q_target(s', a') - alpha log pi(a'|s')), a' ~ pi  (eq. 2 and 3).

    With C51 that is a distribution over atoms: [N, 1, K] of the smallest mean, or [N, k, K] each critic's own.
    """
    following = x["next"]
    noise, next_noise = x["noise"].chunk(2, -1)
    action, logp = agent.sample(following, next_noise)
    if cfg.distributional == "c51":
        reward = agent.scaled_reward(x["return"]) - x["discount"] * (alpha(agent) * logp)
        prob = softmax(agent.target_q(following, action))
        target = ops.categorical_targets(prob, reward, x["discount"], agent.atoms, cfg.clipped_double)
    else:
        value = agent.target_q(following, action).amin(0) - alpha(agent) * logp
        target = agent.scaled_reward(x["return"]) + x["discount"] * value
    return TrainBatch(x.inputs, {**x.rows, "noise": noise, "target": target}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: SAC) -> Loss:
    """Critics: (Q - target)^2 / 2 (eq. 5). Actor: alpha log pi - min_k Q (eq. 7). Temperature: eq. 18, in log alpha.

    With C51: the cross-entropy of targets, and in place of min_k Q the smallest mean of the critics' distributions, or
    the mean over critics.
    """
    q = agent.q(x.inputs, agent.box.to_unit(x["action"]))
    if cfg.distributional == "c51":
        logp = log_softmax(q)
        critic_loss, priorities = ops.categorical_loss(logp, x["target"], x.rows.get("weight"))
        first = exp(logp.detach()[0]) @ agent.atoms
        totals, metrics = actor_losses(agent, x, cfg, lambda a: agent.pooled_q(x.inputs, a, cfg.clipped_double))
    else:
        squares, priorities = ops.critic_loss(q, x["target"], x.rows.get("weight"))
        critic_loss, first = 0.5 * squares, q.detach()[0]
        totals, metrics = actor_losses(agent, x, cfg, lambda a: agent.smallest_q(x.inputs, a))
    metrics = {"critic_loss": critic_loss.detach(), **metrics, "q": first.mean()}
    return Loss({"critic": critic_loss, **totals}, metrics, priorities)


def actor_losses(
    agent: ControlAgent, x: TrainBatch, cfg: SAC, q: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses of actor, alpha log pi - Q (eq. 7), and temperature, and their metrics; {} where no step of them is due.

    Args:
        q: [N] values of actions [N, size] in [-1, 1].
    """
    if cfg.policy_delay > 1 and x["update"] % cfg.policy_delay != cfg.policy_delay - 1:
        return {}, {}
    out = agent(x.inputs)
    action, logp = squashed_sample(out, standard_normal(x["noise"]))
    temperature = alpha(agent)
    totals = {"actor": (temperature * logp - q(action)).mean()}
    entropy = -logp.detach().mean()
    if cfg.alpha == "auto":
        assert agent.log_alpha is not None
        totals["alpha"] = agent.log_alpha.squeeze(0) * (entropy - target_entropy(agent, cfg))
    metrics = {"actor_loss": totals["actor"].detach(), "ent_coef": temperature, "entropy": entropy}
    return totals, {**metrics, "action_std": mean_std(out)}


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
    fixed = OffPolicySettings.fixed | {"critics", "distributional", "n_atoms", "v_min", "v_max", "alpha_init"}

    actor_lr: Positive | None = None
    """Step size of the actor; None for the critics' `lr`."""
    alpha_lr: Positive | None = None
    """Step size of the temperature; None for the critics' `lr`."""
    policy_delay: Count = 1
    """Gradient steps of the critics for each step of actor and temperature; 4 in FastSAC."""
    target_interval: Count = 1
    """Gradient steps between updates of the target critics."""
    alpha: Rate | Literal["auto"] = "auto"
    """Temperature, or `auto` to learn it."""
    alpha_init: Positive = 1.0
    """The temperature that `auto` begins with; 0.001 in FastSAC."""
    target_entropy: Number | None = None
    """Entropy in nats, of actions scaled to [-1, 1], that `auto` aims at; None: minus the number of elements."""
    critics: Count = 2
    """Number of critics; targets and the actor use the smallest of their values."""
    distributional: Literal["none", "c51"] = "none"
    """`c51`: critics learn the distribution of returns over fixed atoms (Bellemare et al. 2017), as in FastSAC."""
    n_atoms: Annotated[int, Limit(2)] = 51
    """Atoms of C51; 101 in FastSAC."""
    v_min: Number = -10.0
    """Smallest return, entropy included, that C51 can tell apart; -20 in FastSAC."""
    v_max: Number = 10.0
    """Largest return, entropy included, that C51 can tell apart; 20 in FastSAC."""
    clipped_double: bool = True
    """C51: all critics learn the target of the smallest mean, and the actor takes the smallest mean; False, as in
    FastSAC: each critic learns its own, and the actor takes the mean of all."""
    agent: AgentFn = agent_fn

    def __post_init__(self) -> None:
        super().__post_init__()
        check_atoms(self)
