"""APPO: PPO's clipped surrogate for stale batches, with V-trace to a slowly moving target policy.

Luo et al. 2019, "IMPACT: importance weighted asynchronous architectures with clipped target networks",
arXiv:1912.00167; the name is that of Ray RLlib, whose APPO it is. Differs from the paper: each batch is trained on in
`epochs` passes at once instead of out of a circular buffer, the target policy is copied between batches, advantages
are normalised over the batch, and truncated episodes bootstrap.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from penstock import ops
from penstock.agents.actor_critic import value_unit
from penstock.agents.agent import Agent, check_agent_members, logp_and_values
from penstock.algos.rnd import RND
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Cap, Chance, Count, Limit, Rate, Weight, Whole
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.learn.algorithm import Loss
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, MinibatchSettings
from penstock.learn.slot_partition import moved_unit
from penstock.native.elementwise import exp


def agent_fn(spec: EnvSpec, cfg: APPO) -> Agent:
    """The agent that `cfg.agent` makes, with a frozen copy as `target_policy`, and the number of batches trained on."""
    agent = cfg.agent(spec, cfg)
    check_agent_members(agent)
    agent.target_policy = copy.deepcopy(agent).requires_grad_(False)
    agent.register_buffer("target_batches", torch.zeros((), dtype=torch.int64))
    return agent


def target_for_batch(agent: Agent, interval: int) -> Agent:
    """The target policy: a copy of the policy, normalisers included, made before every `interval`-th batch."""
    target: Any = agent.get_submodule("target_policy")
    batches = agent.get_buffer("target_batches")
    if batches % interval == 0:
        missing, _ = target.load_state_dict(agent.state_dict(), strict=False)
        if missing:
            raise ConfigError(
                f"the target policy has {sorted(missing)[:3]}, which the policy lacks; expected the same names: do to "
                "agent.target_policy what you do to the agent (pruning, parametrisations, other layers)"
            )
    batches += 1
    return target


def postprocess_fn(agent: Agent, batch: SampleBatch, cfg: APPO) -> TrainBatch:
    """V-trace of a batch [T, B] for the target policy, which stays while the batch is trained on: exact in any pass."""
    logp, _ = logp_and_values(target_for_batch(agent, cfg.target_interval), batch)
    value = agent.values(batch)
    acted = batch.info["logp"]
    log_ratio = logp - acted
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
    # pi / mu * min(mu / pi_target, bar) is pi over the larger of pi_target and mu / bar.
    reference = torch.maximum(logp, acted - math.log(cfg.target_ratio_bar))
    rows = {"action": batch.action, "logp": reference, "advantage": advantage, "target": target}
    if cfg.value_clip is not None:
        rows["value"] = value[:-1]
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: Agent, x: TrainBatch, cfg: APPO) -> Loss:
    """-min(ratio * A, clip(ratio) * A) + value_coef * (V - v)^2 / 2 - entropy_coef * H  (section 3.1)."""
    dist, value = agent(x.inputs, x.state)
    log_ratio = dist.log_prob(x["action"]) - x["logp"]
    surrogate, ratio = ops.clipped_surrogate(log_ratio, x["advantage"], cfg.clip)
    policy_loss = ops.masked_mean(surrogate, x.valid)
    if cfg.value_clip is None:
        value_loss = 0.5 * ops.squared_error(value, x["target"], x.valid)
    else:
        clip = cfg.value_clip * value_unit(agent)
        value_loss = 0.5 * ops.clipped_squared_error(value, x["target"], x["value"], clip, x.valid)
    entropy = ops.masked_mean(dist.entropy(), x.valid)
    total = policy_loss + cfg.value_coef * value_loss / value_unit(agent) ** 2 - cfg.entropy_coef * entropy
    with torch.no_grad():
        metrics = {
            "policy_gradient_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy_loss": -entropy.detach(),
            "loss": total.detach(),
            "approx_kl": ops.masked_mean(ops.approx_kl(log_ratio, ratio), x.valid),
            "clip_fraction": ops.masked_mean(((ratio - 1.0).abs() > cfg.clip).float(), x.valid),
        }
    return Loss(total, metrics)


optimizer_fn = adam


@dataclass(frozen=True)
class APPO(MinibatchSettings):
    """Settings of APPO."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, agent=agent_fn)
    usual_batch = BatchSpec(T=64, B=16)
    reports_kl = True
    takes_stale: ClassVar[bool] = True
    """V-trace corrects for the lag by the ratio to the recorded log-probabilities."""
    takes_fragments: ClassVar[bool] = True
    """Targets are computed within a fragment, so a batch may join any fragments, of any versions."""

    epochs: Count = 4
    """Passes over each batch, usually 1 to 10."""
    minibatch: Count = 256
    """Rows of a gradient step, usually 32 to 512; a batch is cut into round(T * B / minibatch) parts, with a recurrent
    net into whole columns of T rows, at least one each."""
    vtrace_lambda: Chance = 0.95
    """Bias against variance of targets and advantages, usually 0.9 to 1; 1 in the paper."""
    rho_bar: Cap = 1.0
    """Largest weight of a row, min(rho_bar, pi_target / mu)."""
    c_bar: Rate = 1.0
    """Largest ratio in the product of a trace, at most `rho_bar`: larger corrects further back, at more variance."""
    target_interval: Count = 2
    """Batches between copies of the policy into the target policy, usually 1 to 8."""
    target_ratio_bar: Annotated[float, Limit(1.0, math.inf)] = 2.0
    """Bound of mu / pi_target, which multiplies pi / mu in the surrogate's ratio (rho in the paper). inf: pi /
    pi_target."""
    max_lag: Whole | None = None
    """Rows are left out if their actions are from a version more than this many training steps old; None: no bound."""
    clip: Rate = 0.2
    """How far the probability ratio may move from the target policy, usually 0.1 to 0.4."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus per nat, usually 0 to 0.02."""
    value_coef: Weight = 0.5
    """Weight of half the squared value error (other libraries weigh the full square); matters only for a shared
    body."""
    value_clip: Rate | None = None
    """How far a value may move from that before training on the batch until its loss counts no gain, in units of
    `normalize_value`, usually 0.2 in libraries that clip; None: no clipping, which Andrychowicz et al. 2021 prefer."""
    max_grad_norm: Bound = 0.5
    """Gradients are scaled down to this norm."""
    normalize_advantage: bool = True
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
