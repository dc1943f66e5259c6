"""Noisy layers: the formula by hand, who draws the noise and when, and what is learned through it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from penstock.agents.noisy import NoisyLinear, NoisyMLP, mean_weights, noisy_layers


def squeezed(x: np.ndarray) -> np.ndarray:
    """f(x) = sign(x) sqrt(|x|), Fortunato et al. 2018, below eq. 11."""
    return np.array([math.copysign(math.sqrt(abs(v)), v) for v in x], np.float32)


def test_the_first_values_are_those_of_the_paper() -> None:
    """mu uniform within 1 / sqrt(p), sigma 0.5 / sqrt(p), and no noise before it is drawn."""
    layer = NoisyLinear(16, 64)
    for mean in (layer.weight, layer.bias):
        assert float(mean.detach().abs().max()) <= 0.25 and float(mean.detach().std()) > 0.12
    for sigma in (layer.weight_sigma, layer.bias_sigma):
        assert torch.equal(sigma, torch.full_like(sigma, 0.125))
    assert torch.equal(NoisyLinear(4, 2, sigma=0.1).weight_sigma, torch.full((2, 4), 0.05))
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_the_output_is_the_formula() -> None:
    """y_j = sum_i (mu_ji + sigma_ji f(e_j) f(e_i)) x_i + mu_j + sigma_j f(e_j)  (eq. 9 to 11)."""
    layer = NoisyLinear(3, 2)
    layer.weight_sigma.data = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    layer.bias_sigma.data = torch.tensor([0.7, 0.8])
    layer.renew(np.random.default_rng(5))
    rng = np.random.default_rng(5)
    e_in, e_out = squeezed(rng.standard_normal(3, np.float32)), squeezed(rng.standard_normal(2, np.float32))
    x = [1.0, -2.0, 0.5]
    expected = [
        sum((float(layer.weight[j, i]) + float(layer.weight_sigma[j, i]) * e_out[j] * e_in[i]) * x[i] for i in range(3))
        + float(layer.bias[j]) + float(layer.bias_sigma[j]) * e_out[j]
        for j in range(2)
    ]  # fmt: skip
    assert layer(torch.tensor([x]))[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_noise_is_drawn_by_renew_alone_and_by_its_generator_alone() -> None:
    layer, twin = NoisyLinear(3, 2), NoisyLinear(3, 2)
    layer.renew(np.random.default_rng(1))
    held = layer.noise_in.clone(), layer.noise_out.clone()
    layer(torch.randn(9, 3)).sum().backward()
    layer.eval()
    layer.train()
    assert torch.equal(layer.noise_in, held[0]) and torch.equal(layer.noise_out, held[1])
    twin.renew(np.random.default_rng(1))
    assert torch.equal(twin.noise_in, held[0]) and torch.equal(twin.noise_out, held[1])
    layer.renew(np.random.default_rng(2))
    assert not torch.equal(layer.noise_in, held[0])
    assert {"noise_in", "noise_out"} <= layer.state_dict().keys()  # a resumed run acts with the same noise


def test_deviations_are_learned_where_noise_is() -> None:
    """d y / d sigma_ji = f(e_j) f(e_i) x_i, and f(e_j) for the bias."""
    layer = NoisyLinear(3, 2)
    layer.renew(np.random.default_rng(1))
    x = torch.tensor([[1.0, 2.0, 3.0]])
    layer(x).sum().backward()
    assert layer.weight_sigma.grad is not None and layer.bias_sigma.grad is not None
    torch.testing.assert_close(layer.weight_sigma.grad, torch.outer(layer.noise_out, layer.noise_in * x[0]))
    torch.testing.assert_close(layer.bias_sigma.grad, layer.noise_out)
    torch.testing.assert_close(layer.weight.grad, x.expand(2, 3))


def test_weights_have_the_variance_of_the_formula() -> None:
    """f(e) has mean 0 and E|f(e)|^2 = E|e| = sqrt(2 / pi), so a weight's deviation is sigma sqrt(2 / pi)."""
    layer, rng = NoisyLinear(4, 3), np.random.default_rng(0)
    drawn = []
    for _ in range(4_000):
        layer.renew(rng)
        drawn.append(torch.outer(layer.noise_out, layer.noise_in))
    noise = torch.stack(drawn)
    assert float(noise.mean(0).abs().max()) < 0.05
    assert float((noise.std(0) - math.sqrt(2 / math.pi)).abs().max()) < 0.05


def test_a_stack_of_layers_is_relu_after_each() -> None:
    mlp = NoisyMLP(3, (5, 4))
    for layer in noisy_layers(mlp):
        layer.renew(np.random.default_rng(3))
    x = torch.randn(7, 3)
    first, second = noisy_layers(mlp)
    torch.testing.assert_close(mlp(x), torch.relu(second(torch.relu(first(x)))))
    assert mlp.size == 4 and (first.weight.shape, second.weight.shape) == ((5, 3), (4, 5))
    assert NoisyMLP(3, ()).size == 3 and torch.equal(NoisyMLP(3, ())(x), x)


def test_layers_are_found_in_order_wherever_they_are() -> None:
    module = nn.ModuleDict({"b": NoisyMLP(2, (3,)), "a": nn.Sequential(nn.Linear(3, 3), NoisyLinear(3, 1))})
    assert [tuple(layer.weight.shape) for layer in noisy_layers(module)] == [(3, 2), (1, 3)]
    assert list(noisy_layers(nn.Linear(2, 2))) == []


def test_mean_weights_are_those_without_noise_and_only_inside() -> None:
    torch.manual_seed(0)
    stack, x = NoisyMLP(3, (4, 5)), torch.randn(6, 3)
    still = stack(x)  # nothing was drawn yet
    for i, layer in enumerate(noisy_layers(stack)):
        layer.renew(np.random.default_rng(i))
    loud = stack(x)
    with mean_weights(stack):
        assert torch.equal(stack(x), still) and not torch.equal(loud, still)
    assert torch.equal(stack(x), loud)
    with pytest.raises(ValueError), mean_weights(stack):
        raise ValueError
    assert torch.equal(stack(x), loud)
