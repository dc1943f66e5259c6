"""Critics of continuous control: k networks Q(obs, action) as one batched module, and the box that actions live in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from penstock.agents.mlp import (
    InitName,
    affine,
    are_plain,
    init_weights,
    is_plain,
    onednn_is_faster,
    product,
    product_into,
    relu_backward,
    through,
)
from penstock.agents.precision import in_full
from penstock.core.errors import ConfigError
from penstock.core.spec import LeafSpec, describe
from penstock.core.tree import Tree
from penstock.native import dense, library
from penstock.native.direct import runs_directly
from penstock.ops.activations import AnyActivation, activate, activations

_COLDEST = 1e-30
"""The least temperature whose logarithm an agent can hold."""
_ROWS = 32
"""With oneDNN, rows of a product that runs back through one of several networks come in multiples of this."""


class StackedMLP(nn.Module):
    """[N, inputs] -> [k, N, outputs]: k networks side by side, each with weights of its own.

    With relu, on a CPU, all of them are one node of the graph, as in `penstock.agents.mlp`, and run one after the
    other, so that the data of a network stays in the cache, and only outputs and gradients are joined. Elsewhere one
    matrix product serves all.
    """

    def __init__(
        self,
        k: int,
        inputs: int,
        hidden: tuple[int, ...],
        outputs: int = 1,
        activation: AnyActivation = "relu",
        init: InitName = "auto",
        norm: bool = False,
    ) -> None:
        super().__init__()
        widths = (inputs, *hidden, outputs)
        names: list[str] = []
        for i, (n, m) in enumerate(zip(widths, widths[1:])):
            bound = 1.0 / math.sqrt(n)  # as torch's Linear starts
            for name, shape in ((f"weight_{i}", (k, n, m)), (f"bias_{i}", (k, 1, m))):
                self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))
                names.append(name)
            for network in range(k if i < len(hidden) else 0):
                weight, bias = (self.get_parameter(name)[network] for name in names[-2:])
                init_weights(weight.t(), bias, init)
        self._names = tuple(names)
        self._activation: Any = activation
        norms: list[str] = []
        for i, m in enumerate(hidden if norm else ()):
            for name, start in ((f"norm_gain_{i}", 1.0), (f"norm_shift_{i}", 0.0)):
                self.register_parameter(name, nn.Parameter(torch.full((k, 1, m), start)))
                norms.append(name)
        self._norms = tuple(norms)
        self.between = activations(activation, len(hidden))

    def forward(self, x: Tensor) -> Tensor:
        weights, norms = self.weights(), self.norms()
        if not (self.is_relu and _runs_fused(x, x, weights, norms)):
            return self.written_out(x, weights, norms)
        if torch.is_grad_enabled():
            return _Stack.apply(x, len(norms), *weights, *norms)  # pyright: ignore[reportReturnType]
        both = zip(_networks(weights), _norms_of(norms, len(weights[0])))
        return torch.stack([_outputs(x, network, own, keeps=False)[0][-1] for network, own in both])

    @property
    def is_relu(self) -> bool:
        """True if relu follows each hidden layer, for which there are fused paths."""
        return self._activation == "relu"

    def written_out(self, x: Tensor, weights: list[Tensor], norms: list[Tensor]) -> Tensor:
        """[k, N, outputs] by operations that torch can trace, map over and differentiate as often as asked."""
        last = len(weights) - 2
        for i in range(0, last, 2):
            x = x @ weights[i] + weights[i + 1]
            x = F.layer_norm(x, x.shape[-1:]) * norms[i] + norms[i + 1] if norms else x
            x = activate(x, self._activation) if self.between is None else self.between[i // 2](x)
        return in_full(lambda x: x @ weights[last] + weights[last + 1], x)

    def weights(self) -> list[Tensor]:
        """Weight [k, inputs, outputs] and bias [k, 1, outputs] of each layer in turn, as they are at this moment."""
        return self._held(self._names)

    def norms(self) -> list[Tensor]:
        """Gain and shift [k, 1, outputs] of the LayerNorm behind each hidden layer in turn; empty without."""
        return self._held(self._norms)

    def _held(self, names: tuple[str, ...]) -> list[Tensor]:
        held: dict[str, Any] = self._parameters
        return [held[name] if name in held else getattr(self, name) for name in names]


class SideBySide(nn.Module):
    """[N, inputs] -> [k, N, outputs]: networks of any kind, each with a linear layer behind it, one after the other."""

    def __init__(self, bodies: Iterable[Any], outputs: int) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies)
        self.outs = nn.ModuleList(nn.Linear(int(body.size), outputs) for body in self.bodies)  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([through(body, x, out) for body, out in zip(self.bodies, self.outs)])


def hold_temperature(log_alpha: Tensor, settings: Any) -> None:
    """Sets log(alpha) of a soft agent to the settings' `alpha`, unless that is learned ("auto")."""
    alpha: Any = getattr(settings, "alpha", "auto")
    if alpha != "auto":
        log_alpha.data.fill_(math.log(max(alpha, _COLDEST)))


def least(stack: nn.Module, features: Tensor, action: Tensor, of: int | None = None) -> Tensor:
    """[N] the least over the first `of` networks (None: all) of their one output for the inputs [features, action].

    For a plain `StackedMLP` only the action gets a gradient: other products are skipped, and each row runs back through
    the one network that gave its minimum. The weights of a plain `SideBySide` get none either.
    """
    if not is_plain(stack, StackedMLP):
        held = [p for p in stack.parameters() if p.requires_grad] if is_plain(stack, SideBySide) else []
        for p in held:  # so that no gradient of a weight is computed, which nobody asks for
            p.requires_grad_(False)
        try:
            return stack(torch.cat([features, action], -1))[:of].squeeze(-1).amin(0)
        finally:
            for p in held:
                p.requires_grad_(True)
    plain: Any = stack
    weights, norms = ([p.detach()[:of] for p in held] for held in (plain.weights(), plain.norms()))
    if not (plain.is_relu and _runs_fused(features, action, weights, norms)):
        return plain.written_out(torch.cat([features.detach(), action], -1), weights, norms).squeeze(-1).amin(0)
    return _Smallest.apply(features, action, weights, norms)  # pyright: ignore[reportReturnType]


def _runs_fused(features: Tensor, action: Tensor, weights: list[Tensor], norms: list[Tensor]) -> bool:
    """True for plain tensors on the CPU; with norms, for those that the kernel takes."""
    parts = features, action, *weights, *norms
    if not (action.dim() == 2 and action.is_cpu and runs_directly() and are_plain(parts)):
        return False
    if not norms:
        return True
    fits = all(x.shape == bias.shape for i, x in enumerate(norms) for bias in (weights[i // 2 * 2 + 1],))
    return library.found is not None and fits and dense.takes_all(parts)


def _networks(parameters: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Weight [n, m] and bias [1, m] of each layer in turn, network by network; views."""
    return zip(*[p.unbind(0) for p in parameters])


def _norms_of(norms: Sequence[Tensor], k: int) -> list[tuple[Tensor, ...]]:
    """Gain and shift of each norm in turn, network by network; views."""
    return list(_networks(norms)) if norms else [()] * k


def _outputs(
    x: Tensor, layers: Sequence[Tensor], norms: Sequence[Tensor], keeps: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """The input [N, inputs] and the output of every layer of one network, and what its norms keep for the way back."""
    if library.found is not None and dense.takes(x, layers, turned=False):
        kept = dense.room(len(x), norms) if keeps else []
        last = len(layers) // 2 - 1
        return [x, *dense.forward(x, layers, "relu", last, turned=False, norms=norms, kept=kept)], kept
    outputs = [x]
    last = len(layers) - 2
    for i in range(0, len(layers), 2):
        outputs.append(affine(outputs[-1], layers[i], layers[i + 1], "none" if i == last else "relu"))
    return outputs, []


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, normed: int, *parameters: Tensor) -> Tensor:
        parameters, norms = parameters[: len(parameters) - normed], parameters[len(parameters) - normed :]
        of_norms = _norms_of(norms, len(parameters[0]))
        outputs = [_outputs(x, network, own) for network, own in zip(_networks(parameters), of_norms)]
        hidden = [h for of_network, _ in outputs for h in of_network[1:-1]]
        kept = [h for _, of_network in outputs for h in of_network]
        ctx.save_for_backward(x, *norms, *kept, *parameters[::2], *hidden)
        ctx.layers, ctx.normed, ctx.kept = len(parameters) // 2, normed, len(kept)
        return torch.stack([of_network[-1] for of_network, _ in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *saved = ctx.saved_tensors
        layers, normed = ctx.layers, ctx.normed
        norms, kept, saved = saved[:normed], saved[normed : normed + ctx.kept], saved[normed + ctx.kept :]
        weights, hidden = saved[:layers], saved[layers:]
        found = [w.new_empty(shape) for w in weights for shape in (w.shape, (len(w), 1, w.shape[2]))]
        found += [torch.empty_like(p) for p in norms]
        for_x: Tensor | None = None
        of_norms = _norms_of(norms, len(weights[0]))
        networks = list(zip(_networks(weights), _networks(found), of_norms, upstream[0].unbind(0)))
        for k in reversed(range(len(networks))):  # the last network's data may still be in the cache
            network, own, own_norms, gradient = networks[k]
            inputs = [x, *hidden[k * (layers - 1) : (k + 1) * (layers - 1)]]
            if library.found is not None and dense.takes_all((x, *network)):
                outputs = [*inputs[1:], gradient]  # the last one has no activation, and is not read
                wanted = ctx.needs_input_grad[0]
                how = "relu", layers - 1, outputs, gradient, own, wanted, False
                back = dense.backward(x, network, *how, own_norms, kept[k * normed : (k + 1) * normed])
                for_x = back if for_x is None or back is None else for_x.add_(back)
                continue
            for i in reversed(range(layers)):
                if i < layers - 1:
                    gradient = relu_backward(gradient, inputs[i + 1], own=True)
                product_into(inputs[i].t(), gradient, own[2 * i])
                torch.sum(gradient, 0, keepdim=True, out=own[2 * i + 1])
                if i or ctx.needs_input_grad[0]:
                    gradient = _back(gradient, network[i])
            if ctx.needs_input_grad[0]:
                for_x = gradient if for_x is None else for_x.add_(gradient)
        return for_x, None, *found


def _back(gradient: Tensor, weight: Tensor) -> Tensor:
    """gradient [N, m] @ weight^T, of a weight [n, m]."""
    return gradient * weight.t() if weight.shape[1] == 1 else product(gradient, weight.t())


class _Smallest(torch.autograd.Function):
    """The parameters come as a list, which autograd does not look into.

    The output of a row depends on its own action alone, so the slope is computed in the forward pass, while the layers'
    outputs are in the cache, and nothing else is kept.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, action: Tensor, parameters: list[Tensor], norms: list[Tensor]) -> Tensor:
        x = torch.cat([features, action], -1)
        networks, of_norms = list(_networks(parameters)), _norms_of(norms, len(parameters[0]))
        outputs = [_outputs(x, network, own) for network, own in zip(networks, of_norms)]
        least, which = torch.stack([of_network[-1].squeeze(-1) for of_network, _ in outputs]).min(0)
        if ctx.needs_input_grad[1]:
            weights = [(first[-action.shape[1] :], *rest[1::2]) for first, *rest in networks]
            hidden = [[*of_network[1:-1], *kept] for of_network, kept in outputs]
            ctx.save_for_backward(_slopes(which, weights, hidden, of_norms))
        return least

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, upstream[0].unsqueeze(1) * ctx.saved_tensors[0], None, None


def _slopes(
    which: Tensor,
    weights: Sequence[Sequence[Tensor]],
    hidden: Sequence[Sequence[Tensor]],
    norms: Sequence[Sequence[Tensor]],
) -> Tensor:
    """[N, n] the derivative of each row's output by its inputs, of the one network that `which` names.

    Args:
        weights: of each network and layer, [n, m] in the first. hidden: [N, m] of each network and hidden layer, and
            then what norms kept. norms: gain and shift in turn of each network.
    """
    if len(weights) == 1:
        return _slope(weights[0], hidden[0], norms[0], len(which))
    out = weights[0][0].new_empty(len(which), len(weights[0][0]))
    for k, (of_network, outputs) in enumerate(zip(weights, hidden)):
        rows = (which == k).nonzero().squeeze(1)
        if count := len(rows):
            if onednn_is_faster():  # it takes 10 ms to compile a product for each new number of rows
                rows = torch.cat([rows, rows.new_zeros(-count % _ROWS)])
            slope = _slope(of_network, [h.index_select(0, rows) for h in outputs], norms[k], len(rows))
            out.index_copy_(0, rows[:count], slope[:count])
    return out


def _slope(weights: Sequence[Tensor], hidden: Sequence[Tensor], norms: Sequence[Tensor], rows: int) -> Tensor:
    """[rows, n] the derivative of one network's output by its inputs."""
    hidden, kept = hidden[: len(weights) - 1], hidden[len(weights) - 1 :]
    if library.found is not None and hidden and dense.takes_all((*hidden, *weights)):
        outputs, ones = [*hidden, hidden[0].new_ones(rows, 1)], hidden[0].new_ones(rows, 1)
        x = hidden[0].new_empty(rows, len(weights[0]))  # is not read: no weight gets a gradient
        found = dense.backward(x, weights, "relu", len(hidden), outputs, ones, None, True, False, norms, kept)
        assert found is not None
        return found
    slope = weights[-1].t().expand(rows, -1)
    for i in reversed(range(len(hidden))):
        slope = product(relu_backward(slope, hidden[i], own=i < len(hidden) - 1), weights[i].t())
    return slope


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
                "DiscreteSAC for choices, IQL with a dataset, PPO for anything else"
            )
        low, high = action.bound("low").ravel(), action.bound("high").ravel()
        if not action.bounded:
            raise ConfigError(
                f"{algo} needs finite action bounds; got low={low.tolist()}, high={high.tolist()}: give the "
                "action a finite box with gymnasium.wrappers.TransformAction (in mjlab and Isaac Lab by env_kwargs "
                "action_bound=1), or use PPO"
            )
        if not (high > low).all():
            raise ConfigError(
                f"action bounds low={low.tolist()}, high={high.tolist()}; expected low < high: leave out what "
                "cannot move, by a wrapper that fills it in"
            )
        self.shape, self.size = action.shape, action.size
        self.register_buffer("center", torch.as_tensor((low + high) / 2, dtype=torch.float32), persistent=False)
        self.register_buffer("half_range", torch.as_tensor((high - low) / 2, dtype=torch.float32), persistent=False)

    def to_env(self, unit: Tensor) -> Tensor:
        """[N, size] in [-1, 1] -> [N, *A] in the environment's units."""
        return self.shaped(self.center + self.half_range * unit)

    def shaped(self, flat: Tensor) -> Tensor:
        """[N, size] -> [N, *A]."""
        return flat.unflatten(-1, self.shape) if self.shape else flat.squeeze(-1)

    def to_unit(self, action: Tensor) -> Tensor:
        """[N, *A] in the environment's units -> [N, size], clipped to [-1, 1]."""
        x = action.flatten(-len(self.shape)) if self.shape else action.unsqueeze(-1)
        return ((x.float() - self.center) / self.half_range).clamp(-1.0, 1.0)
