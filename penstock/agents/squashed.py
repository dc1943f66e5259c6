"""Sample and log-density of a tanh-squashed Gaussian as one node of the graph: a third of the overhead."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG_STD_RANGE = (-20.0, 2.0)
"""Log standard deviations are clamped to this (Haarnoja et al. 2018, their code)."""
_LOG_4 = math.log(4.0)
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def squashed_sample(out: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """a = tanh(mean + std z) [N, A] and log pi(a) [N] in nats, reparametrised (Haarnoja et al. 2018, appendix C).

    log(1 - a^2) is formed as 2 (log 2 - |u| - log1p(exp(-2|u|))), which stays exact where 1 - a^2 underflows.

    Args:
        out: [N, 2 A] mean and log standard deviation. z: [N, A] standard normals, without gradient.
    """
    if torch.is_grad_enabled() and out.requires_grad:
        return _Squashed.apply(out, z)  # pyright: ignore[reportReturnType]
    return _sample(out, z)[:2]


def _sample(out: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, log_std = out.chunk(2, -1)
    log_std = log_std.clamp(*LOG_STD_RANGE)
    noise = log_std.exp() * z
    u = mean + noise
    magnitude = u.abs()
    # log N(u) - log(1 - tanh(u)^2), summed over the elements of an action.
    each = 2.0 * (magnitude + torch.log1p((-2.0 * magnitude).exp())) - 0.5 * z * z - log_std
    return torch.tanh(u), each.sum(-1) - each.shape[-1] * (_LOG_4 + _LOG_SQRT_2PI), noise


class _Squashed(torch.autograd.Function):
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
        inside = (log_std >= LOG_STD_RANGE[0]) & (log_std <= LOG_STD_RANGE[1])
        return torch.cat([for_u, (for_u * noise - for_logp) * inside], -1), None
