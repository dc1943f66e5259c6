"""Critics of continuous control: k networks Q(obs, action) as one batched module, and the box that actions live in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.agents.mlp import are_plain, by_onednn, is_plain, linear, product, relu_backward, runs_directly
from penstock.agents.precision import in_full
from penstock.core.errors import ConfigError
from penstock.core.spec import LeafSpec, describe
from penstock.core.tree import Tree


class StackedMLP(nn.Module):
    """[N, inputs] -> [k, N, outputs]: k networks of relu layers side by side, each with weights of its own.

    One matrix product serves all of them, and one node of the graph each forward, as in `penstock.agents.mlp`.
    """

    def __init__(self, k: int, inputs: int, hidden: tuple[int, ...], outputs: int = 1) -> None:
        super().__init__()
        widths = (inputs, *hidden, outputs)
        names: list[str] = []
        for i, (n, m) in enumerate(zip(widths, widths[1:])):
            bound = 1.0 / math.sqrt(n)  # as torch's Linear starts
            for name, shape in ((f"weight_{i}", (k, n, m)), (f"bias_{i}", (k, 1, m))):
                self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))
                names.append(name)
        self._names = tuple(names)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights()
        if not (x.dim() == 2 and runs_directly() and are_plain((x, *weights))):
            return _written_out(x, weights)
        if torch.is_grad_enabled():
            return _Stack.apply(x, *weights)  # pyright: ignore[reportReturnType]
        return _layers(x, weights)[-1]

    def weights(self) -> list[Tensor]:
        """Weight [k, inputs, outputs] and bias [k, 1, outputs] of each layer in turn, as they are at this moment."""
        held: dict[str, Any] = self._parameters
        return [held[name] if name in held else getattr(self, name) for name in self._names]


def least(stack: nn.Module, x: Tensor, of: int | None = None) -> Tensor:
    """[N] the least over the first `of` networks (None: all) of their one output.

    Of a plain `StackedMLP` gradients go to `x` alone: the products for the weights' gradients are spared, and each row
    runs back through the one network that it came from.
    """
    if not is_plain(stack, StackedMLP):
        return stack(x)[:of].squeeze(-1).amin(0)
    weights: list[Tensor] = stack.weights()  # pyright: ignore
    if of is not None:
        weights = [p.detach()[:of] for p in weights]
    if not (x.dim() == 2 and runs_directly() and are_plain((x, *weights))):
        return _written_out(x, [p.detach() for p in weights]).squeeze(-1).amin(0)
    if torch.is_grad_enabled():
        return _Smallest.apply(x, weights)  # pyright: ignore[reportReturnType]
    return _layers(x, weights)[-1].squeeze(-1).amin(0)


def _written_out(x: Tensor, weights: list[Tensor]) -> Tensor:
    """[k, N, outputs] by operations that torch can trace, map over and differentiate as often as asked."""
    last = len(weights) - 2
    for i in range(0, last, 2):
        x = (x @ weights[i] + weights[i + 1]).relu()
    return in_full(lambda x: x @ weights[last] + weights[last + 1], x)


def _layers(x: Tensor, parameters: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    """The input [k, N, inputs] and the output of every layer."""
    outputs = [x.expand(len(parameters[0]), *x.shape)]
    last = len(parameters) - 2
    for i in range(0, len(parameters), 2):
        x, weight, bias = outputs[-1], parameters[i], parameters[i + 1]
        if by_onednn(x, weight.shape[2]):
            kind = "none" if i == last else "relu"
            each = zip(x, weight.transpose(1, 2), bias.squeeze(1))
            outputs.append(torch.stack([linear(x, w, b, kind) for x, w, b in each]))
        elif weight.shape[2] == 1:  # a row times a matrix takes half the time of a matrix times a column
            y = torch.baddbmm(bias, weight.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2)
            outputs.append(y if i == last else y.relu_())
        else:
            y = torch.baddbmm(bias, x, weight)
            outputs.append(y if i == last else y.relu_())
    return outputs


def _product(x: Tensor, w: Tensor) -> Tensor:
    """[k, n, m] @ [k, m, p]."""
    if by_onednn(x, w.shape[2]):
        return torch.stack([product(a, b) for a, b in zip(x, w)])
    return torch.bmm(x, w)


def _weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """[k, inputs, outputs] from the inputs [k, N, inputs] and the gradient [k, N, outputs] of a layer."""
    if gradient.shape[2] == 1:
        return torch.matmul(gradient.transpose(1, 2), x).reshape(len(x), -1, 1)
    return _product(x.transpose(1, 2), gradient)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        outputs = _layers(x, parameters)
        ctx.save_for_backward(*outputs[:-1], *parameters[::2])
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        count = len(saved) // 2
        inputs, weights = saved[:count], saved[count:]
        gradients: list[Tensor | None] = []
        gradient: Any = upstream[0]
        for i in reversed(range(count)):
            if i < count - 1:
                gradient = relu_backward(gradient, inputs[i + 1], own=True)
            gradients += [gradient.sum(1, keepdim=True), _weight_gradient(inputs[i], gradient)]
            if i or ctx.needs_input_grad[0]:
                back = weights[i].transpose(1, 2)
                gradient = gradient * back if gradient.shape[2] == 1 else _product(gradient, back)
        return gradient.sum(0) if ctx.needs_input_grad[0] else None, *reversed(gradients)


class _Smallest(torch.autograd.Function):
    """The parameters come as a list, which autograd does not look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: list[Tensor]) -> Tensor:
        outputs = _layers(x, parameters)
        least, which = outputs[-1].squeeze(-1).min(0)
        ctx.save_for_backward(which, *outputs[1:-1], *parameters[::2])
        return least

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        which, *saved = ctx.saved_tensors
        count = (len(saved) + 1) // 2
        hidden, weights = saved[: count - 1], saved[count - 1 :]
        out = upstream[0].new_empty(len(which), weights[0].shape[1])
        for k in range(len(weights[0])):
            rows = None if len(weights[0]) == 1 else (which == k).nonzero().squeeze(1)
            gradient = _at(upstream[0], rows).unsqueeze(1) * weights[-1][k].t()
            for i in reversed(range(count - 1)):
                gradient = relu_backward(gradient, _at(hidden[i][k], rows), own=True)
                gradient = product(gradient, weights[i][k].t())
            out = gradient if rows is None else out.index_copy_(0, rows, gradient)
        return out, None


def _at(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


class ActionBox(nn.Module):
    """Maps between the environment's bounds and [-1, 1], where actors and critics work, element by element.

    Raises:
        ConfigError: the action is no box of floats with finite bounds, low below high.
    """

    center: Tensor
    half_range: Tensor

    def __init__(self, action: Tree, algo: str) -> None:
        super().__init__()
        if not isinstance(action, LeafSpec) or action.kind != "box" or not action.dtype.startswith("float"):
            raise ConfigError(
                f"{algo} needs one box of floats as action; the environment takes {describe(action)}: use DQN or "
                "DiscreteSAC for choices, PPO for anything else"
            )
        low, high = action.bound("low").ravel(), action.bound("high").ravel()
        if not action.bounded:
            raise ConfigError(
                f"{algo} needs finite action bounds; got low={low.tolist()}, high={high.tolist()}: give the "
                "action a finite box with gymnasium.wrappers.TransformAction, or use PPO"
            )
        if not (high > low).all():
            raise ConfigError(f"action bounds low={low.tolist()}, high={high.tolist()}; expected low < high")
        self.shape, self.size = action.shape, action.size
        self.register_buffer("center", torch.as_tensor((low + high) / 2, dtype=torch.float32), persistent=False)
        self.register_buffer("half_range", torch.as_tensor((high - low) / 2, dtype=torch.float32), persistent=False)

    def to_env(self, unit: Tensor) -> Tensor:
        """[N, size] in [-1, 1] -> [N, *A] in the environment's units."""
        x = self.center + self.half_range * unit
        return x.unflatten(-1, self.shape) if self.shape else x.squeeze(-1)

    def to_unit(self, action: Tensor) -> Tensor:
        """[N, *A] in the environment's units -> [N, size], clipped to [-1, 1]."""
        x = action.flatten(-len(self.shape)) if self.shape else action.unsqueeze(-1)
        return ((x.float() - self.center) / self.half_range).clamp(-1.0, 1.0)
