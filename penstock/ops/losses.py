"""Losses and diagnostics of policy-gradient learning, each with its source; every mean is over valid rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.native.elementwise import exp
from penstock.ops.value_learning import shape_error


def masked_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """The mean of `x` where `valid`; of all of it, [N], if `valid` is None. 0 if nothing is valid."""
    if valid is None:
        if x.ndim != 1:  # [N, N] is what [N] and [N, 1] broadcast to
            raise shape_error("masked_mean", "x [N], a number for each row, where valid is None", x=x)
        return x.mean() if x.numel() else x.sum()
    if x.shape != valid.shape:
        raise shape_error("masked_mean", "equal shapes", x=x, valid=valid)
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def squared_error(prediction: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """The mean of (prediction - target)^2 where `valid`; one node of the graph where everything is."""
    if prediction.shape != target.shape:
        raise shape_error("squared_error", "equal shapes", prediction=prediction, target=target)
    if valid is None:
        return F.mse_loss(prediction, target)
    return masked_mean((prediction - target).square(), valid)


def clipped_squared_error(
    prediction: Tensor, target: Tensor, before: Tensor, clip: float | Tensor, valid: Tensor | None
) -> Tensor:
    """The mean of the larger of (V - R)^2 and (clip(V, V_before - clip, V_before + clip) - R)^2 where `valid`.

    Value clipping of OpenAI baselines' PPO2 (Engstrom et al. 2020, "Implementation matters", section 3).
    """
    if not prediction.shape == target.shape == before.shape:
        raise shape_error("clipped_squared_error", "equal shapes", prediction=prediction, target=target, before=before)
    near = torch.minimum(torch.maximum(prediction, before - clip), before + clip)
    return masked_mean(torch.maximum((prediction - target).square(), (near - target).square()), valid)


def normalized(advantage: Tensor, valid: Tensor) -> Tensor:
    """Advantages of a whole batch shifted and scaled to mean 0 and standard deviation 1 over its valid rows."""
    if advantage.shape != valid.shape:
        raise shape_error("normalized", "equal shapes", advantage=advantage, valid=valid)
    if not advantage.is_cpu:
        count, mean, variance = _moments(advantage, valid)
        return torch.where(count < 2, advantage, (advantage - mean) / (variance.sqrt() + 1e-8))
    chosen = advantage[valid]
    if chosen.numel() < 2:
        return advantage
    std, mean = torch.std_mean(chosen)
    return (advantage - mean) / (std + 1e-8)


def _moments(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and unbiased variance over valid rows: on a device to take these rows out waits for their number."""
    count = valid.sum()
    mean = torch.where(valid, x, 0.0).sum() / count
    return count, mean, torch.where(valid, x - mean, 0.0).square().sum() / (count - 1)


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """PPO's loss of each sample, -min(ratio * A, clip(ratio) * A), and the ratio (Schulman et al. 2017, eq. 7).

    Written as -min(ratio * A, A + clip * |A|), which is the same function with a node less: the clipped term can be
    the smaller one only where it is (1 + clip) * A for A > 0, or (1 - clip) * A for A < 0.
    """
    if log_ratio.shape != advantage.shape:
        raise shape_error("clipped_surrogate", "equal shapes", log_ratio=log_ratio, advantage=advantage)
    ratio = exp(log_ratio)
    return -torch.minimum(ratio * advantage, advantage + clip * advantage.abs()), ratio


def approx_kl(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Non-negative estimate of KL(old, new) for each sample: (ratio - 1) - log ratio (Schulman 2020, estimator k3)."""
    if log_ratio.shape != ratio.shape:
        raise shape_error("approx_kl", "equal shapes", log_ratio=log_ratio, ratio=ratio)
    return (ratio - 1.0) - log_ratio


def explained_variance(value: Tensor, return_: Tensor, valid: Tensor) -> Tensor:
    """1 - Var[return - value] / Var[return] over valid rows: 1 is perfect, 0 is no better than a constant."""
    if not value.shape == return_.shape == valid.shape:
        raise shape_error("explained_variance", "equal shapes", value=value, return_=return_, valid=valid)
    if not value.is_cpu:
        (count, _, variance), (*_, rest) = _moments(return_, valid), _moments(return_ - value, valid)
        return torch.where((count > 1) & (variance > 0), 1.0 - rest / variance, torch.nan)
    value, return_ = value[valid], return_[valid]
    if return_.numel() < 2:
        return torch.full((), torch.nan)
    variance = return_.var()
    return torch.where(variance > 0, 1.0 - (return_ - value).var() / variance, torch.nan)
