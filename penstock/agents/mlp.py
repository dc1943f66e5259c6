"""The MLP: fully connected layers as one node of the autograd graph: the same arithmetic with a third of the overhead.

For 512 rows of 64 units most of a training step is not matrix products but graph nodes.

torch multiplies float32 by MKL, which keeps to registers of 256 bits where the processor is not Intel's. That is half
the speed where the processor computes with 512 at once, as AMD's do from family 26 (Zen 5) on. There large products of
training go through oneDNN, which also comes with torch and uses the widest registers of every vendor; elsewhere both
are as fast, and MKL costs less around a product. The machine and the shape alone decide which one multiplies, so a run
repeats itself; acting always goes through MKL, in which the bits of a row do not depend on the rows beside it.

A module may be changed in ways that act on its call alone: hooks, pruning, parametrisations, a replaced layer, tracing,
export, transforms of functions. So every fused path first checks that its layers are plain, at a fifth of a microsecond
each, and otherwise runs them as modules. Nothing is remembered between calls, so nothing can be stale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from penstock.agents.precision import in_full
from penstock.core.machine import cpu_family
from penstock.native import dense, library, residual
from penstock.native.acting import Acting
from penstock.native.direct import runs_directly, values_are_there
from penstock.native.elementwise import orthogonal_
from penstock.native.layer_norm import EPS, layer_norm
from penstock.ops.activations import Activation, AnyActivation, activate, activations, elu

InitName = Literal[
    "auto", "orthogonal", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "torch"
]

_INITS: dict[str, Callable[[Tensor], Any]] = {
    "orthogonal": functools.partial(orthogonal_, gain=math.sqrt(2.0)),
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": functools.partial(nn.init.kaiming_uniform_, nonlinearity="relu"),
    "kaiming_normal": functools.partial(nn.init.kaiming_normal_, nonlinearity="relu"),
}

LARGE = 4_000_000
"""Multiplications from which oneDNN is the faster one inside whole updates: its calls cost 10 us more."""

_WIDE_AMD = 26
"""Family of AMD's first processors that compute with 512 bits at once; those before take two turns for as many."""

_OF_NUMPY = (torch.float32, torch.float64)
"""Types of which numpy has vectorised functions."""

_Linear, _Parameter = nn.Linear, nn.Parameter


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Orthogonal weights of this gain and zero bias (Saxe et al. 2014; Engstrom et al. 2020 for PPO)."""
    orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def init_weights(weight: Tensor, bias: Tensor | None, init: InitName) -> None:
    """Starts a layer of weights [outputs, inputs, ...] by name, its bias at 0; `torch` leaves it as torch does."""
    if init in _INITS:
        _INITS[init](weight.data)
        if bias is not None:
            bias.data.zero_()


def init_layers(module: nn.Module, init: InitName) -> None:
    """Starts all Linears and convolutions of a module by name; `auto` leaves them as they are."""
    for layer in module.modules() if init != "auto" else ():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.reset_parameters()
            init_weights(layer.weight, layer.bias, init)


class MLP(nn.Module):
    """[N, inputs] -> [N, hidden[-1]]: fully connected layers, each followed by the activation.

    Args:
        norm: a LayerNorm (Ba et al. 2016) between each layer and its activation.
        gain: of orthogonal weights, with zero biases; None for the start of torch's Linear.
        init: how the weights start instead, by name; auto: by `gain`.
    """

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...],
        activation: AnyActivation = "tanh",
        *,
        gain: float | None = math.sqrt(2.0),
        init: InitName = "auto",
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.size = hidden[-1] if hidden else inputs
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip((inputs, *hidden), hidden))
        for layer in self.layers if gain is not None else ():
            orthogonal(layer, gain)  # pyright: ignore[reportArgumentType]
        init_layers(self.layers, init)
        self.activation: Any = activation
        self.between = activations(activation, len(self.layers))
        self.norms = nn.ModuleList(map(nn.LayerNorm, hidden)) if norm else None

    def forward(self, x: Tensor, out: nn.Module | None = None) -> Tensor:
        """`out`: an output layer to apply as well; see `through`."""
        layers: Any = self._modules["layers"]  # attribute look-ups on modules cost as much as a small product
        norms: Any = self._modules.get("norms") or ()
        if (between := self._modules.get("between")) is None:
            return run_layers(x, layers._modules.values(), self.activation, out, norms)
        for i, (layer, activation) in enumerate(zip(layers, between)):  # pyright: ignore
            x = activation(norms[i](layer(x)) if norms else layer(x))
        return x if out is None else in_full(out, x)


class SimBa(nn.Module):
    """[N, inputs] -> [N, width]: the residual network of Lee et al. 2024, arXiv:2410.09754, section 4.2.

    A linear layer, `blocks` times x + W2 relu(W1 LayerNorm(x)) with 4 `width` units between, and a LayerNorm. Weights
    start as in the authors' code: orthogonal of gain 1, in the blocks normal by He et al. 2015.
    """

    def __init__(self, inputs: int, width: int, blocks: int) -> None:
        super().__init__()
        self.size = width
        self.embedding = nn.Linear(inputs, width)
        orthogonal(self.embedding, 1.0)
        self.blocks = nn.ModuleList(SimBaBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        if all(is_plain(block, SimBaBlock) for block in blocks):
            weights = plain_weights((self.embedding, *(layer for block in blocks for layer in (block.up, block.down))))
            norms = plain_norms((*(block.norm for block in blocks), self.norm))
            if weights and norms and residual.takes(x, weights, norms):
                return residual.residual(x, weights, norms)
        x = run_layers(x, (), "relu", self.embedding)
        for block in blocks:
            x = block(x)
        return normed(self.norm, x)


class SimBaBlock(nn.Module):
    """[N, width] -> [N, width]: x + W2 relu(W1 LayerNorm(x)); see `SimBa`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (self.up, self.down):
            init_weights(layer.weight, layer.bias, "kaiming_normal")

    def forward(self, x: Tensor) -> Tensor:
        return x + run_layers(normed(self.norm, x), (self.up,), "relu", self.down)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), for a plain LayerNorm by the kernel where it can."""
    plain = plain_norms((norm,))
    return norm(x) if plain is None else layer_norm(x, *plain)


def through(body: nn.Module, x: Tensor, out: nn.Module | None = None) -> Tensor:
    """[N, inputs] -> out(body(x)), or body(x): as one node of the graph where both are plain, the body an MLP."""
    if is_plain(body, MLP):
        return body.forward(x, out)
    x = body(x)
    return x if out is None else in_full(out, x)


def chain_by_kernel(agent: Any, kind: type, encoder: Any, body: nn.Module, out: nn.Module, outputs: int) -> Any:
    """Makes an `Acting` of an agent's plain layers on flat observations, given its head; None if it has others.

    Also None for agents whose `act` is not exactly that of `kind`, with hooks, or where somebody looks on.
    """
    if type(agent) is not kind or not agent.__dict__.keys().isdisjoint(("act", "prepared")) or not encoder.is_identity:
        return None
    parts: Any = body.__dict__["_modules"]  # attribute look-ups on modules are slow
    if library.found is None or not runs_directly() or not is_plain(body, MLP) or parts.get("between") is not None:
        return None
    weights = plain_weights((*parts["layers"]._modules.values(), out))
    norms = plain_norms(parts.get("norms") or ())
    if (
        not weights
        or norms is None
        or weights[-1].numel() != outputs
        or not dense.takes_all(weights)
        or not dense.fit(encoder.size, weights)
        or not dense.norms_fit(norms, weights)
    ):
        return None
    seen = agent.preparation.for_kernel() if agent.preparation.active else {}
    return None if seen is None else functools.partial(Acting, weights, norms, cast(MLP, body).activation, **seen)


def out_of(body: nn.Module | None, x: Tensor, out: nn.Module) -> Tensor:
    """`through`, or out(x) where there is no body."""
    return in_full(out, x) if body is None else through(body, x, out)


def run_layers(
    x: Tensor,
    hidden: Iterable[nn.Module],
    activation: Activation,
    out: nn.Module | None = None,
    norms: Iterable[nn.Module] = (),
) -> Tensor:
    """[N, inputs] -> [N, outputs]: layers, each followed by the activation, then an output layer if given.

    Plain Linears run as one node of the graph, with their parameters of this moment; anything else as modules. So do
    plain `norms`, one before each activation, by the native kernel alone.
    """
    if type(x) is Tensor and x.dim() == 2 and runs_directly():
        weights = plain_weights(hidden if out is None else (*hidden, out))
        plain = plain_norms(norms) if norms else ()
        if weights is not None and plain is not None and (not plain or normed_by_kernel(x, weights, plain)):
            return mlp_chain(x, activation, weights, out is not None, plain)
    each = iter(norms)
    for layer in hidden:
        x = layer(x)
        x = next(each)(x) if norms else x
        x = activate(x, activation)
    return x if out is None else in_full(out, x)


def normed_by_kernel(x: Tensor, weights: Sequence[Tensor], norms: Sequence[Tensor]) -> bool:
    """True if the native kernel takes a chain of these weights with these norms."""
    return library.found is not None and dense.takes(x, weights) and dense.norms_fit(norms, weights)


def mlp_chain(
    x: Tensor,
    activation: Activation,
    weights: Sequence[Tensor],
    with_out: bool = False,
    norms: Sequence[Tensor] = (),
) -> Tensor:
    """[N, inputs] -> [N, outputs]: layers, each followed by the activation.

    Args:
        weights: weight and bias of each layer in turn. with_out: no activation after the last one.
        norms: gain and shift of the LayerNorm before each activation, which only the kernel has.
    """
    activated = len(weights) // 2 - with_out
    if library.found is not None and weights and dense.takes(x, weights):
        if torch.is_grad_enabled():
            parts = *weights, *norms
            return _NativeChain.apply(x, activation, activated, len(norms), *parts)  # pyright: ignore[reportReturnType]
        return dense.last(x, weights, activation, activated, norms)
    if torch.is_grad_enabled():
        return _Chain.apply(x, activation, activated, *weights)  # pyright: ignore[reportReturnType]
    acts = torch.is_inference_mode_enabled()
    for i in range(0, len(weights), 2):
        kind = activation if i < 2 * activated else "none"
        x = (_by_mkl if acts else linear)(x, weights[i], weights[i + 1], kind)
    return x


class _Chain(torch.autograd.Function):
    """The activation follows layers 0 to activated - 1; its derivative is a function of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Any, activated: int, *parameters: Tensor) -> Tensor:
        outputs = [x]
        for i in range(0, len(parameters), 2):
            kind = activation if i < 2 * activated else "none"
            outputs.append(linear(outputs[-1], parameters[i], parameters[i + 1], kind))
        ctx.activation, ctx.activated = activation, activated
        ctx.save_for_backward(*outputs[: activated + 1], *parameters[::2])
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, activated = ctx.saved_tensors, ctx.activated
        outputs, weights = saved[: activated + 1], saved[activated + 1 :]
        gradients: list[Tensor | None] = []
        gradient: Any = upstream[0]
        for i in reversed(range(len(weights))):
            if i < activated and ctx.activation == "relu":
                gradient = relu_backward(gradient, outputs[i + 1], gradient is not upstream[0])
            elif i < activated and ctx.activation == "tanh":
                gradient = torch.ops.aten.tanh_backward(gradient, outputs[i + 1])
            elif i < activated:
                gradient = gradient * (outputs[i + 1].clamp(max=0.0) + 1.0)
            inputs = outputs[i]
            # Few inputs: the product the other way round spares the library a slow transposition.
            few = inputs.shape[1] < gradient.shape[1]
            gradients += [gradient.sum(0), product(inputs.t(), gradient).t() if few else product(gradient.t(), inputs)]
            gradient = product(gradient, weights[i]) if i or ctx.needs_input_grad[0] else None
        return gradient, None, None, *reversed(gradients)


class _NativeChain(torch.autograd.Function):
    """The same by the native kernel; the last `normed` parameters are those of norms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Any, activated: int, normed: int, *parameters: Tensor) -> Tensor:
        weights, norms = parameters[: len(parameters) - normed], parameters[len(parameters) - normed :]
        kept = dense.room(len(x), norms)
        outputs = dense.forward(x, weights, activation, activated, norms=norms, kept=kept)
        ctx.activation, ctx.activated, ctx.layers, ctx.normed = activation, activated, len(outputs), normed
        ctx.save_for_backward(x, *outputs, *norms, *kept, *weights[::2])
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *saved = ctx.saved_tensors
        n, m = ctx.layers, ctx.normed  # norms, and as many tensors that they kept
        outputs, norms, kept, weights = saved[:n], saved[n : n + m], saved[n + m : n + 2 * m], saved[n + 2 * m :]
        trains = any(ctx.needs_input_grad[4:])
        into = [t for w in weights for t in (torch.empty_like(w), w.new_empty(len(w)))] if trains else None
        into = into and [*into, *(torch.empty_like(p) for p in norms)]
        how = ctx.activation, ctx.activated, outputs, upstream[0], into, ctx.needs_input_grad[0]
        return (
            dense.backward(x, weights, *how, norms=norms, kept=kept),
            None,
            None,
            None,
            *(into or (None,) * (2 * n + m)),
        )


def relu_backward(gradient: Tensor, output: Tensor, own: bool) -> Tensor:
    """The gradient before a relu of this output; written over the one behind it, if that is the caller's `own`."""
    if own:
        return torch.ops.aten.threshold_backward.grad_input(gradient, output, 0, grad_input=gradient)
    return torch.ops.aten.threshold_backward(gradient, output, 0)


def by_onednn(x: Tensor, outputs: int) -> bool:
    """True if [n, m] @ [m, outputs] goes to oneDNN.

    Large ones of float32 on a CPU where that is faster, and not in inference mode (acting).
    """
    return (
        onednn_is_faster()
        and x.shape[-2] * x.shape[-1] * outputs >= LARGE
        and x.is_cpu
        and x.dtype is torch.float32
        and not torch.is_inference_mode_enabled()
    )


@functools.cache
def onednn_is_faster() -> bool:
    """True if this processor computes with 512 bits at once and MKL does not use them."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    vendor, family = cpu_family()
    return there and (family >= _WIDE_AMD if vendor == "AuthenticAMD" else vendor != "GenuineIntel")


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of matrices, without gradient."""
    if by_onednn(a, b.shape[1]):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b)


def product_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a @ b of matrices, without gradient, into `out`."""
    if by_onednn(a, b.shape[1]):
        out.copy_(torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], ""))
    else:
        torch.mm(a, b, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | Literal["none"] = "none") -> Tensor:
    """activation(x weight^T + bias) [N, outputs], without gradient."""
    if by_onednn(x, weight.shape[0]):  # a relu of its own would make 0 of NaN, and hide a network that has diverged
        return _activated(torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""), activation)
    return _by_mkl(x, weight, bias, activation)


def affine(x: Tensor, weight: Tensor, bias: Tensor, activation: Activation | Literal["none"] = "none") -> Tensor:
    """activation(x weight + bias) [N, outputs], without gradient; weight [inputs, outputs], bias [1, outputs]."""
    if by_onednn(x, weight.shape[1]):
        y = torch.ops.mkldnn._linear_pointwise(x, weight.t(), bias.squeeze(0), "none", [], "")
    else:
        y = torch.addmm(bias, x, weight)
    return _activated(y, activation)


def _by_mkl(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | Literal["none"]) -> Tensor:
    return _activated(F.linear(x, weight, bias), activation)


def _activated(y: Tensor, activation: Activation | Literal["none"]) -> Tensor:
    """activation(y), in place but for elu."""
    if activation == "relu":
        return y.relu_()
    if activation == "elu":
        return elu(y)
    return y if activation == "none" else _tanh_(y)


def _tanh_(x: Tensor) -> Tensor:
    """tanh(x) in place, by numpy, which takes a sixth of torch's time and rounds every element alike."""
    if x.is_cpu and x.dtype in _OF_NUMPY:
        array = x.numpy()
        np.tanh(array, array)
        return x
    return x.tanh_()


def surely(x: Tensor) -> bool:
    """True if these bools are all true and may decide what runs; on a GPU, which would have to be waited for, False."""
    return x.is_cpu and values_are_there() and bool(x.all())


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """True if the layer is exactly of this kind, without hooks, parametrisations or a `forward` of its own."""
    d: Any = layer.__dict__  # attribute look-ups on modules are slow
    return type(layer) is kind and not (
        d["_forward_pre_hooks"]
        or d["_forward_hooks"]
        or d["_backward_hooks"]
        or d["_backward_pre_hooks"]
        or "forward" in d
        or "_compiled_call_impl" in d
    )


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """True if all are there and of torch's own kind: a subclass has arithmetic of its own."""
    return all(type(x) in (_Parameter, Tensor) for x in tensors)


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
            or "_compiled_call_impl" in d
        ):
            return None
        held = d["_parameters"]
        for x in (held["weight"], held["bias"]):
            if type(x) is not _Parameter and type(x) is not Tensor:
                return None
            weights.append(x)
    return weights


def plain_norms(norms: Iterable[nn.Module]) -> list[Tensor] | None:
    """Gain and shift of each LayerNorm in turn, as they are at this moment; None if one is not plain."""
    found: list[Any] = []
    for norm in norms:
        if not is_plain(norm, nn.LayerNorm) or norm.eps != EPS:
            return None
        found += [norm.weight, norm.bias]
    return found if are_plain(found) else None
