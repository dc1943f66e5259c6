"""LayerNorm of rows by the native kernel, which sums in one order; by torch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from penstock.native import library
from penstock.native.dense import takes_all
from penstock.native.direct import runs_directly

EPS = 1e-5
"""Under the root, as in torch; kernel.c has it too."""


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """gain (x - mean) / root(variance + 1e-5) + shift over the last axis of x [N, n] (Ba et al. 2016, equation 4)."""
    if library.found is None or x.dim() != 2 or not runs_directly() or not takes_all((x, gain, shift)):
        return F.layer_norm(x, x.shape[-1:], gain, shift, EPS)
    if torch.is_grad_enabled():
        return _LayerNorm.apply(x, gain, shift)  # pyright: ignore[reportReturnType]
    return _normed(x, gain, shift, None, None)


def forward(x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output of `layer_norm` by the kernel, and what `backward` needs."""
    normal, inverse = torch.empty_like(x), x.new_empty(len(x))
    return _normed(x, gain, shift, normal, inverse), normal, inverse


def backward(gradient: Tensor, gain: Tensor, normal: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, gain and shift by that of the output."""
    gradient = gradient.contiguous()
    found = torch.empty_like(normal), torch.empty_like(gain), torch.empty_like(gain)
    given = (x.data_ptr() for x in (gain, normal, inverse, *found))
    library.found.layer_norm_back(gradient.data_ptr(), *normal.shape, *given)
    return found


def _normed(x: Tensor, gain: Tensor, shift: Tensor, normal: Tensor | None, inverse: Tensor | None) -> Tensor:
    y = torch.empty_like(x)
    kept = (None if kept is None else kept.data_ptr() for kept in (normal, inverse))
    library.found.layer_norm(x.data_ptr(), *x.shape, gain.data_ptr(), shift.data_ptr(), y.data_ptr(), *kept)
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        y, normal, inverse = forward(x, gain, shift)
        ctx.save_for_backward(gain, normal, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return backward(upstream[0], *ctx.saved_tensors)
