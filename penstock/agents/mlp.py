"""The MLP: fully connected layers as one node of the autograd graph: the same arithmetic with a third of the overhead.

For 512 rows of 64 units most of a training step is not matrix products but graph nodes and torch's tanh, which takes
nine times as long as its sigmoid on CPU. `benchmarks/update.py` measures both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Activation = Literal["tanh", "relu"]

# Tensors, since torch takes a microsecond to make one of a Python number: half of what this costs for 16 rows.
_ONE, _TWO = torch.tensor(1.0), torch.tensor(2.0)

_LANES = 16  # float32 numbers in the widest vector register


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Orthogonal weights of this gain and zero bias (Saxe et al. 2014; Engstrom et al. 2020 for PPO)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class MLP(nn.Module):
    """[N, inputs] -> [N, hidden[-1]]: fully connected layers, each followed by the activation."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], activation: Activation = "tanh") -> None:
        super().__init__()
        self.size = hidden[-1] if hidden else inputs
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip((inputs, *hidden), hidden))
        for layer in self.layers:
            orthogonal(layer, math.sqrt(2.0))  # pyright: ignore[reportArgumentType]
        self._activation: Activation = activation
        # The parameters themselves, since attribute look-ups on modules cost as much as a small matrix product.
        self._weights = [p for layer in self.layers for p in (layer.weight, layer.bias)]

    def forward(self, x: Tensor, out: tuple[Tensor, ...] = ()) -> Tensor:
        """`out`: weight and bias of an output layer to apply as well."""
        return mlp_chain(x, self._activation, self._weights, out)  # pyright: ignore[reportArgumentType]


def mlp_chain(x: Tensor, activation: Activation, hidden: Sequence[Tensor], out: Sequence[Tensor] = ()) -> Tensor:
    """[N, inputs] -> [N, outputs]: hidden layers, each followed by the activation, then a linear one if given.

    Args:
        hidden: weight and bias of each layer in turn. out: weight and bias of the output layer.
    """
    if torch.is_grad_enabled():
        return _Chain.apply(x, activation, len(hidden) // 2, *hidden, *out)  # pyright: ignore[reportReturnType]
    for i in range(0, len(hidden), 2):
        x = _activate(F.linear(x, hidden[i], hidden[i + 1]), activation)
    return F.linear(x, *out) if out else x


def _activate(x: Tensor, activation: Activation) -> Tensor:
    """In place. tanh(x) = 2 sigmoid(2x) - 1, within 2e-7, where rows fill whole vector registers.

    The tail of an array gets another last bit from torch's sigmoid (not from its tanh), so at other widths a row's
    bits would depend on how many rows lie beside it.
    """
    if activation == "relu":
        return x.relu_()
    if x.shape[-1] % _LANES:
        return x.tanh_()
    return x.mul_(_TWO).sigmoid_().mul_(_TWO).sub_(_ONE)


class _Chain(torch.autograd.Function):
    """Layers 0 to activated - 1 are followed by the activation, whose derivative is a function of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, activated: int, *parameters: Tensor) -> Tensor:
        outputs = [x]
        for i in range(0, len(parameters), 2):
            y = F.linear(outputs[-1], parameters[i], parameters[i + 1])
            outputs.append(_activate(y, activation) if i < 2 * activated else y)
        ctx.activation, ctx.activated = activation, activated
        ctx.save_for_backward(*outputs[: activated + 1], *parameters[::2])
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, activated = ctx.saved_tensors, ctx.activated
        outputs, weights = saved[: activated + 1], saved[activated + 1 :]
        gradients: list[Tensor | None] = []
        gradient: Any = upstream[0]
        for i in reversed(range(len(weights))):
            if i < activated and ctx.activation == "relu":
                gradient = torch.ops.aten.threshold_backward(gradient, outputs[i + 1], 0)
            elif i < activated:
                gradient = torch.ops.aten.tanh_backward(gradient, outputs[i + 1])
            inputs = outputs[i]
            # Few inputs: the product the other way round spares the library a slow transposition.
            few = inputs.shape[1] < gradient.shape[1]
            gradients += [gradient.sum(0), (inputs.t() @ gradient).t() if few else gradient.t() @ inputs]
            gradient = gradient @ weights[i] if i or ctx.needs_input_grad[0] else None
        return gradient, None, None, *reversed(gradients)
