"""Plain layers: modules whose call is their own arithmetic and nothing else, so that several may run as one node.

A module may be changed in many ways that act on its call alone: hooks, pruning, parametrisations, a replaced layer or
`forward`, tracing, export, transforms of functions. Fused arithmetic stands aside for each of them. The checks take
about a microsecond for three layers, and nothing is remembered between calls, so nothing can be stale.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import (  # pyright: ignore[reportPrivateUsage]
    _get_tracing_state,  # pyright: ignore
    _is_any_autocast_enabled,  # pyright: ignore
    _len_torch_dispatch_stack,  # pyright: ignore
)
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore

_Linear, _Parameter = nn.Linear, nn.Parameter


def values_are_there() -> bool:
    """True if a tensor's numbers may decide what runs: not while operations are traced, compiled, exported or mapped."""
    return not (is_compiling() or _get_tracing_state() or is_transformed() or _len_torch_dispatch_stack())


def is_transformed() -> bool:
    """True inside `torch.func.vmap`, `grad` and their like."""
    return peek_interpreter_stack() is not None


def runs_directly() -> bool:
    """True if operations run as they are called and nobody looks on.

    False where `values_are_there` is, and under autocast, forward differentiation, or hooks of all modules.
    """
    return not (
        is_compiling()
        or _get_tracing_state()
        or peek_interpreter_stack()
        or _len_torch_dispatch_stack()
        or _is_any_autocast_enabled()
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or _has_any_global_hook()
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
    """True if all are there and of torch's own kind: a subclass has arithmetic of its own."""
    for x in tensors:
        if type(x) is not nn.Parameter and type(x) is not Tensor:
            return False
    return True


def plain_weights(layers: Iterable[nn.Module]) -> list[Tensor] | None:
    """Weight and bias of each layer in turn, as they are at this moment; None if one is no plain Linear with a bias.

    This is `is_plain` and `are_plain` written out, at a fifth of a microsecond for a layer.
    """
    weights: list[Any] = []
    for layer in layers:
        d: Any = layer.__dict__  # attribute look-ups on modules are slow
        if (
            type(layer) is not _Linear
            or d["_forward_pre_hooks"]
            or d["_forward_hooks"]
            or d["_backward_hooks"]
            or d["_backward_pre_hooks"]
            or "forward" in d
        ):
            return None
        held = d["_parameters"]
        for x in (held["weight"], held["bias"]):
            if type(x) is not _Parameter and type(x) is not Tensor:
                return None
            weights.append(x)
    return weights
