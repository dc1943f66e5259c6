"""Action distributions as pure functions of parameters and given noise, in the units of the environment.

Acting uses exp, log1p and tanh only: torch's softplus, silu and elu differ in the last bit between the vectorised body
and the tail of an array, which would make a row's bits depend on how many rows lie beside it.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import optree
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.core.errors import ConfigError
from penstock.core.tree import Tree, tree_leaves, tree_unflatten
from penstock.native import heads
from penstock.native.direct import runs_directly
from penstock.native.elementwise import exp, log, log1p, log_softmax, normal, softplus, tanh

_LOG_2 = math.log(2.0)
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
MASKED = -1e30
"""Logit or value of an illegal choice: below costs in the billions; finite, so that p * log p is 0 and not NaN."""
_EDGE = 1.0 - 1e-6  # squashed actions stay inside this, so that atanh of a stored action is finite


class Distribution(Protocol):
    """A distribution over actions for N rows."""

    def sample(self, noise: Tensor) -> Tree:
        """[N, *A] actions from uniforms [N, noise_size] in (0, 1)."""
        ...

    def mode(self) -> Tree:
        """[N, *A] the deterministic action."""
        ...

    def log_prob(self, action: Tree) -> Tensor:
        """[N] log density (nats) of actions in the environment's units."""
        ...

    def entropy(self) -> Tensor:
        """[N] entropy in nats."""
        ...


class Categorical:
    """One choice out of n, by inverse CDF of one uniform; a masked choice is never sampled."""

    def __init__(self, logits: Tensor, start: int = 0, mask: Tensor | None = None) -> None:
        self._logits, self._mask, self.start = logits, mask, start
        self._logp = None if heads.takes_rows(logits) else self._log_probabilities()

    @property
    def logp(self) -> Tensor:
        """[..., n] log-probabilities, about `MASKED` for masked choices; acting by the kernel does without."""
        if self._logp is None:
            self._logp = self._log_probabilities()
        return self._logp

    def _log_probabilities(self) -> Tensor:
        logits = self._logits if self._mask is None else self._logits.masked_fill(~self._mask.bool(), MASKED)
        return log_softmax(logits)

    def sample(self, noise: Tensor) -> Tensor:
        index = self._drawn(noise).squeeze(-1)
        return index + self.start if self.start else index

    def acted(self, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """[N] actions from uniforms [N, 1], the likeliest where there are none, and their log-probabilities [N]."""
        logits, mask = self._logits, self._mask
        rows = logits.shape[:1]
        fits = logits.dim() == 2 and (noise is None or noise.shape == (*rows, 1))
        if fits and (mask is None or mask.shape == logits.shape) and heads.takes_rows(logits, noise):
            return heads.categorical(logits, mask, noise, self.start)
        index = self._drawn(noise) if noise is not None else self.logp.argmax(-1, keepdim=True)
        logp = self.logp.gather(-1, index).squeeze(-1)
        index = index.squeeze(-1)
        return index + self.start if self.start else index, logp

    def _drawn(self, noise: Tensor) -> Tensor:
        """[..., 1] choices, counted from 0."""
        cdf = exp(self.logp).cumsum(-1)
        if self._mask is not None:
            # u * total stays below the total after rounding, so the first cdf above it exists and is no masked choice.
            noise = noise * (cdf[..., -1:] * (1.0 - 2.0**-21))
        return torch.searchsorted(cdf, noise.contiguous(), right=True).clamp_(max=self.logp.shape[-1] - 1)

    def mode(self) -> Tensor:
        return self.logp.argmax(-1) + self.start

    def log_prob(self, action: Tensor) -> Tensor:
        index = action.long() - self.start if self.start else action.long()
        return self.logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(exp(self.logp) * self.logp).sum(-1)


class MultiCategorical:
    """Independent choices, one for each element of a `multi_discrete` action of `shape`."""

    def __init__(
        self,
        logits: Tensor,
        sizes: tuple[int, ...],
        start: tuple[int, ...],
        shape: tuple[int, ...],
        mask: Tensor | None = None,
    ) -> None:
        if logits.shape[-1] != sum(sizes):
            raise ConfigError(
                f"MultiCategorical got {logits.shape[-1]} logits for choices of sizes {sizes}; give the head "
                f"{sum(sizes)} outputs"
            )
        masks = mask.split(sizes, -1) if mask is not None else [None] * len(sizes)
        self.parts = [Categorical(part, s, m) for part, s, m in zip(logits.split(sizes, -1), start, masks)]
        self.shape = shape

    def sample(self, noise: Tensor) -> Tensor:
        return self._stack([p.sample(noise[..., i : i + 1]) for i, p in enumerate(self.parts)])

    def mode(self) -> Tensor:
        return self._stack([p.mode() for p in self.parts])

    def log_prob(self, action: Tensor) -> Tensor:
        flat = action.flatten(-len(self.shape))
        return sum_in_order([p.log_prob(flat[..., i]) for i, p in enumerate(self.parts)])

    def entropy(self) -> Tensor:
        return sum_in_order([p.entropy() for p in self.parts])

    def _stack(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, -1).unflatten(-1, self.shape)


_SURE = 80.0
"""Logit of a bit that must be on: its probability is 1 in float32, and exp() of it is finite."""


class Bernoulli:
    """Independent bits of a `multi_binary` action of `shape`; a masked value of a bit is never sampled.

    Args:
        mask: [N, 2 * bits], for each bit whether off and on are legal; one of which neither is is not masked.
    """

    def __init__(self, logits: Tensor, shape: tuple[int, ...], mask: Tensor | None = None) -> None:
        if mask is not None:
            off, on = mask.bool().unflatten(-1, (-1, 2)).unbind(-1)
            logits = torch.where(off == on, logits, torch.where(on, _SURE, -_SURE))
        self.logits, self.shape = logits, shape

    def sample(self, noise: Tensor) -> Tensor:
        return (noise < 1.0 / (1.0 + exp(-self.logits))).to(torch.int8).unflatten(-1, self.shape)

    def mode(self) -> Tensor:
        return (self.logits > 0).to(torch.int8).unflatten(-1, self.shape)

    def log_prob(self, action: Tensor) -> Tensor:
        sign = 1.0 - 2.0 * action.flatten(-len(self.shape)).to(self.logits.dtype)
        return -_softplus(sign * self.logits).sum(-1)

    def entropy(self) -> Tensor:
        p = 1.0 / (1.0 + exp((-self.logits).clamp(max=_SURE)))  # an infinite exp() has no gradient
        return (p * _softplus(-self.logits) + (1.0 - p) * _softplus(self.logits)).sum(-1)


class Gaussian:
    """Independent normals for a box. Samples may lie outside the bounds; the environment gets them clipped.

    `mean` and `log_std` live where [-1, 1] is the box, and `center` and `half` map that to the environment's units,
    so that a policy starts equally wide in any box.
    """

    _squash = False

    def __init__(self, mean: Tensor, log_std: Tensor, center: Tensor, half: Tensor, shape: tuple[int, ...]) -> None:
        if mean.shape[-1] != center.shape[-1]:  # one mean would stand for all elements
            raise ConfigError(
                f"{type(self).__name__} got {mean.shape[-1]} means for an action of {center.shape[-1]} elements; "
                f"give the head {center.shape[-1]} outputs"
            )
        self.mean, self.log_std, self.center, self.half, self.shape = mean, log_std, center, half, shape

    def sample(self, noise: Tensor) -> Tensor:
        return self.to_env(self.mean + exp(self.log_std) * standard_normal(noise))

    def mode(self) -> Tensor:
        return self.to_env(self.mean)

    def log_prob(self, action: Tensor) -> Tensor:
        z = (self._from_env(action) - self.mean) * exp(-self.log_std)
        return (-0.5 * z * z - (self.log_std + log(self.half) + _LOG_SQRT_2PI)).sum(-1)

    def acted(self, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """[N, *A] actions from uniforms [N, A], the mode where there are none, and their log densities [N]."""
        parts = self.mean, self.log_std, self.center, self.half, noise
        fits = self.log_std.dim() == 1 and self.mean.dim() == 2 and (noise is None or noise.shape == self.mean.shape)
        if fits and heads.takes_rows(*parts):  # one deviation for all rows
            flat, logp = heads.gaussian(*parts, self._squash)
            return (flat.unflatten(-1, self.shape) if self.shape else flat.squeeze(-1)), logp
        action = self.mode() if noise is None else self.sample(noise)
        return action, self.log_prob(action)

    def entropy(self) -> Tensor:
        per_element = self.log_std + log(self.half) + (0.5 + _LOG_SQRT_2PI)
        return per_element.expand_as(self.mean).sum(-1)

    def to_env(self, x: Tensor) -> Tensor:
        """[N, *A] in the environment's units of [N, A] where [-1, 1] is the box, or where tanh leads into it."""
        x = self.center + self.half * x
        return x.unflatten(-1, self.shape) if self.shape else x.squeeze(-1)

    def _from_env(self, action: Tensor) -> Tensor:
        x = (action.flatten(-len(self.shape)) if self.shape else action.unsqueeze(-1)).to(self.mean.dtype)
        return (x - self.center) / self.half


class SquashedGaussian(Gaussian):
    """Normals pressed into the box by tanh (Haarnoja et al. 2018, appendix C), with the exact log-probability.

    `log_prob` takes stored actions, which `sample` keeps inside 1 - 1e-6 of the box, so it is one deterministic
    function while acting and while learning. `entropy` is that of the normals: the squashed one has no closed form.
    """

    _squash = True

    def log_prob(self, action: Tensor) -> Tensor:
        y = self._from_env(action).clamp(-_EDGE, _EDGE)
        u = 0.5 * (log1p(y) - log1p(-y))
        return tanh_normal_log_prob(u, self.mean, self.log_std).sum(-1) - log(self.half).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + (0.5 + _LOG_SQRT_2PI)).expand_as(self.mean).sum(-1)

    def to_env(self, x: Tensor) -> Tensor:
        return super().to_env(tanh(x).clamp(-_EDGE, _EDGE))


class Joint:
    """Independent distributions over the leaves of a Dict or Tuple action."""

    def __init__(self, parts: list[Distribution], noise_sizes: list[int], structure: optree.PyTreeSpec) -> None:
        self.parts, self.noise_sizes, self.structure = parts, noise_sizes, structure

    def sample(self, noise: Tensor) -> Tree:
        chunks = noise.split(self.noise_sizes, -1)
        return tree_unflatten(self.structure, [p.sample(n) for p, n in zip(self.parts, chunks)])

    def mode(self) -> Tree:
        return tree_unflatten(self.structure, [p.mode() for p in self.parts])

    def log_prob(self, action: Tree) -> Tensor:
        return sum_in_order([p.log_prob(a) for p, a in zip(self.parts, tree_leaves(action))])

    def entropy(self) -> Tensor:
        return sum_in_order([p.entropy() for p in self.parts])


def moments(dist: Any) -> Tensor | None:
    """[..., 2 A] means and log deviations of a Gaussian, before tanh if it is squashed; None of others."""
    box = getattr(dist, "box", dist)  # of gSDE
    return torch.cat([box.mean, box.log_std.expand_as(box.mean)], -1) if isinstance(box, Gaussian) else None


def kl_from(before: Tensor, dist: Any) -> Tensor:
    """[...] KL divergence (nats) of the Gaussian `dist` from the one with these moments [..., 2 A].

    For each element log(s / s0) + (s0^2 + (m0 - m)^2) / (2 s^2) - 1/2; tanh changes nothing.
    """
    after = moments(dist)
    assert after is not None
    (old_mean, old_log_std), (mean, log_std) = before.chunk(2, -1), after.chunk(2, -1)
    spread = exp(2.0 * (old_log_std - log_std)) + ((old_mean - mean) * exp(-log_std)).square()
    return (log_std - old_log_std + 0.5 * spread - 0.5).sum(-1)


_ACTED = (Categorical, Gaussian, SquashedGaussian)
"""Distributions of which the native kernel draws."""


def acted(dist: Distribution, noise: Tensor | None) -> tuple[Tree, Tensor]:
    """[N, *A] actions, the likeliest where there is no noise, and their log densities [N]."""
    if type(dist) in _ACTED:  # and no subclass, which may draw in another way
        return dist.acted(noise)  # pyright: ignore
    action = dist.mode() if noise is None else dist.sample(noise)
    return action, dist.log_prob(action)


def standard_normal(u: Tensor) -> Tensor:
    """Standard normals by inverse CDF of uniforms in (0, 1); |z| <= 5.4 for 23-bit uniforms."""
    return normal(u)


def tanh_normal_log_prob(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log density of tanh(u), element-wise, for u ~ N(mean, exp(log_std)).

    log(1 - tanh(u)^2) is formed as 2 (log 2 - |u| - log1p(exp(-2|u|))), which stays exact where 1 - tanh(u)^2
    underflows.
    """
    z = (u - mean) * exp(-log_std)
    magnitude = u.abs()
    log_det = 2.0 * (_LOG_2 - magnitude - log1p(exp(-2.0 * magnitude)))
    return -0.5 * z * z - (log_std + _LOG_SQRT_2PI) - log_det


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """The sum from first to last, in the same order for any number of rows."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _softplus(x: Tensor) -> Tensor:
    """max(x, 0) + log1p(e^-|x|); the maximum is formed so that its gradient at 0, where fresh policies are, is 1/2."""
    return 0.5 * (x + x.abs()) + log1p(exp(-x.abs()))


LOG_STD_RANGE = (-20.0, 2.0)
"""Log standard deviations are clamped to this (Haarnoja et al. 2018, their code)."""
_LOG_4 = math.log(4.0)


def squashed_sample(out: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """a = tanh(mean + std z) [N, A] and log pi(a) [N] in nats, reparametrised (Haarnoja et al. 2018, appendix C).

    log(1 - a^2) is formed as 2 (log 2 - u - softplus(-2u)), which stays exact where 1 - a^2 underflows.

    Args:
        out: [N, 2 A] mean and log standard deviation. z: [N, A] standard normals, without gradient.
    """
    if torch.is_grad_enabled() and out.requires_grad and runs_directly():
        return _Squashed.apply(out, z)  # pyright: ignore[reportReturnType]
    return _sample(out, z)[:2]


def mean_std(out: Tensor) -> Tensor:
    """The mean over rows and elements of the deviations of [N, 2 A] outputs of `squashed_sample`, without gradient."""
    return exp(out.detach().chunk(2, -1)[1].clamp(*LOG_STD_RANGE)).mean()


def _sample(out: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, log_std = out.chunk(2, -1)
    log_std = log_std.clamp(*LOG_STD_RANGE)
    noise = exp(log_std) * z
    u = mean + noise
    # log N(u) - log(1 - tanh(u)^2), summed over the elements of an action.
    each = torch.addcmul(2.0 * (u + softplus(-2.0 * u)) - log_std, z, z, value=-0.5)
    return tanh(u), each.sum(-1) - each.shape[-1] * (_LOG_4 + _LOG_SQRT_2PI), noise


class _Squashed(torch.autograd.Function):
    """Sample and log-density as one node of the graph: a third of the overhead."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        action, logp, noise = _sample(out, z)
        ctx.save_for_backward(out, action, noise)
        return action, logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        out, action, noise = ctx.saved_tensors
        for_action, for_logp = upstream[0], upstream[1].unsqueeze(-1)
        # d action / d u = 1 - a^2, d logp / d u = 2 a; u moves with the mean by 1 and with log std by std z.
        for_u = torch.addcmul(for_action, for_action, action.square(), value=-1.0).addcmul_(for_logp, action, value=2.0)
        log_std = out[..., action.shape[-1] :]
        inside = log_std.clamp(*LOG_STD_RANGE) == log_std
        return torch.cat([for_u, (for_u * noise - for_logp) * inside], -1), None
