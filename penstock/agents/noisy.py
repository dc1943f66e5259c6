"""Noisy layers: weights with learned noise, which explores in place of random actions (Fortunato et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.agents.mlp import are_plain, is_plain, mlp_chain, normed_by_kernel, plain_norms
from penstock.native.direct import runs_directly
from penstock.ops.activations import AnyActivation, activate, activations


class NoisyLinear(nn.Module):
    """[N, inputs] -> [N, outputs] with factorised Gaussian noise (eq. 10 and 11; initial values as in section 3.2).

    The noise is a pair of buffers that `renew` draws anew, so acting stays a function of parameters and inputs. It is
    the same for all rows and slots until then.
    """

    noise_in: Tensor
    noise_out: Tensor
    quiet = False
    """True inside `mean_weights`."""

    def __init__(self, inputs: int, outputs: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma * bound))
        self.register_buffer("noise_in", torch.zeros(inputs))
        self.register_buffer("noise_out", torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.noised()
        if x.dim() == 2 and runs_directly() and are_plain((x, *weights)):
            return mlp_chain(x, "relu", weights, True)
        return F.linear(x, *weights)

    def noised(self) -> tuple[Tensor, Tensor]:
        """Weight and bias with the present noise."""
        if self.quiet:
            return self.weight, self.bias
        weight = self.weight + self.weight_sigma * torch.outer(self.noise_out, self.noise_in)
        return weight, self.bias + self.bias_sigma * self.noise_out

    def renew(self, rng: np.random.Generator) -> None:
        """Draws the noise: f(x) = sign(x) sqrt(|x|) of standard normals."""
        for buffer in (self.noise_in, self.noise_out):
            x = torch.from_numpy(rng.standard_normal(len(buffer), np.float32))
            buffer.copy_(x.sign() * x.abs().sqrt())


class NoisyMLP(nn.Module):
    """[N, inputs] -> [N, hidden[-1]]: noisy layers, each followed by the activation."""

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...],
        sigma: float = 0.5,
        activation: AnyActivation = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.size = hidden[-1] if hidden else inputs
        self.layers = nn.ModuleList(NoisyLinear(i, o, sigma) for i, o in zip((inputs, *hidden), hidden))
        self._activation: Any = activation
        self.between = activations(activation, len(self.layers))
        self.norms = nn.ModuleList(map(nn.LayerNorm, hidden)) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = list(self.layers)
        norms: Any = self.norms
        if self.between is not None:
            for i, (layer, activation) in enumerate(zip(layers, self.between)):
                x = activation(layer(x) if norms is None else norms[i](layer(x)))
            return x
        plain = plain_norms(norms or ())
        if x.dim() == 2 and runs_directly() and plain is not None and all(is_plain(x, NoisyLinear) for x in layers):
            weights: list[Tensor] = [p for layer in layers for p in layer.noised()]
            if are_plain((x, *weights)) and (not plain or normed_by_kernel(x, weights, plain)):
                return mlp_chain(x, self._activation, weights, norms=plain)
        for i, layer in enumerate(layers):
            x = layer(x) if norms is None else norms[i](layer(x))
            x = activate(x, self._activation)
        return x


def noisy_layers(module: nn.Module) -> Iterator[NoisyLinear]:
    """The noisy layers of a module, in order."""
    return (layer for layer in module.modules() if isinstance(layer, NoisyLinear))


@contextmanager
def mean_weights(module: nn.Module) -> Generator[None]:
    """A context in which the module's noisy layers compute without noise, as in evaluations."""
    layers = list(noisy_layers(module))
    for layer in layers:
        layer.quiet = True
    try:
        yield
    finally:
        for layer in layers:
            layer.quiet = False
