"""A2C: synchronous advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, algorithm S3 without the asynchrony).

Differs from the paper: workers are slots of one batch, advantages may use GAE, truncated episodes bootstrap, values and
advantages are in units of returns (`ValueScale`), and RMSprop's epsilon is added to the root, not under it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock import ops
from penstock.agents.actor_critic import ActorCritic, value_unit
from penstock.algos.rnd import RND
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.limits import Bound, Chance, Rate, Weight
from penstock.core.spec import BatchSpec
from penstock.learn.algorithm import Loss
from penstock.learn.optimizers import OptimizerName, rmsprop
from penstock.learn.settings import AlgorithmFunctions, Settings
from penstock.learn.slot_partition import moved_unit


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
    metrics = {"explained_variance": ops.explained_variance(value[:-1], return_, batch.valid)}
    advantage = advantage / moved_unit(agent, return_, batch.valid)
    rows = {"action": batch.action, "advantage": advantage, "return": return_}
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: ActorCritic, x: TrainBatch, cfg: A2C) -> Loss:
    """-A * log pi(a|s) + value_coef * (V - R)^2 / 2 - entropy_coef * H  (section 4 and eq. of algorithm S3)."""
    dist, value = agent(x.inputs, x.state)
    policy_loss = -ops.masked_mean(dist.log_prob(x["action"]) * x["advantage"], x.valid)
    value_loss = 0.5 * ops.squared_error(value, x["return"], x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    total = policy_loss + cfg.value_coef * value_loss / value_unit(agent) ** 2 - cfg.entropy_coef * entropy
    metrics = {"policy_gradient_loss": policy_loss, "value_loss": value_loss, "entropy_loss": -entropy, "loss": total}
    return Loss(total, {name: value.detach() for name, value in metrics.items()})


optimizer_fn = rmsprop


@dataclass(frozen=True)
class A2C(Settings):
    """Settings of A2C."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn)
    usual_batch = BatchSpec(T=5, B=16)
    recurrent_batch = BatchSpec(T=16, B=8)

    lr: Rate = 7e-4
    """RMSprop's step size, usually 3e-4 to 1e-3."""
    optimizer: OptimizerName = "rmsprop"
    """rmsprop (of the paper, with alpha 0.99), adam or adamw."""
    gae_lambda: Chance = 1.0
    """Bias against variance of advantages; 1 is the paper's T-step return."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus per nat, usually 0 to 0.02."""
    value_coef: Weight = 0.5
    """Weight of half the squared value error (other libraries weigh the full square); matters only for a shared
    body."""
    max_grad_norm: Bound = 0.5
    """Gradients are scaled down to this norm."""
    normalize_advantage: bool = False
    """Shift and scale the advantages of each batch to mean 0 and deviation 1."""
    normalize_value: bool = True
    """Learn values in units of the running root mean square of returns (`ValueScale`), and advantages too, so that the
    size of rewards does not matter."""
    rnd: RND | None = None
    """Explores by an intrinsic reward for what is new (random network distillation); None: without."""
