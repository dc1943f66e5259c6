"""SimBa's residual network by the native kernel, as one node of the autograd graph; see `penstock.agents.mlp.SimBa`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.native import dense, layer_norm, library
from penstock.native.direct import runs_directly


def takes(x: Tensor, weights: Sequence[Tensor], norms: Sequence[Tensor]) -> bool:
    """True if the kernel takes the network, whose layers are given as to `residual`, where gradients are wanted."""
    if library.found is None or not torch.is_grad_enabled() or type(x) is not Tensor or not runs_directly():
        return False
    width = weights[1].numel()
    return dense.takes(x, weights) and dense.takes_all(norms) and all(p.shape == (width,) for p in norms)


def residual(x: Tensor, weights: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
    """[N, inputs] -> [N, width]: a layer, then h + W2 relu(W1 LayerNorm(h)) block by block, then a LayerNorm.

    Args:
        weights: weight and bias of the first layer, then of W1 and W2 of each block.
        norms: gain and shift of each block's LayerNorm in turn, and of the last.
    """
    return _Residual.apply(x, len(weights), *weights, *norms)  # pyright: ignore[reportReturnType]


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: int, *parameters: Tensor) -> Tensor:
        weights, norms = parameters[:layers], parameters[layers:]
        x = x.contiguous()
        (h,) = dense.forward(x, weights[:2], "relu", 0)
        kept, first = [], h
        for i in range(2, layers, 4):
            gain, shift = norms[i // 2 - 1 : i // 2 + 1]
            normed, *own = layer_norm.forward(h, gain, shift)
            both = dense.forward(normed, weights[i : i + 4], "relu", 1)
            kept += [normed, *own, *both]
            h = h + both[1]
        out, *own = layer_norm.forward(h, *norms[-2:])
        ctx.layers = layers
        ctx.save_for_backward(x, first, *kept, *own, *weights[::2], *norms[::2])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, first, *saved = ctx.saved_tensors
        blocks = (ctx.layers - 2) // 4
        kept, (normal, inverse) = saved[: 5 * blocks], saved[5 * blocks : 5 * blocks + 2]
        weights, gains = saved[5 * blocks + 2 : 7 * blocks + 3], saved[7 * blocks + 3 :]
        trains = any(ctx.needs_input_grad[2:])

        def into(*of: Tensor) -> list[Tensor] | None:
            return [t for w in of for t in (torch.empty_like(w), w.new_empty(len(w)))] if trains else None

        gradient, *slopes = layer_norm.backward(upstream[0], gains[-1], normal, inverse)
        found: list[Tensor] = []
        for i in reversed(range(blocks)):
            normed, normal, inverse, *both = kept[5 * i : 5 * i + 5]
            layers = weights[2 * i + 1 : 2 * i + 3]
            own = into(*layers)
            inner = dense.backward(normed, layers, "relu", 1, both, gradient, own, True)
            assert inner is not None
            inner, *more = layer_norm.backward(inner, gains[i], normal, inverse)
            gradient = gradient + inner
            found, slopes = [*(own or ()), *found], [*more, *slopes]
        own = into(weights[0])
        slope = dense.backward(x, weights[:1], "relu", 0, [first], gradient, own, ctx.needs_input_grad[0])
        every = [*(own or ()), *found, *slopes] if trains else [None] * (len(ctx.needs_input_grad) - 2)
        return slope, None, *every
