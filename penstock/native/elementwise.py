"""exp, log and their like by the native kernel, element by element, with gradients; torch's choose by the processor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from penstock.native import library
from penstock.native.direct import runs_directly

_EXP, _LOG, _LOG1P, _TANH, _NORMAL, _SIGMOID, _ELU = range(7)
_ROOT_2 = math.sqrt(2.0)


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return _run(_EXP, x) if takes(x) else x.exp()


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    return _run(_LOG, x) if takes(x) else x.log()


def log1p(x: Tensor) -> Tensor:
    """log(1 + x)."""
    return _run(_LOG1P, x) if takes(x) else x.log1p()


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return _run(_TANH, x) if takes(x) else x.tanh()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return _run(_SIGMOID, x) if takes(x) else x.sigmoid()


def elu(x: Tensor) -> Tensor:
    """x above 0, else e^x - 1."""
    return _run(_ELU, x) if takes(x) else functional.elu(x)


def normal(u: Tensor) -> Tensor:
    """Standard normals at whose left u of all lies, for u in (0, 1), without gradient."""
    return _mapped(_NORMAL, u) if takes(u) else _ROOT_2 * torch.erfinv(2.0 * u - 1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return x.relu() + log1p(exp(-x.abs())) if takes(x) else functional.softplus(x)


def log_softmax(x: Tensor) -> Tensor:
    """log of the softmax over the last dimension [..., n]."""
    if not takes(x):
        return torch.log_softmax(x, -1)
    if torch.is_grad_enabled() and x.requires_grad:
        return _LogSoftmax.apply(x)  # pyright: ignore[reportReturnType]
    return _log_softmax(x)


def softmax(x: Tensor) -> Tensor:
    """The softmax over the last dimension [..., n]."""
    return exp(log_softmax(x)) if takes(x) else x.softmax(-1)


def orthogonal_(weight: Tensor, gain: float) -> None:
    """Makes rows or columns of a weight [outputs, ...] orthogonal and of length `gain` (Saxe et al. 2014)."""
    if library.found is None or weight.dtype is not torch.float32 or not weight.is_cpu:
        torch.nn.init.orthogonal_(weight, gain)
        return
    with torch.no_grad():
        uniform = torch.empty(len(weight), weight.numel() // len(weight)).uniform_(2.0**-25, 1.0)
        drawn = _mapped(_NORMAL, uniform.clamp(max=1.0 - 2.0**-24))
        tall = drawn.shape[0] > drawn.shape[1]
        rows = (drawn.t() if tall else drawn).double().contiguous()
        library.found.orthonormal(rows.data_ptr(), *rows.shape)
        weight.copy_(((rows.t() if tall else rows) * gain).reshape(weight.shape))


def takes(x: Tensor) -> bool:
    """True if there is a library and it takes this tensor, whose operations run as they are called."""
    return (
        library.found is not None
        and runs_directly()  # first: torch's compiler follows what comes after
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.dtype is torch.float32
        and x.is_cpu
    )


def _run(f: int, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Elementwise.apply(x, f)  # pyright: ignore[reportReturnType]
    return _mapped(f, x)


def _mapped(f: int, x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    library.found.apply(f, x.data_ptr(), x.numel(), y.data_ptr())
    return y


def _log_softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.shape[-1]
    library.found.log_softmax(x.data_ptr(), x.numel() // max(n, 1), n, y.data_ptr())
    return y


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f: int) -> Tensor:
        y = _mapped(f, x)
        ctx.f = f
        ctx.save_for_backward(x if f in (_LOG, _LOG1P) else y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (kept,), f, gradient = ctx.saved_tensors, ctx.f, upstream[0]
        if f == _EXP:
            return gradient * kept, None
        if f == _SIGMOID:
            return gradient * (kept * (1.0 - kept)), None
        if f == _ELU:
            return gradient * (kept.clamp(max=0.0) + 1.0), None
        if f == _TANH:
            return torch.ops.aten.tanh_backward(gradient, kept), None
        return gradient / (kept if f == _LOG else kept + 1.0), None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _log_softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """gradient - softmax * its sum, in which every row's sum is made in order."""
        (y,), gradient = ctx.saved_tensors, upstream[0]
        total = gradient[..., :1]
        for i in range(1, gradient.shape[-1]):
            total = total + gradient[..., i : i + 1]
        return gradient - _mapped(_EXP, y) * total
