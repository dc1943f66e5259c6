"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1).

Differs from the paper: Gaussian exploration noise (Fujimoto et al. 2018 find nothing better in the correlated one),
no batch normalisation or weight decay, n-step targets may be used, and truncated episodes bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: DDPG) -> TrainBatch:
    """Adds `target` = r + discount * Q_target(s', mu_target(s'))  (algorithm 1)."""
    following = x["next"]
    value = agent.target_q(following, agent.target_point(following))[0]
    target = agent.scaled_reward(x["return"]) + x["discount"] * value
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: DDPG) -> Loss:
    """Critic: (Q - target)^2. Actor: -Q(s, mu(s)), whose gradient is eq. 6."""
    error = agent.q(x.inputs, agent.box.to_unit(x["action"]))[0] - x["target"]
    squares = error.square() * x["weight"] if "weight" in x.rows else error.square()
    critic_loss = squares.mean()
    actor_loss = -agent.smallest_q(x.inputs, agent.point(x.inputs)).mean()
    metrics = {"critic_loss": critic_loss, "actor_loss": actor_loss, "q": x["target"].mean()}
    return Loss(
        {"critic": critic_loss, "actor": actor_loss},
        {name: value.detach() for name, value in metrics.items()},
        error.detach().abs(),
    )


def optimizer_fn(agent: ControlAgent, cfg: DDPG) -> Optimizers:
    """An Adam for the critic and one for the actor."""
    lr, actor_lr = float(cfg.lr), cfg.actor_lr or float(cfg.lr)
    return {
        "critic": Adam(agent.critics.parameters(), lr=lr),
        "actor": Adam(agent.actor.parameters(), lr=actor_lr, lr_scale=actor_lr / lr),
    }


def replay_fn(agent: ControlAgent, cfg: DDPG) -> Experience:
    """Transitions, and soft updates of both targets."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)

    def after_update(agent: ControlAgent, cfg: DDPG, updates: int) -> None:
        agent.update_targets(cfg.tau)

    return Experience(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        after_update=after_update,
    )


def agent_fn(spec: EnvSpec, cfg: DDPG) -> ControlAgent:
    """The default agent: a deterministic actor and one critic, with targets of both."""
    return ControlAgent(spec, cfg.net, cfg.discount, 1, "point", "DDPG", target_actor=True)


@dataclass(frozen=True)
class DDPG:
    """Settings of DDPG."""

    lr: Schedule = 1e-3
    """Adam's step size of the critic, usually 3e-4 to 1e-3."""
    actor_lr: float | None = None
    """Of the actor; None for the critic's. 1e-4 in the paper."""
    discount: float = 0.99
    """Weight of the next step's value, usually 0.9 to 0.999."""
    batch_size: int = 256
    """Transitions of a gradient step, usually 64 to 256."""
    replay_ratio: float = 256.0
    """Rows trained on for each row collected; 256 with batch_size 256 is a gradient step for each environment step."""
    learning_starts: int = 100
    """Steps of random actions before the first gradient step, usually 100 to 10,000."""
    n_step: int = 1
    """Rewards in a target before the value."""
    tau: float = 0.005
    """Share of the online networks in an update of the target ones."""
    exploration_noise: Schedule = 0.1
    """Standard deviation of the noise on actions, in half the box."""
    max_grad_norm: float | None = None
    """Gradients of each optimizer are scaled down to this norm; None for no limit."""
    replay: ReplaySettings = ReplaySettings()
    """What is kept and how it is drawn."""
    net: Net = Net(hidden=(256, 256), activation="relu")
    """Networks of the default agent; `activation` is the actor's, the critic is of relu."""
    agent: AgentFn = agent_fn
    """Makes the agent from (spec, settings): `my_module:my_agent_fn` on the command line."""
    batch: ClassVar[BatchSpec] = BatchSpec(T=8, B=1)
    """T and B of the sampler, where a run names none."""
    takes_stale: ClassVar[bool] = True
    """DDPG is off-policy."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_schedules(self)
        if not 0.0 <= self.discount <= 1.0 or not 0.0 < self.tau <= 1.0:
            raise ConfigError(f"discount={self.discount}, tau={self.tau}; expected [0, 1] and (0, 1]")
        if min(schedule_ends(self.exploration_noise)) < 0.0:
            raise ConfigError(f"exploration_noise={self.exploration_noise}; it may not be negative")
        start, end = schedule_ends(self.lr)
        positive = [start, self.actor_lr, self.max_grad_norm]
        if min(x for x in positive if x is not None) <= 0.0 or end < 0.0:
            raise ConfigError(
                f"lr={self.lr}, actor_lr={self.actor_lr}, max_grad_norm={self.max_grad_norm}; expected positive numbers"
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
