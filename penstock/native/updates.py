"""Norms of gradients and steps of optimizers by the native kernel, for float32 tensors on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from penstock.native import library
from penstock.native.dense import addresses, takes_all


def takes(tensors: Sequence[Tensor]) -> bool:
    """True if there is a library, and it takes these tensors as they lie."""
    return library.found is not None and takes_all(tensors)


def squares(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of the squares of each tensor's numbers."""
    sums = (ctypes.c_double * len(tensors))()
    library.found.squares(len(tensors), addresses(tensors), _sizes(tensors), sums)
    return list(sums)


def adam(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """One step in place (Kingma and Ba 2015, algorithm 1; with `decoupled` AdamW).

    Args:
        averages, squares: running means of gradients and of their squares. steps: [parameters] float32 counts, this
            step included.
    """
    library.found.adam(
        len(parameters),
        *(addresses(x) for x in (parameters, gradients, averages, squares)),
        _sizes(parameters),
        steps.data_ptr(),
        lr,
        *betas,
        eps,
        weight_decay,
        decoupled,
    )


def rmsprop(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One step in place, as `torch.optim.RMSprop` takes it without momentum.

    Args:
        squares: running means of the squares of gradients.
    """
    where = (addresses(x) for x in (parameters, gradients, squares))
    library.found.rmsprop(len(parameters), *where, _sizes(parameters), lr, alpha, eps, weight_decay)


def _sizes(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * len(tensors))(*[x.numel() for x in tensors])
