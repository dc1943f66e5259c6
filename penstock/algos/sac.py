"""SAC: soft actor-critic with twin critics and automatic temperature (Haarnoja et al. 2018, arXiv:1812.05905).

Differs from the paper: all three losses of a step are taken at the same parameters, n-step targets may be used, and
truncated episodes bootstrap. Entropy is that of actions scaled to [-1, 1], whatever the environment's bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from penstock.agents.continuous import ControlAgent
from penstock.agents.networks import Net
from penstock.core.config import check_fields
from penstock.core.errors import ConfigError
from penstock.core.schedule import Schedule, check_schedules, schedule_ends
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.experience import Experience
from penstock.learn.minibatch import TrainBatch
from penstock.learn.optimizers import Adam
from penstock.learn.policy import Policy
from penstock.replay.replay import Replay, ReplaySettings, make_view


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
    q = agent.q(x.inputs, agent.box.to_unit(x["action"]))
    error = q - x["target"]
    squares = error.square() * x["weight"] if "weight" in x.rows else error.square()
    critic_loss = 0.5 * squares.mean(1).sum()
    action, logp = agent.sample(x.inputs, x["noise"])
    actor_loss = (alpha(agent) * logp - agent.smallest_q(x.inputs, action)).mean()
    totals = {"critic": critic_loss, "actor": actor_loss}
    entropy = -logp.detach().mean()
    if cfg.alpha == "auto":
        assert agent.log_alpha is not None
        totals["alpha"] = (agent.log_alpha * (entropy - target_entropy(agent, cfg))).mean()
    metrics = {
        "critic_loss": critic_loss,
        "actor_loss": actor_loss,
        "ent_coef": alpha(agent),
        "entropy": entropy,
        "q": q[0].mean(),
    }
    return Loss(totals, {name: value.detach() for name, value in metrics.items()}, error.detach().abs().mean(0))


def alpha(agent: ControlAgent) -> torch.Tensor:
    """The temperature, without gradient."""
    assert agent.log_alpha is not None
    return agent.log_alpha.detach().exp().squeeze(0)


def target_entropy(agent: ControlAgent, cfg: SAC) -> float:
    """-dim(A) unless set (Haarnoja et al. 2018, appendix D)."""
    return -float(agent.box.size) if cfg.target_entropy is None else cfg.target_entropy


def optimizer_fn(agent: ControlAgent, cfg: SAC) -> Optimizers:
    """An Adam for each of critics, actor and temperature."""
    lr, actor_lr, alpha_lr = float(cfg.lr), cfg.actor_lr, cfg.alpha_lr
    out: Optimizers = {
        "critic": Adam(agent.critics.parameters(), lr=lr),
        "actor": Adam(agent.actor.parameters(), lr=actor_lr or lr, lr_scale=(actor_lr or lr) / lr),
    }
    if cfg.alpha == "auto":
        assert agent.log_alpha is not None
        out["alpha"] = Adam([agent.log_alpha], lr=alpha_lr or lr, lr_scale=(alpha_lr or lr) / lr)
    return out


def replay_fn(agent: ControlAgent, cfg: SAC) -> Experience:
    """Transitions, two sets of noise for each (present and next action), and soft target updates."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)

    def after_update(agent: ControlAgent, cfg: SAC, updates: int) -> None:
        if updates % cfg.target_interval == 0:
            agent.update_targets(cfg.tau)

    return Experience(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        noise_size=2 * agent.box.size,
        after_update=after_update,
    )


def agent_fn(spec: EnvSpec, cfg: SAC) -> ControlAgent:
    """The default agent: squashed Gaussian actor and `critics` critics."""
    agent = ControlAgent(spec, cfg.net, cfg.discount, cfg.critics, "gaussian", "SAC")
    if cfg.alpha != "auto":
        assert agent.log_alpha is not None
        agent.log_alpha.data.fill_(math.log(cfg.alpha))
    return agent


@dataclass(frozen=True)
class SAC:
    """Settings of SAC."""

    lr: Schedule = 3e-4
    """Adam's step size of the critics, usually 3e-4 to 1e-3."""
    actor_lr: float | None = None
    """Of the actor; None for the critics'."""
    alpha_lr: float | None = None
    """Of the temperature; None for the critics'."""
    discount: float = 0.99
    """Weight of the next step's value, usually 0.9 to 0.999."""
    batch_size: int = 256
    """Transitions of a gradient step, usually 64 to 512."""
    replay_ratio: float = 256.0
    """Rows trained on for each row collected; 256 with batch_size 256 is a gradient step for each environment step."""
    learning_starts: int = 100
    """Steps of random actions before the first gradient step, usually 100 to 10,000."""
    n_step: int = 1
    """Rewards in a target before the value."""
    tau: float = 0.005
    """Share of the online critics in an update of the target ones."""
    target_interval: int = 1
    """Gradient steps between updates of the target critics."""
    alpha: float | Literal["auto"] = "auto"
    """Temperature, or `auto` to learn it."""
    target_entropy: float | None = None
    """Entropy in nats that `auto` keeps to, of actions in [-1, 1]; None for minus the number of their elements."""
    critics: int = 2
    """Critics, of which the smallest value counts."""
    max_grad_norm: float | None = None
    """Gradients of each optimizer are scaled down to this norm; None for no limit."""
    replay: ReplaySettings = ReplaySettings()
    """What is kept and how it is drawn."""
    net: Net = Net(hidden=(256, 256), activation="relu")
    """Networks of the default agent; `activation` is the actor's, critics are of relu."""
    agent: AgentFn = agent_fn
    """Makes the agent from (spec, settings): `my_module:my_agent_fn` on the command line."""
    batch: ClassVar[BatchSpec] = BatchSpec(T=8, B=1)
    """T and B of the sampler, where a run names none."""
    takes_stale: ClassVar[bool] = True
    """SAC is off-policy."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_schedules(self)
        if not 0.0 <= self.discount <= 1.0 or not 0.0 < self.tau <= 1.0:
            raise ConfigError(f"discount={self.discount}, tau={self.tau}; expected [0, 1] and (0, 1]")
        start, end = schedule_ends(self.lr)
        positive = [start, self.actor_lr, self.alpha_lr, self.max_grad_norm]
        if self.alpha != "auto":
            positive.append(float(self.alpha))
        if min(x for x in positive if x is not None) <= 0.0 or end < 0.0 or min(self.critics, self.target_interval) < 1:
            raise ConfigError(
                f"lr={self.lr}, actor_lr={self.actor_lr}, alpha_lr={self.alpha_lr}, alpha={self.alpha}, max_grad_norm="
                f"{self.max_grad_norm}, critics={self.critics}, target_interval={self.target_interval}; expected positive "
                "numbers"
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
            experience_fn=lambda agent: replay_fn(agent, self),
            max_grad_norm=self.max_grad_norm,
            seed=seed,
            device=device,
        )
