"""Gradients of a loss into the parameters: clipped by their norm, and refused if they are not finite."""

from __future__ import annotations

import math

import torch

from penstock.core.errors import ConfigError
from penstock.learn.algorithm import Loss, Optimizers


def set_gradients(loss: Loss, optimizers: Optimizers, max_grad_norm: float | None) -> float:
    """Sets `.grad` of every optimizer's parameters, scaled so that the norm over each optimizer is at most the limit.

    Returns:
        The largest gradient norm before clipping; inf or nan means that no step must be taken.
    """
    totals = loss.total if isinstance(loss.total, dict) else {"all": loss.total}
    if totals.keys() != optimizers.keys():
        raise ConfigError(f"loss_fn gave totals for {sorted(totals)}; optimizer_fn gave optimizers {sorted(optimizers)}: one "
                          "tensor goes with the one optimizer 'all', else both are dicts with the same names")  # fmt: skip
    largest = 0.0
    for i, (name, total) in enumerate(totals.items()):
        parameters = [p for group in optimizers[name].param_groups for p in group["params"]]
        gradients = torch.autograd.grad(total, parameters, retain_graph=i + 1 < len(totals), allow_unused=True)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        used = [p for p, g in zip(parameters, gradients) if g is not None]
        present = [g for g in gradients if g is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(present))))
        if not math.isfinite(norm):
            return norm
        if max_grad_norm is not None and norm > max_grad_norm:
            # Not in place: autograd may hand the same tensor to two parameters.
            for parameter, scaled in zip(used, torch._foreach_mul(present, max_grad_norm / norm)):
                parameter.grad = scaled
        largest = max(largest, norm)
    return largest

