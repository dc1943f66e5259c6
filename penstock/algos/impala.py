"""IMPALA: actor-critic with V-trace targets, which correct for the lag of the actors (Espeholt et al. 2018).

"IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures", arXiv:1802.01561. Differs
from the paper: losses are means over rows, not sums, Adam is the default, values and advantages are in units of returns
(`ValueScale`), truncated episodes bootstrap, and actors and learner go in step (the lag of a batch is fixed, not a
matter of timing), unless the sampler says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock import ops
from penstock.agents.actor_critic import ActorCritic, value_unit
from penstock.agents.agent import logp_and_values
from penstock.algos.rnd import RND
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Cap, Chance, Rate, Weight, Whole
from penstock.core.spec import BatchSpec
from penstock.learn.algorithm import Loss
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, Settings
from penstock.learn.slot_partition import moved_unit
from penstock.native.elementwise import exp


def postprocess_fn(agent: ActorCritic, batch: SampleBatch, cfg: IMPALA) -> TrainBatch:
    """V-trace of a batch [T, B] for the policy about to be updated: exact for the one update that a batch is for."""
    logp, value = logp_and_values(agent, batch)
    log_ratio = logp - batch.info["logp"]
    target, advantage = ops.vtrace(
        log_ratio,
        agent.scaled_reward(batch.reward),
        value,
        agent.terminal(batch),
        batch.truncated,
        batch.valid,
        discount=cfg.discount,
        vtrace_lambda=cfg.vtrace_lambda,
        rho_bar=cfg.rho_bar,
        c_bar=cfg.c_bar,
    )
    ratio = exp(log_ratio)
    metrics = {
        "rho_mean": ops.masked_mean(ratio.clamp(max=cfg.rho_bar), batch.valid),
        "rho_clipped": ops.masked_mean((ratio > 1.01 * cfg.rho_bar).float(), batch.valid),  # rounding aside
        "explained_variance": ops.explained_variance(value[:-1], target, batch.valid),
    }
    advantage = advantage / moved_unit(agent, target, batch.valid)
    rows = {"action": batch.action, "advantage": advantage, "target": target}
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: ActorCritic, x: TrainBatch, cfg: IMPALA) -> Loss:
    """-A * log pi(a|s) + value_coef * (V - v)^2 / 2 - entropy_coef * H  (section 4.2; rho is a part of A)."""
    dist, value = agent(x.inputs, x.state)
    policy_loss = -ops.masked_mean(dist.log_prob(x["action"]) * x["advantage"], x.valid)
    value_loss = 0.5 * ops.squared_error(value, x["target"], x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    total = policy_loss + cfg.value_coef * value_loss / value_unit(agent) ** 2 - cfg.entropy_coef * entropy
    metrics = {"policy_gradient_loss": policy_loss, "value_loss": value_loss, "entropy_loss": -entropy, "loss": total}
    return Loss(total, {name: value.detach() for name, value in metrics.items()})


optimizer_fn = adam


@dataclass(frozen=True)
class IMPALA(Settings):
    """Settings of IMPALA."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn)
    usual_batch = BatchSpec(T=20, B=32)
    takes_stale: ClassVar[bool] = True
    """V-trace corrects for the lag by the ratio to the recorded log-probabilities."""
    takes_fragments: ClassVar[bool] = True
    """Targets are computed within a fragment, so a batch may join any fragments, of any versions."""

    lr: Rate = 1e-3
    """The optimizer's step size, usually 5e-4 to 2e-3."""
    vtrace_lambda: Chance = 1.0
    """Bias against variance of targets and advantages; 1 in the paper."""
    rho_bar: Cap = 1.0
    """Largest weight of a row, min(rho_bar, pi / mu); below inf, V converges to the value of a policy between pi and
    mu."""
    c_bar: Rate = 1.0
    """Largest ratio in the product of a trace, at most `rho_bar`: larger corrects further back, at more variance."""
    max_lag: Whole | None = None
    """Rows are left out if their actions are from a version more than this many training steps old; None: no bound."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus per nat, usually 0 to 0.02."""
    value_coef: Weight = 0.5
    """Weight of half the squared value error (other libraries weigh the full square); matters only for a shared
    body."""
    max_grad_norm: Bound = 0.5
    """Gradients are scaled down to this norm; the paper's 40 bounds the gradient of a sum over 640 rows."""
    normalize_advantage: bool = False
    """Shift and scale the advantages of each batch to mean 0 and deviation 1."""
    normalize_value: bool = True
    """Learn values in units of the running root mean square of returns (`ValueScale`), and advantages too, so that the
    size of rewards does not matter."""
    rnd: RND | None = None
    """Explores by an intrinsic reward for what is new (random network distillation); None: without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_bar > self.rho_bar:
            raise ConfigError(f"c_bar={self.c_bar}, rho_bar={self.rho_bar}; expected c_bar <= rho_bar")
