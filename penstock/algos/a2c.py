"""A2C: synchronous advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, algorithm S3 without the asynchrony).

Differs from the paper: workers are slots of one batch, advantages may use GAE, and truncated episodes bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
from penstock.learn.optimizers import rmsprop
from penstock.learn.policy import Policy


def postprocess_fn(agent: ActorCritic, batch: SampleBatch, cfg: A2C) -> TrainBatch:
    """Advantages and returns of a batch [T, B]."""
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
    rows = {"action": batch.action, "advantage": advantage, "return": return_}
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: ActorCritic, x: TrainBatch, cfg: A2C) -> Loss:
    """-A * log pi(a|s) + value_coef * (V - R)^2 / 2 - entropy_coef * H  (section 4 and eq. of algorithm S3)."""
    dist, value = agent(x.inputs, x.state)
    policy_loss = -ops.masked_mean(dist.log_prob(x["action"]) * x["advantage"], x.valid)
    value_loss = 0.5 * ops.squared_error(value, x["return"], x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    total = policy_loss + cfg.value_coef * value_loss - float(cfg.entropy_coef) * entropy
    metrics = {"policy_gradient_loss": policy_loss, "value_loss": value_loss, "entropy_loss": -entropy, "loss": total}
    return Loss(total, {name: value.detach() for name, value in metrics.items()})


optimizer_fn = rmsprop


@dataclass(frozen=True)
class A2C:
    """Settings of A2C."""

    lr: Schedule = 7e-4
    """RMSprop's step size, usually 3e-4 to 1e-3."""
    discount: float = 0.99
    """Weight of the next step's value, usually 0.9 to 0.999."""
    gae_lambda: float = 1.0
    """Bias against variance of advantages; 1 is the paper's T-step return."""
    entropy_coef: Schedule = 0.01
    """Weight of the entropy bonus per nat, usually 0 to 0.02."""
    value_coef: float = 0.5
    """Weight of half the squared value error (others weigh the whole); it matters only for a shared body."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    normalize_advantage: bool = False
    """Shift and scale the advantages of each batch to mean 0 and deviation 1."""
    net: Net = Net()
    """Networks of the default agent."""
    agent: AgentFn = actor_critic
    """Makes the agent from (spec, settings): `my_module:my_agent_fn` on the command line."""
    batch: ClassVar[BatchSpec] = BatchSpec(T=5, B=16)
    """T and B of the sampler, where a run names none."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_schedules(self)
        if not 0.0 <= self.discount <= 1.0 or not 0.0 <= self.gae_lambda <= 1.0:
            raise ConfigError(f"discount={self.discount}, gae_lambda={self.gae_lambda}; both must lie in [0, 1]")
        starts, ends = zip(*(schedule_ends(getattr(self, name)) for name in ("lr",)))
        if min(*starts, self.max_grad_norm) <= 0.0 or min(ends) < 0.0:
            raise ConfigError(f"lr={self.lr}, max_grad_norm={self.max_grad_norm}; expected positive numbers")

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu") -> Policy:
        """The live policy for an environment."""
        return Policy(
            self,
            spec,
            agent_fn=self.agent,
            postprocess_fn=postprocess_fn,
            loss_fn=loss_fn,
            optimizer_fn=optimizer_fn,
            max_grad_norm=self.max_grad_norm,
            seed=seed,
            device=device,
        )
