"""Chains of dense layers by the native kernel: forward, and backward from outputs that were kept.

A layer has a weight [outputs, inputs] as torch's Linear (`turned`) or [inputs, outputs], and a bias. The first
`activated` layers are followed by the activation; in front of it they have a LayerNorm, where `norms` are given: gain
[outputs] and shift of each in turn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.native import library

ACTIVATIONS = {"none": 0, "tanh": 1, "relu": 2, "elu": 3}
_widths: dict[tuple[int, ...], ctypes.Array[ctypes.c_int]] = {}


def takes(x: Tensor, parameters: Sequence[Tensor], turned: bool = True) -> bool:
    """True if all are float32 on the CPU, lie row after row, and fit each other; asked where there is a library.

    Of what does not fit torch makes an error, where the kernel would read other memory.
    """
    if x.dtype is not torch.float32 or not x.is_cpu or x.dim() != 2:
        return False
    return takes_all(parameters) and fit(x.shape[1], parameters, turned)


def fit(width: int, parameters: Sequence[Tensor], turned: bool = True) -> bool:
    """True if each weight has as many inputs as the one before has outputs, the first `width`, and so each bias."""
    for weight, bias in zip(parameters[::2], parameters[1::2]):
        outputs, inputs = weight.shape if turned else weight.shape[::-1]
        if inputs != width or bias.numel() != outputs:
            return False
        width = outputs
    return True


def takes_all(tensors: Sequence[Tensor]) -> bool:
    """True if all are of float32, on the CPU, and lie row after row."""
    return all(x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() for x in tensors)


def norms_fit(norms: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """True if there are no norms, or each has as many numbers as the bias of its layer, and `takes_all` holds."""
    return all(x.numel() == parameters[i // 2 * 2 + 1].numel() for i, x in enumerate(norms)) and takes_all(norms)


def room(rows: int, norms: Sequence[Tensor]) -> list[Tensor]:
    """Memory for `kept` of `forward`: normalised numbers [N, width] and inverse deviations [N] in turn."""
    return [torch.empty(shape) for gain in norms[::2] for shape in ((rows, gain.numel()), (rows,))]


def forward(
    x: Tensor,
    parameters: Sequence[Tensor],
    activation: str,
    activated: int,
    turned: bool = True,
    norms: Sequence[Tensor] = (),
    kept: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The outputs [N, width] of every layer for rows [N, inputs].

    Args:
        parameters: weight and bias of each layer in turn. kept: `room`, written for `backward`.
    """
    x = x.contiguous()
    weights, widths = parameters[::2], _widths_of(x, parameters[::2], turned)
    rows = len(x)
    outputs = [torch.empty(rows, width) for width in widths[1:]]
    library.found.forward(
        x.data_ptr(),
        rows,
        len(weights),
        as_ints(widths),
        addresses(weights),
        addresses(parameters[1::2]),
        ACTIVATIONS[activation],
        activated,
        turned,
        addresses(norms) if norms else None,
        addresses(kept) if kept else None,
        addresses(outputs),
    )
    return outputs


def last(
    x: Tensor, parameters: Sequence[Tensor], activation: str, activated: int, norms: Sequence[Tensor] = ()
) -> Tensor:
    """The output [N, width] of the last layer alone, for weights [outputs, inputs]: `forward` with less around it."""
    if not x.is_contiguous():
        x = x.contiguous()
    widths = (x.shape[1], *[w.shape[0] for w in parameters[::2]])
    out = torch.empty(len(x), widths[-1])
    library.found.last(
        x.data_ptr(),
        len(x),
        len(widths) - 1,
        as_ints(widths),
        addresses(parameters),
        ACTIVATIONS[activation],
        activated,
        addresses(norms) if norms else None,
        out.data_ptr(),
    )
    return out


def backward(
    x: Tensor,
    weights: Sequence[Tensor],
    activation: str,
    activated: int,
    outputs: Sequence[Tensor],
    gradient: Tensor,
    into: Sequence[Tensor] | None,
    for_x: bool,
    turned: bool = True,
    norms: Sequence[Tensor] = (),
    kept: Sequence[Tensor] = (),
) -> Tensor | None:
    """The gradient [N, inputs] of the rows, if `for_x`, by that of the last output [N, width].

    Args:
        outputs, kept: as `forward` returned and wrote them. into: tensors for the gradients of weight and bias of each
            layer in turn, and then of norms; None for none.
    """
    x, gradient = x.contiguous(), gradient.contiguous()
    widths, rows = _widths_of(x, weights, turned), len(x)
    spare = torch.empty(2, rows * max(widths))
    found = torch.empty_like(x) if for_x else None
    library.found.backward(
        x.data_ptr(),
        rows,
        len(weights),
        as_ints(widths),
        addresses(weights),
        ACTIVATIONS[activation],
        activated,
        turned,
        addresses(norms) if norms else None,
        addresses(kept) if norms else None,
        addresses(outputs),
        gradient.data_ptr(),
        None if into is None else addresses(into[: 2 * len(weights) : 2]),
        None if into is None else addresses(into[1 : 2 * len(weights) : 2]),
        None if into is None or not norms else addresses(into[2 * len(weights) :]),
        None if found is None else found.data_ptr(),
        spare[0].data_ptr(),
        spare[1].data_ptr(),
    )
    return found


def _widths_of(x: Tensor, weights: Sequence[Tensor], turned: bool) -> tuple[int, ...]:
    return (x.shape[1], *(w.shape[0 if turned else 1] for w in weights))


def as_ints(widths: tuple[int, ...]) -> ctypes.Array[ctypes.c_int]:
    """The same numbers for C; made once."""
    found = _widths.get(widths)
    if found is None:
        found = _widths[widths] = (ctypes.c_int * len(widths))(*widths)
    return found


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where the numbers of each tensor lie."""
    return (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])
