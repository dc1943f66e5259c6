"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1).

Differs from the paper: Gaussian exploration noise (Fujimoto et al. 2018 find nothing better in the correlated one),
no batch normalisation or weight decay, n-step targets may be used, and truncated episodes bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock import ops
from penstock.agents.continuous import ControlAgent, control_agent
from penstock.core.batch import TrainBatch
from penstock.core.limits import Positive, Rate, Weight
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.replay.replay import Replay, ReplaySchedule, make_view


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: DDPG) -> TrainBatch:
    """Adds `target` = r + discount * Q_target(s', mu_target(s'))  (algorithm 1)."""
    following = x["next"]
    value = agent.target_q(following, agent.target_point(following))[0]
    target = agent.scaled_reward(x["return"]) + x["discount"] * value
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: DDPG) -> Loss:
    """Critic: (Q - target)^2. Actor: -Q(s, mu(s)), whose gradient is eq. 6."""
    q = agent.q(x.inputs, agent.box.to_unit(x["action"]))
    critic_loss, priorities = ops.critic_loss(q, x["target"], x.rows.get("weight"))
    actor_loss = -agent.smallest_q(x.inputs, agent.point(x.inputs)).mean()
    metrics = {"critic_loss": critic_loss, "actor_loss": actor_loss, "q": x["target"].mean()}
    return Loss(
        {"critic": critic_loss, "actor": actor_loss},
        {name: value.detach() for name, value in metrics.items()},
        priorities,
    )


def optimizer_fn(agent: ControlAgent, cfg: DDPG) -> Optimizers:
    """An optimizer for the critic and one for the actor."""
    return {
        "critic": make_optimizer(agent.critics.parameters(), cfg),
        "actor": make_optimizer(agent.actor.parameters(), cfg, cfg.actor_lr),
    }


def replay_fn(agent: ControlAgent, cfg: DDPG) -> ReplaySchedule:
    """Transitions, and soft updates of both targets."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)

    def after_update(agent: ControlAgent, cfg: DDPG, updates: int) -> None:
        agent.update_targets(cfg.tau)

    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        after_update=after_update,
    )


def agent_fn(spec: EnvSpec, cfg: DDPG) -> ControlAgent:
    """The default agent: a deterministic actor and one critic, with targets of both."""
    return control_agent(spec, cfg)


@dataclass(frozen=True)
class DDPG(OffPolicySettings):
    """Settings of DDPG."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)

    lr: Rate = 1e-3
    """Adam's step size of the critic, usually 3e-4 to 1e-3."""
    actor_lr: Positive | None = None
    """Adam's step size of the actor; None for the critic's `lr`. 1e-4 in the paper."""
    exploration_noise: Weight = 0.1
    """Standard deviation of the noise on actions, in units of half the box."""
    agent: AgentFn = agent_fn
