"""Random network distillation: an intrinsic reward for observations that a trained network cannot predict yet.

Burda et al. 2018, "Exploration by random network distillation", arXiv:1810.12894 (algorithm 1; equations of section 2),
as a part of on-policy algorithms: `ps.PPO(rnd=ps.RND())`. Its advantages are added to the algorithm's own.

Differs from the paper: intrinsic values have a network of their own, not a head on the policy's; the first batch sets
the statistics of observations, where the authors step a random agent; whole stacks of frames are seen, not the last
frame; and the last observation of an episode is rewarded, where theirs is lost in the reset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.agents.actor_critic import Body
from penstock.agents.agent import Agent, logp_and_values
from penstock.agents.mlp import orthogonal
from penstock.agents.networks import Net
from penstock.agents.preparation import ObsNormalizer, Preparation, RewardScaler
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.config import known_names
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Count, NotNegative, Share, Unit, check_settings
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_map
from penstock.learn.algorithm import Loss, LossFn, PostprocessFn
from penstock.learn.settings import AlgorithmFunctions
from penstock.learn.slot_partition import drawn, of_all_learners
from penstock.native.elementwise import exp

_ROWS = 256
"""Rows of images that are computed at once."""


class Novelty(nn.Module):
    """Fixed target, predictor, intrinsic critic and running statistics: the agent's submodule `rnd`.

    The predictor has two hidden layers more than the target (Burda et al. 2018, appendix A.4).
    """

    batches: Tensor
    """Batches trained on, int64; with `seed` the address of the rows that the predictor learns from."""
    seed: Tensor

    def __init__(self, spec: EnvSpec, cfg: RND) -> None:
        super().__init__()
        self.preparation, net = Preparation(spec, replace(cfg.net, normalize_obs=False)), cfg.net
        obs = tree_map(lambda x: replace(x, dtype="float32") if x.dtype == "uint8" else x, self.preparation.obs)
        net = replace(net, normalize_obs=True)  # images, too, element by element
        self.normalizer = ObsNormalizer(obs, net, cfg.clip)
        self.scaler = RewardScaler(cfg.discount, clip=torch.inf)
        deeper = replace(net, hidden=(*net.hidden, *2 * (net.hidden[-1:] or (cfg.features,))))
        self.target, self.predictor, self.critic = (Body(spec, obs, x) for x in (net, deeper, net))
        self.target_out, self.predictor_out = (nn.Linear(x.size, cfg.features) for x in (self.target, self.predictor))
        self.value_head = nn.Linear(self.critic.size, 1)
        for layer, gain in ((self.target_out, 2**0.5), (self.predictor_out, 2**0.5), (self.value_head, 0.01)):
            orthogonal(layer, gain)
        for module in (self.target, self.target_out):
            module.requires_grad_(False)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seed", torch.randint(2**62, ()))

    def errors(self, obs: Tree) -> Tensor:
        """[N] mean over features of (predictor - target)^2 for observations [N, ...]."""
        seen = self.seen(obs)
        with torch.no_grad():
            wanted = self.target(_NONE, seen, self.target_out)
        return (self.predictor(_NONE, seen, self.predictor_out) - wanted).square().mean(-1)

    def values(self, obs: Tree) -> Tensor:
        """[N] intrinsic values of observations [N, ...], in units of the scaled intrinsic reward."""
        return self.critic(_NONE, self.seen(obs), self.value_head).squeeze(-1)

    @torch.no_grad()
    def judged(self, batch: SampleBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Raw rewards [T, B] of a batch, scaled ones [T, B], and values [T + 1, B]; updates the statistics.

        Rewards are scaled by the statistics with this batch in them, observations by those before it.
        """
        valid = batch.valid
        shown = of_all_learners(valid), tree_map(of_all_learners, self.preparation.unmasked(batch.obs))
        if new := self.normalizer.empty:
            self.normalizer.update(tree_map(lambda x: x[1:], shown[1]), shown[0])
        flat = batch.inputs.flat()
        parts = list(flat.split(_ROWS)) if self.critic.encoder.sees_images else [flat]
        lead = batch.first.shape
        error = torch.cat([self.errors(x.obs) for x in parts]).reshape(lead)[1:].masked_fill(~valid, 0.0)
        value = torch.cat([self.values(x.obs) for x in parts]).reshape(lead)
        whole, never = of_all_learners(error), torch.zeros_like(shown[0])
        self.scaler.update(whole, never, shown[0], never)
        if not new:
            self.normalizer.update(tree_map(lambda x: x[1:], shown[1]), shown[0])
        return error, self.scaler(error), value

    def learned_rows(self, valid: Tensor, share: float) -> Tensor:
        """[T, B] float: 1 / share for the rows of a batch that the predictor learns from, 0 for the others."""
        address = int(self.seed), Purpose.NOVELTY, int(self.batches)
        self.batches += 1
        return (drawn(lambda T, B: uniform(*address, slice(0, B), T, 1)[..., 0], valid) < share) / share

    def seen(self, obs: Tree) -> Tree:
        """Observations as the networks see them: without the mask, normalised and clipped."""
        return self.normalizer(self.preparation.unmasked(obs))


_NONE: Any = None
"""Previous actions and rewards, which the networks do not read."""


def endless_targets(
    reward: Tensor,
    value: Tensor,
    valid: Tensor,
    *,
    discount: float,
    trace_lambda: float,
    rho: Tensor | float = 1.0,
    c: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [T, B] of a reward that knows no episodes: those of the next episode follow an end.

        delta_t = r_t + discount V_{t'} - V_t,   R_t - V_t = rho_t delta_t + discount lambda c_t (R_{t'} - V_{t'})
        A_t = rho_t (delta_t + discount lambda (R_{t'} - V_{t'})),   t' the next valid row, or the last one's successor

    With rho and c 1 this is GAE (Schulman et al. 2016, eq. 16), else V-trace (Espeholt et al. 2018, eq. 1).

    Args:
        reward: [T, B]. value: [T+1, B]. valid: [T, B] bool. rho, c: [T, B] clipped ratios pi / mu.
    """
    T = len(valid)
    rows = torch.arange(T + 1, device=valid.device).unsqueeze(1)
    at = torch.where(torch.cat((valid, valid.new_ones(1, valid.shape[1]))), rows, T)
    following = at.flip(0).cummin(0).values.flip(0)[1:]  # of each row the next valid one
    delta = (reward + discount * value.gather(0, following) - value[:-1]).masked_fill(~valid, 0.0)
    decay = torch.where(valid, discount * trace_lambda * c, 1.0)
    correction = ops.discounted_sum(rho * delta, decay)
    beyond = torch.cat((correction[1:], torch.zeros_like(correction[:1])))
    advantage = (rho * (delta + discount * trace_lambda * beyond)).masked_fill(~valid, 0.0)
    return advantage, value[:-1] + correction


def postprocess_fn(inner: PostprocessFn, agent: Agent, batch: SampleBatch, cfg: Any) -> TrainBatch:
    """The algorithm's post-processed batch with intrinsic advantages added to its own, and the rows of `loss_fn`."""
    data, rnd, own = inner(agent, batch, cfg), novelty(agent), cfg.rnd
    error, reward, value = rnd.judged(batch)
    how: dict[str, Any] = {"discount": own.discount, "trace_lambda": getattr(cfg, "gae_lambda", 1.0)}
    if hasattr(cfg, "vtrace_lambda"):
        logp, _ = logp_and_values(getattr(agent, "target_policy", agent), batch)
        ratio = exp((logp - batch.info["logp"]).masked_fill(~batch.valid, 0.0))
        how |= {"trace_lambda": cfg.vtrace_lambda, "rho": ratio.clamp(max=cfg.rho_bar), "c": ratio.clamp(max=cfg.c_bar)}
    advantage, return_ = endless_targets(reward, value, batch.valid, **how)
    rows = {
        **data.rows,
        "advantage": own.extrinsic_coef * data["advantage"] + own.coef * advantage,
        "rnd_return": return_,
        "rnd_next": tree_map(lambda x: x[1:], batch.obs),
        "rnd_obs": tree_map(lambda x: x[:-1], batch.obs),
    }
    if own.share < 1.0:
        rows["rnd_weight"] = rnd.learned_rows(batch.valid, own.share)
    metrics = {
        "rnd_error": ops.masked_mean(error, batch.valid),
        "rnd_reward": ops.masked_mean(reward, batch.valid),
    }
    return replace(data, rows=rows, metrics={**(data.metrics or {}), **metrics})


def loss_fn(inner: LossFn, agent: Agent, x: TrainBatch, cfg: Any) -> Loss:
    """The algorithm's loss + value_coef * (V - R)^2 / 2 + mean error of the predictor over its share of the rows."""
    loss, rnd, lead = inner(agent, x, cfg), novelty(agent), x["rnd_return"].shape

    def flat(obs: Tree) -> Tree:
        return obs if len(lead) == 1 else tree_map(lambda leaf: leaf.flatten(0, 1), obs)

    error = rnd.errors(flat(x["rnd_next"])).reshape(lead)
    value = rnd.values(flat(x["rnd_obs"])).reshape(lead)
    predictor = ops.masked_mean(error * x["rnd_weight"] if "rnd_weight" in x.rows else error, x.valid)
    value_loss = 0.5 * ops.squared_error(value, x["rnd_return"], x.valid)
    total = loss.totals()["all"] + cfg.value_coef * value_loss + predictor
    metrics = {"rnd_loss": predictor.detach(), "rnd_value_loss": value_loss.detach(), "loss": total.detach()}
    return loss._replace(total={**loss.totals(), "all": total}, metrics={**loss.metrics, **metrics})


def novelty(agent: Agent) -> Novelty:
    """The agent's RND."""
    found: Any = agent.get_submodule("rnd")
    return found


@dataclass(frozen=True)
class RND:
    """Settings of random network distillation."""

    __new__ = known_names
    fixed: ClassVar[frozenset[str]] = frozenset(("net", "features", "clip"))

    coef: NotNegative = 1.0
    """Weight of intrinsic advantages; 1 in the paper."""
    extrinsic_coef: NotNegative = 2.0
    """Weight of the algorithm's own advantages; 2 in the paper, 0 explores without a task."""
    discount: Unit = 0.99
    """Discount of intrinsic rewards, whose returns go on over the ends of episodes; 0.99 in the paper, where the
    algorithm's own is 0.999."""
    share: Share = 1.0
    """Share of the rows that the predictor learns from, so that many slots do not use up novelty sooner: 1 with 32
    slots, 0.25 with 128 in the paper."""
    clip: Bound = 5.0
    """Normalised observations are clipped to this size."""
    features: Count = 128
    """Outputs of target and predictor; 512 in the authors' code."""
    net: Net = Net(hidden=(128,), activation="relu")
    """Networks of target and critic; the predictor has two more hidden layers."""

    def __post_init__(self) -> None:
        check_settings(self, "rnd.")
        net = self.net
        if net.is_recurrent or net.prev_action or net.prev_reward:
            raise ConfigError(
                f"rnd.net.recurrent={net.recurrent!r}, rnd.net.prev_action={net.prev_action}, rnd.net.prev_reward="
                f"{net.prev_reward}; expected 'none' and False: novelty is of the observation alone"
            )

    def added_to(self, functions: AlgorithmFunctions) -> AlgorithmFunctions:
        """The functions of an on-policy algorithm with RND around them."""
        return functions.with_part("rnd", lambda _, spec, cfg: Novelty(spec, cfg.rnd), postprocess_fn, loss_fn)
