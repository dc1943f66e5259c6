"""Activations by name; on a CPU, those made of exp round an element alike, whatever lies beside it.

torch's own elu, selu, silu and sigmoid differ in the last bit between the vectorised body and the tail of an array,
which would make a row's bits depend on how many rows lie beside it; its gelu, mish and softplus still do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from penstock.core.config import import_object
from penstock.core.errors import ConfigError, words_of
from penstock.native import elementwise
from penstock.native.direct import runs_directly
from penstock.native.elementwise import exp

Activation = Literal["tanh", "relu", "elu"]
"""Activations of the fused paths, whose derivative is a function of their output."""
ActivationName = Literal[
    "tanh", "relu", "gelu", "silu", "swish", "elu", "leaky_relu", "mish", "selu", "softplus", "sigmoid"
]
AnyActivation = ActivationName | str | Callable[[], nn.Module]
"""An activation by its name, or a class of modules or `module:NAME` of one."""

_SELU, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


def elu(x: Tensor) -> Tensor:
    """x above 0, else e^x - 1 (Clevert et al. 2016, equation 15, for alpha = 1)."""
    if elementwise.takes(x) or not _by_exp(x):
        return elementwise.elu(x)
    return torch.where(x > 0.0, x, exp(x.clamp(max=0.0)) - 1.0)


def selu(x: Tensor) -> Tensor:
    """elu, scaled to keep mean and variance (Klambauer et al. 2017, equation 2)."""
    if not _by_exp(x):
        return functional.selu(x)
    return _SELU * torch.where(x > 0.0, x, _SELU_ALPHA * (exp(x.clamp(max=0.0)) - 1.0))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x); without the kernel, below -88, where e^-x would overflow, as at -88."""
    if elementwise.takes(x) or not _by_exp(x):
        return elementwise.sigmoid(x)
    return 1.0 / (1.0 + exp((-x).clamp(max=88.0)))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x) (Elfwing et al. 2018, equation 8), also known as swish."""
    if elementwise.takes(x):
        return _Silu.apply(x)  # pyright: ignore[reportReturnType]
    return x.clamp(min=-88.0) * sigmoid(x) if _by_exp(x) else functional.silu(x)


class _Silu(torch.autograd.Function):
    """One node of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        s = elementwise.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The derivative is s (1 + x (1 - s))."""
        x, s = ctx.saved_tensors
        return (1.0 - s).mul_(x).add_(1.0).mul_(s).mul_(upstream[0])


def _by_exp(x: Tensor) -> bool:
    """True on a CPU for operations that run as they are called; elsewhere torch's own are one operation each."""
    return x.is_cpu and runs_directly()


class Elementwise(nn.Module):
    """A function of one number as an activation."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.function.__name__


_FUSED: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu, "elu": elu}
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "silu": functools.partial(Elementwise, silu),
    "swish": functools.partial(Elementwise, silu),
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "selu": functools.partial(Elementwise, selu),
    "softplus": nn.Softplus,
    "sigmoid": functools.partial(Elementwise, sigmoid),
}


def activations(activation: AnyActivation, layers: int) -> nn.ModuleList | None:
    """An activation module for each layer; None for the activations that fused paths know."""
    if activation in _FUSED:
        return None
    named = isinstance(activation, str)
    make: Any = activation if not named else _ACTIVATIONS.get(activation) or import_object(activation)
    expected = "expected a class of torch.nn.Module that needs no arguments, such as torch.nn.GELU"
    try:
        found = [make() for _ in range(layers)]
    except TypeError as error:
        raise ConfigError(f"net.activation={activation!r} raised {words_of(error)}; {expected}") from error
    if not all(isinstance(module, nn.Module) for module in found):
        raise ConfigError(f"net.activation={activation!r} made {type(found[0]).__name__}; {expected}")
    return nn.ModuleList(found)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """activation(x), as a node of the graph of its own."""
    return _FUSED[activation](x)
