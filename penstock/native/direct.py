"""Whether operations of torch run as they are called: not traced, compiled, exported, mapped or watched."""

from __future__ import annotations

from torch._C import (  # pyright: ignore[reportPrivateUsage]
    _get_tracing_state,  # pyright: ignore
    _is_any_autocast_enabled,  # pyright: ignore
    _len_torch_dispatch_stack,  # pyright: ignore
)
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore


def values_are_there() -> bool:
    """True if a tensor's numbers may decide what runs: operations are not traced, compiled, exported or mapped."""
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
