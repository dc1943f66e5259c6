"""Learning distributions of returns: projection and loss of C51, loss of quantile regression."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.ops.value_learning import huber, shape_error


def project_categorical(prob: Tensor, reward: Tensor, discount: Tensor, atoms: Tensor) -> Tensor:
    """The distribution of reward + discount * Z on the atoms of Z itself (Bellemare et al. 2017, algorithm 1).

    Each atom's mass goes to its two neighbours by nearness, to the end atom if it falls outside; one that falls on an
    atom gives it everything (the paper's text loses it). Positions are computed in steps between atoms, so that a
    distribution that does not move keeps its bits; masses are added in float64, so that their order hardly matters.

    Args:
        prob: [N, K] float, the distribution of Z on each row, without gradient.
        reward: [N] float, the sum of discounted rewards before Z.
        discount: [N] float, discount^n, and 0 where the sum ended with a terminated row.
        atoms: [K] float, evenly spaced and ascending, K >= 2.

    Returns:
        [N, K] of prob's dtype: as much mass as `prob`, and its mean where nothing falls outside. A row whose reward
        or discount is NaN is NaN.
    """
    if prob.ndim != 2 or atoms.shape != prob.shape[1:] or len(atoms) < 2:
        raise shape_error("project_categorical", "prob [N, K] and atoms [K] with K >= 2", prob=prob, atoms=atoms)
    if reward.shape != prob.shape[:1] or discount.shape != prob.shape[:1]:
        expected = "reward and discount [N] for prob [N, K]"
        raise shape_error("project_categorical", expected, reward=reward, discount=discount, prob=prob)
    K = len(atoms)
    mass, atoms, scale = prob.double(), atoms.double(), discount.double()
    shift = torch.addcmul(reward.double(), scale - 1.0, atoms[0]) / ((atoms[-1] - atoms[0]) / (K - 1))
    index = torch.arange(K, dtype=torch.float64, device=prob.device)
    position = torch.addcmul(shift.unsqueeze(1), scale.unsqueeze(1), index).clamp_(0, K - 1)
    below = position.long().clamp_(0, K - 2)  # after the cast: NaN must not become an index that no memory has
    above_mass = position.sub_(below).mul_(mass)
    out = torch.zeros_like(mass)
    out.scatter_add_(1, below, mass - above_mass)
    out[:, 1:].scatter_add_(1, below, above_mass)
    return out.to(prob.dtype)


def categorical_cross_entropy(target_prob: Tensor, logp: Tensor) -> Tensor:
    """[N] -sum_i target_i log p_i, C51's loss of each sample (Bellemare et al. 2017, algorithm 1).

    Args:
        target_prob: [N, K] float, without gradient. An atom of target 0 adds 0 even where log p is -inf.
        logp: [N, K] float, log-probabilities as `log_softmax` returns them.
    """
    if target_prob.shape != logp.shape or logp.ndim != 2:
        raise shape_error("categorical_cross_entropy", "one shape [N, K]", target_prob=target_prob, logp=logp)
    return -(target_prob * logp).masked_fill(target_prob == 0, 0.0).sum(1)


def categorical_targets(prob: Tensor, reward: Tensor, discount: Tensor, atoms: Tensor, clipped: bool) -> Tensor:
    """Projected targets of k critics: [N, 1, K] that of the smallest mean, one for all, or [N, k, K] each its own.

    Clipped double Q-learning (Fujimoto et al. 2018, eq. 10) of distributions (Seo et al. 2025, arXiv:2505.22642). Ties
    go to the first critic.

    Args:
        prob: [k, N, K] float, of the target critics at the next action, without gradient.
        reward, discount, atoms: as in `project_categorical`. clipped: the smallest mean for all.
    """
    if prob.ndim != 3:
        raise shape_error("categorical_targets", "prob [k, N, K]", prob=prob)
    k = len(prob)
    own = project_categorical(prob.flatten(0, 1), reward.repeat(k), discount.repeat(k), atoms).view(prob.shape)
    if clipped:
        least = (own * atoms).sum(-1).argmin(0)
        own = own.take_along_dim(least.view(1, -1, 1), 0)
    return own.transpose(0, 1)


def categorical_loss(logp: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The sum over k critics of the mean of weight * cross-entropy, and what replay is told of each row.

    Args:
        logp: [k, N, K] float, log-probabilities of the actions taken. target: [N, 1, K] or [N, k, K], without gradient.
        weight: [N] of prioritized replay; None for 1.

    Returns:
        the loss, a scalar; and [N] mean cross-entropy over the critics, for priorities, None where there is no weight.
    """
    if logp.ndim != 3 or target.ndim != 3 or target.shape[1] not in (1, len(logp)):
        raise shape_error("categorical_loss", "logp [k, N, K], target [N, 1 or k, K]", logp=logp, target=target)
    rows = target.transpose(0, 1).expand_as(logp).flatten(0, 1)
    each = categorical_cross_entropy(rows, logp.flatten(0, 1)).view(logp.shape[:2])
    if weight is None:
        return each.mean(1).sum(), None
    return (each * weight).mean(1).sum(), each.detach().mean(0)


def quantile_huber(quantiles: Tensor, target: Tensor, taus: Tensor | None = None, *, kappa: float = 1.0) -> Tensor:
    """[N] sum over quantiles i of the mean over targets j of |tau_i - 1{u < 0}| L_kappa(u), u = target_j - quantile_i.

    Dabney et al. 2018 (QR-DQN), eq. 9 and 10, with L_kappa the Huber function. IQN divides it by kappa, which is the
    same at 1.

    Args:
        quantiles: [N, K] float, which the gradient reaches. target: [N, M] float, without gradient.
        taus: [K] or [N, K] float in (0, 1); None is QR-DQN's midpoints (2i + 1) / (2K).
        kappa: where the loss turns linear; 0 is plain quantile regression, |u| instead of L.
    """
    if quantiles.ndim != 2 or target.ndim != 2 or len(quantiles) != len(target):
        raise shape_error("quantile_huber", "quantiles [N, K], target [N, M]", quantiles=quantiles, target=target)
    if not kappa >= 0:
        raise ConfigError(f"quantile_huber got kappa={kappa}; expected kappa >= 0")
    K = quantiles.shape[1]
    if taus is None:
        taus = (torch.arange(K, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / K
    if taus.shape not in (quantiles.shape, quantiles.shape[1:]):
        raise shape_error("quantile_huber", "taus [K] or [N, K] for quantiles [N, K]", taus=taus, quantiles=quantiles)
    error = target.unsqueeze(1) - quantiles.unsqueeze(2)
    weight = (taus.unsqueeze(-1) - (error < 0).to(taus.dtype)).abs()
    return (weight * (huber(error, kappa) if kappa else error.abs())).mean(2).sum(1)
