"""Draws of a generator of one's own are those of the process-wide one after the same seed, which stays where it was."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.learn.generator import OwnGenerator


def draws() -> list[Tensor]:
    layers = [nn.Linear(3, 4), nn.Conv2d(2, 3, 3), nn.LSTM(3, 4), nn.Embedding(5, 3), nn.MultiheadAttention(8, 2)]
    nn.init.orthogonal_(layers[0].weight)
    nn.init.trunc_normal_(layers[1].weight)
    nn.init.sparse_(layers[3].weight, 0.3)
    half, ones = torch.full((5,), 0.5), torch.ones(4)
    numbers = [torch.rand(3), torch.randn(2, 2), torch.randint(9, (4,)), torch.randint(2, 9, (4,)), torch.randperm(7)]
    numbers += [torch.rand_like(half), torch.randn_like(half), torch.normal(half, 1.0), torch.normal(0.0, 1.0, (3,))]
    numbers += [torch.bernoulli(half), torch.multinomial(ones, 2), torch.poisson(ones), F.dropout(ones)]
    numbers += [torch.empty(3).exponential_(), torch.empty(3).random_(), torch.distributions.Gamma(ones, ones).sample()]
    return [p for layer in layers for p in layer.parameters()] + numbers


def test_draws_are_those_of_the_process_wide_generator_which_stays_where_it_was() -> None:
    torch.manual_seed(2**62 + 5)
    expected = draws()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    for _ in range(2):
        with OwnGenerator(2**62 + 5):
            assert all(torch.equal(a, b) for a, b in zip(draws(), expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_is_given_is_used() -> None:
    with OwnGenerator(1):
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(7))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


@pytest.mark.slow
def test_building_does_not_load_torchs_compiler() -> None:
    """Which takes a second."""
    build = (
        "import sys, penstock as ps; from penstock.core.spec import LeafSpec as L; "
        "ps.PPO().build(ps.EnvSpec(L('box', (3,), 'float32'), L('discrete', (), 'int64', sizes=(2,)))); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", build], check=True, timeout=100)
