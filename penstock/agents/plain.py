"""Plain layers: modules whose call is their own arithmetic and nothing else, so that several may run as one node.

A module may be changed in many ways that act on its call alone: hooks, pruning, parametrisations, a replaced layer or
`forward`, tracing, export, transforms of functions. Fused arithmetic stands aside for each of them. The checks take
about a microsecond for three layers, and nothing is remembered between calls, so nothing can be stale.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks_of_all

_TENSORS = (nn.Parameter, Tensor)  # no others: a subclass has arithmetic of its own


def values_are_there() -> bool:
    """True if a tensor's numbers may decide what runs: not while operations are traced, compiled, exported or mapped."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()  # pyright: ignore[reportPrivateUsage]
        or is_transformed()
        or torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportPrivateUsage]
    )


def is_transformed() -> bool:
    """True inside `torch.func.vmap`, `grad` and their like."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


def runs_directly() -> bool:
    """True if operations run as they are called and nobody looks on.

    False where `values_are_there` is, and under autocast, forward differentiation, or hooks of all modules.
    """
    return values_are_there() and not (
        torch._C._is_any_autocast_enabled()  # pyright: ignore
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or hooks_of_all._has_any_global_hook()  # pyright: ignore
    )


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """True if the layer is exactly of this kind, without hooks, parametrisations or a `forward` of its own."""
    return type(layer) is kind and not (
        layer._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or layer._forward_hooks  # pyright: ignore[reportPrivateUsage]
        or layer._backward_hooks  # pyright: ignore[reportPrivateUsage]
        or layer._backward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or "forward" in layer.__dict__
    )


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """True if all are there and of torch's own kind."""
    return all(type(x) in _TENSORS for x in tensors)


def plain_weights(layers: Iterable[nn.Module]) -> list[Tensor] | None:
    """Weight and bias of each layer in turn, as they are at this moment; None if one is no plain Linear with a bias."""
    weights: list[Tensor | None] = []
    for layer in layers:
        if not is_plain(layer, nn.Linear):
            return None
        held = layer._parameters  # pyright: ignore[reportPrivateUsage]  # attribute look-ups on modules are slow
        weights += (held["weight"], held["bias"])
    return weights if are_plain(weights) else None  # pyright: ignore[reportReturnType]
