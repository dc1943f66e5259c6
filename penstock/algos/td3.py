"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1).

Differs from the paper: actor and critics step at the same parameters where both are due, n-step targets may be used,
and truncated episodes bootstrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from penstock import ops
from penstock.agents.continuous import ControlAgent, control_agent
from penstock.agents.distributions import standard_normal
from penstock.core.batch import TrainBatch
from penstock.core.limits import Count, Limit, Positive, Rate, Weight
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.replay.replay import Replay, ReplaySchedule, make_view


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: TD3) -> TrainBatch:
    """Adds `target` = r + discount * min_k Q_target(s', a'), a' = mu_target(s') + clipped noise (eq. 14, 15)."""
    following = x["next"]
    noise = (cfg.target_noise * standard_normal(x["noise"])).clamp(-cfg.target_noise_clip, cfg.target_noise_clip)
    action = (agent.target_point(following) + noise).clamp(-1.0, 1.0)
    target = agent.scaled_reward(x["return"]) + x["discount"] * agent.target_q(following, action).amin(0)
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: TD3) -> Loss:
    """Critics: (Q - target)^2. Actor, every `policy_delay` steps: -Q_1(s, mu(s))  (section 5.2)."""
    q = agent.q(x.inputs, agent.box.to_unit(x["action"]))
    critic_loss, priorities = ops.critic_loss(q, x["target"], x.rows.get("weight"))
    totals, metrics = {"critic": critic_loss}, {"critic_loss": critic_loss, "q": x["target"].mean()}
    if x["update"] % cfg.policy_delay == cfg.policy_delay - 1:
        totals["actor"] = metrics["actor_loss"] = -agent.smallest_q(x.inputs, agent.point(x.inputs), of=1).mean()
    return Loss(totals, {name: value.detach() for name, value in metrics.items()}, priorities)


def optimizer_fn(agent: ControlAgent, cfg: TD3) -> Optimizers:
    """An optimizer for the critics and one for the actor."""
    return {
        "critic": make_optimizer(agent.critics.parameters(), cfg),
        "actor": make_optimizer(agent.actor.parameters(), cfg, cfg.actor_lr),
    }


def replay_fn(agent: ControlAgent, cfg: TD3) -> ReplaySchedule:
    """Transitions with noise for the target action; targets move with the actor."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)

    def after_update(agent: ControlAgent, cfg: TD3, updates: int) -> None:
        if updates % cfg.policy_delay == 0:
            agent.update_targets(cfg.tau)

    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        noise_size=agent.box.size,
        after_update=after_update,
    )


def agent_fn(spec: EnvSpec, cfg: TD3) -> ControlAgent:
    """The default agent: a deterministic actor and `critics` critics, with targets of both."""
    return control_agent(spec, cfg)


@dataclass(frozen=True)
class TD3(OffPolicySettings):
    """Settings of TD3."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = OffPolicySettings.fixed | {"critics"}

    lr: Rate = 1e-3
    """Adam's step size of the critics, usually 3e-4 to 1e-3."""
    actor_lr: Positive | None = None
    """Step size of the actor; None for the critics' `lr`."""
    policy_delay: Count = 2
    """Gradient steps of the critics for each step of the actor and the targets."""
    exploration_noise: Weight = 0.1
    """Standard deviation of the noise on actions, in units of half the box."""
    target_noise: Weight = 0.2
    """Standard deviation of the noise on target actions, in units of half the box."""
    target_noise_clip: Annotated[float, Limit(0.0, math.inf)] = 0.5
    """Largest noise on target actions."""
    critics: Count = 2
    """Number of critics; targets use the smallest of their values, the actor the first critic."""
    agent: AgentFn = agent_fn
