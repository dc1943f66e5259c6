"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1).

`distributional="c51"` makes it FastTD3 (Seo et al. 2025, arXiv:2505.22642), with the settings of docs/td3.md.

Differs from the papers: actor and critics step at the same parameters where both are due, n-step targets may be used,
and truncated episodes bootstrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from penstock import ops
from penstock.agents.continuous import ControlAgent, control_agent
from penstock.agents.distributions import standard_normal
from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Limit, NotNegative, Number, Positive, Rate, Weight
from penstock.core.schedule import curve
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings, check_atoms
from penstock.native.elementwise import log_softmax, softmax
from penstock.replay.replay import Replay, ReplaySchedule, make_view


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: TD3) -> TrainBatch:
    """Adds `target` = r + discount * min_k Q_target(s', a'), a' = mu_target(s') + clipped noise (eq. 14, 15).

    With C51 that is a distribution over atoms: [N, 1, K] of the smallest mean, or [N, k, K] each critic's own.
    """
    following = x["next"]
    noise = (cfg.target_noise * standard_normal(x["noise"])).clamp(-cfg.target_noise_clip, cfg.target_noise_clip)
    action = (agent.target_point(following) + noise).clamp(-1.0, 1.0)
    reward, discount = agent.scaled_reward(x["return"]), x["discount"]
    if cfg.distributional == "c51":
        prob = softmax(agent.target_q(following, action))
        target = ops.categorical_targets(prob, reward, discount, agent.atoms, cfg.clipped_double)
    else:
        target = reward + discount * agent.target_q(following, action).amin(0)
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: TD3) -> Loss:
    """Critics: (Q - target)^2. Actor, every `policy_delay` steps: -Q_1(s, mu(s))  (section 5.2).

    With C51: the cross-entropy of targets, and minus the smallest mean of the critics' distributions (FastTD3).
    """
    q, target = agent.q(x.inputs, agent.box.to_unit(x["action"])), x["target"]
    if cfg.distributional == "c51":
        critic_loss, priorities = ops.categorical_loss(log_softmax(q), target, x.rows.get("weight"))
        target = target @ agent.atoms
    else:
        critic_loss, priorities = ops.critic_loss(q, target, x.rows.get("weight"))
    totals, metrics = {"critic": critic_loss}, {"critic_loss": critic_loss, "q": target.mean()}
    if x["update"] % cfg.policy_delay == cfg.policy_delay - 1:
        action = agent.point(x.inputs)
        if cfg.distributional == "c51":
            value = agent.pooled_q(x.inputs, action, cfg.clipped_double)
        else:
            value = agent.smallest_q(x.inputs, action, of=1)
        totals["actor"] = metrics["actor_loss"] = -value.mean()
    return Loss(totals, {name: value.detach() for name, value in metrics.items()}, priorities)


def optimizer_fn(agent: ControlAgent, cfg: TD3) -> Optimizers:
    """An optimizer for the critics and one for the actor."""
    return {
        "critic": make_optimizer(agent.critics.parameters(), cfg),
        "actor": make_optimizer(agent.actor.parameters(), cfg, cfg.actor_lr),
    }


def replay_fn(agent: ControlAgent, cfg: TD3) -> ReplaySchedule:
    """Transitions with noise for the target action; targets move with the actor, or as often as asked."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)
    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        noise_size=agent.box.size,
        after_update=after_update,
    )


def after_update(agent: ControlAgent, cfg: TD3, updates: int) -> None:
    """Moves the targets where an update of them is due."""
    if updates % (cfg.target_interval or cfg.policy_delay) == 0:
        agent.update_targets(cfg.tau)


def agent_fn(spec: EnvSpec, cfg: TD3) -> ControlAgent:
    """The default agent: a deterministic actor and `critics` critics, with targets of both."""
    return control_agent(spec, cfg)


@dataclass(frozen=True)
class TD3(OffPolicySettings):
    """Settings of TD3."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = OffPolicySettings.fixed | {
        "critics", "distributional", "n_atoms", "v_min", "v_max", "target_actor", "exploration_noise_low",
    }  # fmt: skip

    lr: Rate = 1e-3
    """Adam's step size of the critics, usually 3e-4 to 1e-3."""
    actor_lr: Positive | None = None
    """Step size of the actor; None for the critics' `lr`."""
    policy_delay: Count = 2
    """Gradient steps of the critics for each step of the actor, and of the targets unless `target_interval` says."""
    target_interval: Count | None = None
    """Gradient steps between updates of the targets; None: `policy_delay`. 1 in FastTD3."""
    target_actor: bool = True
    """The next action is that of a target actor; False: the actor's own, as in FastTD3."""
    exploration_noise: Weight = 0.1
    """Standard deviation of the noise on actions, in units of half the box; with `exploration_noise_low` the largest of
    any slot."""
    exploration_noise_low: NotNegative | None = None
    """The noise of slot 0, from which slots are spread evenly up to `exploration_noise`; 0.001 to 0.2 in FastTD3. None:
    the same for all."""
    target_noise: Weight = 0.2
    """Standard deviation of the noise on target actions, in units of half the box."""
    target_noise_clip: Annotated[float, Limit(0.0, math.inf)] = 0.5
    """Largest noise on target actions."""
    critics: Count = 2
    """Number of critics; targets use the smallest of their values, the actor the first critic."""
    distributional: Literal["none", "c51"] = "none"
    """`c51`: critics learn the distribution of returns over fixed atoms (Bellemare et al. 2017), as in FastTD3."""
    n_atoms: Annotated[int, Limit(2)] = 51
    """Atoms of C51; 101 in FastTD3."""
    v_min: Number = -10.0
    """Smallest return that C51 can tell apart."""
    v_max: Number = 10.0
    """Largest return that C51 can tell apart."""
    clipped_double: bool = True
    """C51: all critics learn the target of the smallest mean, and the actor takes the smallest mean; False: each critic
    learns its own, and the actor takes the mean of all."""
    agent: AgentFn = agent_fn

    def __post_init__(self) -> None:
        super().__post_init__()
        check_atoms(self)
        if (low := self.exploration_noise_low) is not None and low > curve(self.exploration_noise).highest:
            raise ConfigError(
                f"exploration_noise_low={low}, exploration_noise={self.exploration_noise}; expected a low one of at "
                "most the other: slots are spread evenly from the low one, in slot 0, to the other, in the last"
            )
