"""Gradients of a loss into the parameters: clipped by their norm, and refused if they are not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.learn.algorithm import Loss, Optimizers


def set_gradients(loss: Loss, optimizers: Optimizers, max_grad_norm: float | None) -> float:
    """Sets `.grad` of every optimizer's parameters, scaled so that the norm over each optimizer is at most the limit.

    Returns:
        The largest gradient norm before clipping; inf or nan means that no step must be taken.
    """
    totals = loss.total if isinstance(loss.total, dict) else {"all": loss.total}
    largest = 0.0
    for i, (name, total) in enumerate(totals.items()):
        parameters = [p for group in optimizers[name].param_groups for p in group["params"]]
        gradients = torch.autograd.grad(total, parameters, retain_graph=i + 1 < len(totals), allow_unused=True)
        norm = _norm([g for g in gradients if g is not None])
        if not math.isfinite(norm):
            return norm
        if max_grad_norm is not None and norm > max_grad_norm:
            torch._foreach_mul_([g for g in gradients if g is not None], max_grad_norm / norm)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        largest = max(largest, norm)
    return largest


def _norm(gradients: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
