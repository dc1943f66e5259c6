"""BC: behaviour cloning, maximum likelihood of a dataset's actions (Pomerleau 1991, "Efficient training of artificial neural
networks for autonomous navigation").

Differs from the paper: the likelihood of any action space instead of a squared error, and an optional entropy bonus.
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
from penstock.core.schedule import Schedule, check_schedules, schedule_value
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.learn.algorithm import AgentFn, Loss
from penstock.learn.minibatch import TrainBatch
from penstock.learn.optimizers import adam
from penstock.learn.policy import Policy


def postprocess_fn(agent: ActorCritic, batch: SampleBatch, cfg: BC) -> TrainBatch:
    """Observations and actions of a batch [T, B]; rewards play no part."""
    return TrainBatch(agent.needed(batch.inputs_t), {"action": batch.action}, batch.valid, batch.state)


def loss_fn(agent: ActorCritic, x: TrainBatch, cfg: BC) -> Loss:
    """-log pi(a|s) - entropy_coef * H, the mean over steps of the dataset."""
    dist = agent(x.inputs, x.state).dist
    neglogp = -ops.masked_mean(dist.log_prob(x["action"]), x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    total = neglogp - float(cfg.entropy_coef) * entropy
    metrics = {"neglogp": neglogp, "entropy_loss": -entropy, "loss": total}
    return Loss(total, {name: value.detach() for name, value in metrics.items()})


optimizer_fn = adam


@dataclass(frozen=True)
class BC:
    """Settings of BC."""

    lr: Schedule = 1e-3
    """Adam's step size, usually 1e-4 to 1e-3."""
    entropy_coef: Schedule = 0.0
    """Weight of the entropy bonus per nat, usually 0; up to 0.01 keeps a policy from becoming certain on few data."""
    epochs: int = 1
    """Passes over each batch; the sampler passes over the dataset by itself."""
    minibatch: int = 256
    """Rows of a gradient step; a batch is cut into round(T * B / minibatch) parts."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    discount: float = 0.99
    """Of the reward scaler of `net.normalize_reward`; the loss has no return in it."""
    net: Net = Net()
    """Networks of the default agent; its critic is not trained."""
    agent: AgentFn = actor_critic
    """Makes the agent from (spec, settings): `my_module:my_agent_fn` on the command line."""
    batch: ClassVar[BatchSpec] = BatchSpec(T=128, B=16)
    """T and B of the sampler, where a run names none."""
    offline: ClassVar[bool] = True
    """It learns from the actions of others: a dataset, played back by an OfflineSampler."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_schedules(self)
        if self.epochs < 1 or self.minibatch < 1:
            raise ConfigError(f"epochs={self.epochs}, minibatch={self.minibatch}; both must be at least 1")
        if min(schedule_value(self.lr, 0.0), self.max_grad_norm) <= 0.0:
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
            epochs=self.epochs,
            minibatch=self.minibatch,
            max_grad_norm=self.max_grad_norm,
            seed=seed,
            device=device,
        )
