"""The squashed Gaussian's density and gradient against torch's in float64, golden numbers, and extreme actions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from penstock.agents.distributions import LOG_STD_RANGE, squashed_sample

GOLDEN = [(0.0, -0.918939), (0.5, -0.803710), (1.0, -0.551377), (3.0, -0.800282), (10.0, -32.305233), (-10.0, -32.305233),
          (100.0, -4802.305233)]  # fmt: skip
"""Pre-tanh value and log-density at mean 0 and deviation 1."""


def random(n: int, size: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(n)
    out = scale * torch.randn(n, 2 * size, generator=rng, dtype=dtype)
    return out.requires_grad_(), torch.randn(n, size, generator=rng, dtype=dtype)


def plain(out: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch's own operations and autograd, in the form that stays exact."""
    mean, log_std = out.chunk(2, -1)
    log_std = log_std.clamp(*LOG_STD_RANGE)
    u = mean + log_std.exp() * z
    log_det = 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
    logp = -0.5 * z * z - log_std - 0.5 * math.log(2.0 * math.pi) - log_det
    return torch.tanh(u), logp.sum(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("u", "expected"), GOLDEN)
def test_the_golden_densities(u: float, expected: float, dtype: torch.dtype) -> None:
    for mean, z in ((u, 0.0), (0.0, u)):
        action, logp = squashed_sample(torch.tensor([[mean, 0.0]], dtype=dtype), torch.tensor([[z]], dtype=dtype))
        shift = 0.0 if mean == 0.0 else -0.5 * u * u  # with the mean at u its own term is that of z = 0
        assert float(logp) + shift == pytest.approx(expected, rel=1e-6, abs=2e-6)
        assert float(action) == pytest.approx(math.tanh(u), abs=1e-7)


@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize("size", [1, 3])
def test_it_is_torchs_transformed_normal(size: int, scale: float) -> None:
    """Which keeps the number before tanh, so that it is exact far out too."""
    out, z = random(200, size)
    out = out.detach() * scale
    out[:, size:].clamp_(-3.0, 2.0)
    action, logp = squashed_sample(out, z)
    mean, log_std = out.chunk(2, -1)
    tanh = TanhTransform(cache_size=1)
    normal = TransformedDistribution(Normal(mean, log_std.exp()), tanh)
    own: Any = tanh(mean + log_std.exp() * z)
    torch.testing.assert_close(action, own, rtol=0, atol=1e-15)
    torch.testing.assert_close(logp, Independent(normal, 1).log_prob(own), rtol=1e-9, atol=1e-9)
    assert logp.shape == (200,) and action.shape == (200, size)
    assert scale == 1.0 or bool((action.abs() == 1.0).any())


def test_the_density_integrates_to_one() -> None:
    """Over a in (-1, 1), for a wide, a narrow and a shifted one."""
    for mean, log_std in ((0.0, 0.7), (0.3, -1.0), (-1.0, 0.0)):
        u = torch.linspace(-12.0, 12.0, 200_001, dtype=torch.float64)
        z = ((u - mean) / math.exp(log_std)).unsqueeze(1)
        out = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(len(u), 2)
        action, logp = squashed_sample(out, z)
        assert float(torch.trapezoid(logp.exp(), action[:, 0])) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("scale", [1.0, 4.0, 30.0])
def test_the_gradient_is_autograds(scale: float) -> None:
    """Of both outputs at once, also where log deviations are clamped and tanh is flat."""
    out, z = random(100, 2, scale)
    twin = out.detach().clone().requires_grad_()
    weight_a, weight_p = torch.randn(100, 2, dtype=torch.float64), torch.randn(100, dtype=torch.float64)
    for x, fn in ((out, squashed_sample), (twin, plain)):
        action, logp = fn(x, z)
        ((action * weight_a).sum() + (logp * weight_p).sum()).backward()
    torch.testing.assert_close(out.grad, twin.grad, rtol=1e-7, atol=1e-7)
    clamped = (out[:, 2:] < LOG_STD_RANGE[0]) | (out[:, 2:] > LOG_STD_RANGE[1])
    assert out.grad is not None and not out.grad[:, 2:][clamped].any()
    assert clamped.any() or scale == 1.0


def test_each_output_alone_has_a_gradient() -> None:
    for which in (0, 1):
        out, z = random(20, 2)
        twin = out.detach().clone().requires_grad_()
        squashed_sample(out, z)[which].sum().backward()
        plain(twin, z)[which].sum().backward()
        torch.testing.assert_close(out.grad, twin.grad)


def test_numbers_without_a_gradient_are_the_same_bits() -> None:
    out, z = random(33, 2, dtype=torch.float32)
    with torch.no_grad():
        bare = squashed_sample(out, z)
    assert all(torch.equal(a, b.detach()) for a, b in zip(bare, squashed_sample(out, z)))
    assert not bare[0].requires_grad and squashed_sample(out, z)[1].requires_grad


@pytest.mark.parametrize("u", [-100.0, -20.0, 20.0, 100.0])
def test_far_out_all_stays_finite(u: float) -> None:
    """log(1 - a^2 + 1e-6) would give -4987 at 100, and its gradient would vanish where this one is 2."""
    out = torch.tensor([[u, 0.0]], requires_grad=True)
    action, logp = squashed_sample(out, torch.zeros(1, 1))
    (action.sum() + logp.sum()).backward()
    assert out.grad is not None and bool(torch.isfinite(out.grad).all())
    assert float(out.grad[0, 0]) == pytest.approx(math.copysign(2.0, u), abs=1e-5)
    assert math.isfinite(logp.item()) and abs(action.item()) <= 1.0


def test_deviations_are_clamped() -> None:
    low, high = LOG_STD_RANGE
    for log_std, held in ((low - 5.0, low), (high + 5.0, high)):
        z = torch.tensor([[0.3]], dtype=torch.float64)
        seen, expected = (squashed_sample(torch.tensor([[0.1, s]], dtype=torch.float64), z) for s in (log_std, held))
        assert torch.equal(seen[0], expected[0]) and torch.equal(seen[1], expected[1])
