"""The gradients of a loss: each total to its optimizer's parameters, clipped by norm."""

from __future__ import annotations

import math

import torch

from penstock.core.errors import ConfigError
from penstock.learn.algorithm import Loss, Optimizers


def set_gradients(loss: Loss, optimizers: Optimizers, max_grad_norm: float | None) -> float:
    """Sets `.grad` of every optimizer's parameters, scaled so that the norm over each optimizer is at most the limit.

    Returns:
        The largest gradient norm before clipping; inf or nan (of a loss or a gradient): no step must be taken.
    """
    totals = loss.total if isinstance(loss.total, dict) else {"all": loss.total}
    if not totals or not totals.keys() <= optimizers.keys():
        raise ConfigError(f"loss_fn gave totals for {sorted(totals)}; optimizer_fn gave optimizers {sorted(optimizers)}: one "
                          "tensor goes with the one optimizer 'all', else each total needs an optimizer of its name")  # fmt: skip
    largest = 0.0
    for i, (name, total) in enumerate(totals.items()):
        parameters = [p for group in optimizers[name].param_groups for p in group["params"]]
        gradients = torch.autograd.grad(total, parameters, retain_graph=i + 1 < len(totals), allow_unused=True)
        present = [g for g in gradients if g is not None]
        if not present:
            raise ConfigError(
                f"no parameter of optimizer {name!r} takes part in its loss; does loss_fn call the agent?"
            )
        norms = torch._foreach_norm(present)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        value = float(total.detach())
        if not (math.isfinite(norm) and math.isfinite(value)):
            return norm if math.isfinite(value) else value
        if max_grad_norm is not None and norm > max_grad_norm:
            # Not in place: autograd may hand the same tensor to two parameters.
            scale = max_grad_norm / norm
            present = torch._foreach_mul(present, scale)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        scaled = iter(present)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = None if gradient is None else next(scaled)
        largest = max(largest, norm)
    return largest
