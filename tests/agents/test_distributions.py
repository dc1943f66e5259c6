import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions as td

from penstock.agents.distributions import (
    Bernoulli,
    Categorical,
    Gaussian,
    Joint,
    MultiCategorical,
    SquashedGaussian,
    acted,
    standard_normal,
    tanh_normal_log_prob,
)
from penstock.core.tree import tree_structure

TINY, NEARLY_ONE = 2.0**-24, 1.0 - 2.0**-24  # the ends of what noise can be


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, size: int = 1, seed: int = 0) -> Tensor:
    return (torch.randint(0, 2**23, (n, size), generator=rng(seed)).float() + 0.5) * 2.0**-23


def grid(n: int) -> Tensor:
    """[n, 1] evenly spaced uniforms, whose sample means are integrals."""
    return ((torch.arange(n, dtype=torch.float64) + 0.5) / n).float().unsqueeze(-1)


def chi_square(counts: Tensor, p: Tensor) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# --- choices


def test_categorical_log_prob_and_entropy_are_torchs():
    logits = torch.randn(20, 5, generator=rng()) * 3
    action = torch.randint(5, (20,), generator=rng())
    for start in (0, 3, -2):
        ours, theirs = Categorical(logits, start), td.Categorical(logits=logits)
        torch.testing.assert_close(ours.log_prob(action + start), theirs.log_prob(action))
        torch.testing.assert_close(ours.entropy(), theirs.entropy())
        assert torch.equal(ours.mode(), logits.argmax(-1) + start)
        assert ours.log_prob((action + start).to(torch.int32)).shape == (20,)


def test_categorical_sequences_keep_their_leading_dimensions():
    logits = torch.randn(3, 4, 5, generator=rng())
    dist = Categorical(logits, 1)
    assert dist.sample(torch.rand(3, 4, 1, generator=rng())).shape == (3, 4)
    assert dist.log_prob(dist.mode()).shape == dist.entropy().shape == (3, 4)


def test_categorical_frequencies():
    p = torch.tensor([0.05, 0.2, 0.0, 0.45, 0.3])
    dist = Categorical(p.log().clamp(min=-1e4).expand(100_000, 5), start=2)
    sample = dist.sample(noise(100_000))
    assert sample.dtype == torch.int64
    counts = torch.bincount(sample - 2, minlength=5).double()
    assert counts[2] == 0
    seen = p > 0
    assert chi_square(counts[seen], p[seen].double()) < 21.1  # 3 degrees of freedom, p = 0.0001


def test_categorical_sample_is_the_inverse_cdf():
    dist = Categorical(torch.tensor([[0.25, 0.5, 0.25]]).log().expand(6, 3))
    u = torch.tensor([TINY, 0.24, 0.26, 0.74, 0.76, NEARLY_ONE]).unsqueeze(-1)
    assert dist.sample(u).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("masked", [False, True])
def test_an_action_and_its_log_probability_are_those_of_sample_and_log_prob(masked: bool):
    mask = torch.rand(400, 5, generator=rng(1)) < 0.7
    mask[:, 2] = True
    dist = Categorical(torch.randn(400, 5, generator=rng()), 3, mask if masked else None)
    action, logp = acted(dist, noise(400))
    assert torch.equal(action, dist.sample(noise(400))) and torch.equal(logp, dist.log_prob(action))
    likeliest, logp = acted(dist, None)
    assert torch.equal(likeliest, dist.mode()) and torch.equal(logp, dist.log_prob(likeliest))


@pytest.mark.parametrize("scale", [30.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 1.0, 1000.0))])
def test_a_masked_choice_is_never_sampled(scale: float):
    """Not even at the ends of the noise, with choices masked anywhere, and whatever the rounding of the sums."""
    for n in (2, 3, 7, 64, 1000):
        rows = 400
        logits = torch.randn(rows, n, generator=rng(n)) * scale
        mask = torch.rand(rows, n, generator=rng(n + 1)) < 0.4
        mask[torch.arange(rows), torch.randint(n, (rows,), generator=rng(n + 2))] = True
        mask[:50] = False
        mask[:50, 0] = True  # the first alone
        mask[50:100] = False
        mask[50:100, -1] = True  # the last alone
        for number_like in (torch.bool, torch.int8, torch.float32):
            dist = Categorical(logits, mask=mask.to(number_like))
            for u in (TINY, 0.5, NEARLY_ONE, *noise(10, seed=3).flatten().tolist()):
                chosen = dist.sample(torch.full((rows, 1), u))
                assert mask[torch.arange(rows), chosen].all()
            assert mask[torch.arange(rows), dist.mode()].all()
        assert torch.isfinite(dist.entropy()).all()
        assert torch.isfinite(dist.log_prob(dist.mode())).all()


@pytest.mark.parametrize("size", [1e10, 1e20])
def test_a_masked_choice_is_never_taken_however_low_the_legal_ones_are(size: float):
    logits, mask = torch.tensor([[-3.0, 0.0, -2.0]]) * size, torch.tensor([[True, False, True]])
    dist = Categorical(logits, mask=mask)
    assert dist.mode().tolist() == dist.sample(torch.tensor([[0.5]])).tolist() == [2]
    assert dist.logp.exp().tolist() == [[0.0, 0.0, 1.0]]
    assert dist.entropy().tolist() == [0.0]


def test_a_mask_is_the_distribution_over_what_is_left():
    logits = torch.randn(6, 4, generator=rng())
    mask = torch.tensor([1, 0, 1, 1])
    masked = Categorical(logits, mask=mask.expand(6, 4))
    left = td.Categorical(logits=logits[:, [0, 2, 3]])
    for ours, theirs in ((0, 0), (2, 1), (3, 2)):
        torch.testing.assert_close(masked.log_prob(torch.full((6,), ours)), left.log_prob(torch.tensor(theirs)))
    torch.testing.assert_close(masked.entropy(), left.entropy())
    assert (masked.log_prob(torch.ones(6)).exp() == 0).all()
    counts = torch.bincount(
        Categorical(logits[:1].expand(50_000, 4), mask=mask.expand(50_000, 4)).sample(noise(50_000))
    )
    assert chi_square(counts[[0, 2, 3]].double(), left.probs[0].double()) < 18.4  # 2 degrees of freedom, p = 0.0001


def test_without_any_legal_choice_all_are_alike():
    dist = Categorical(torch.randn(3, 4, generator=rng()), mask=torch.zeros(3, 4))
    torch.testing.assert_close(dist.logp, torch.full((3, 4), -math.log(4)))


def test_multi_categorical_is_one_categorical_for_each_element():
    sizes, start, shape = (2, 3, 4, 2), (0, 5, -1, 1), (2, 2)
    logits = torch.randn(8, 11, generator=rng())
    dist = MultiCategorical(logits, sizes, start, shape)
    u = noise(8, 4)
    parts = [Categorical(chunk, s) for chunk, s in zip(logits.split(sizes, -1), start)]
    sample = dist.sample(u)
    assert sample.shape == (8, 2, 2)
    for i, part in enumerate(parts):
        assert torch.equal(sample.flatten(1)[:, i], part.sample(u[:, i : i + 1]))
        assert torch.equal(dist.mode().flatten(1)[:, i], part.mode())
    total = torch.stack([p.log_prob(sample.flatten(1)[:, i]) for i, p in enumerate(parts)]).sum(0)
    torch.testing.assert_close(dist.log_prob(sample), total)
    torch.testing.assert_close(dist.entropy(), torch.stack([p.entropy() for p in parts]).sum(0))


def test_sampling_from_a_slice_of_noise_gives_no_warning():
    torch.set_warn_always(True)  # else torch says it once a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            MultiCategorical(torch.zeros(4, 5), (2, 3), (0, 0), (2,)).sample(noise(4, 2))
    finally:
        torch.set_warn_always(False)


def test_multi_categorical_masks_lie_side_by_side():
    mask = torch.tensor([[1, 0, 0, 0, 1]])
    dist = MultiCategorical(torch.zeros(1, 5), (2, 3), (0, 0), (2,), mask)
    for u in (TINY, 0.5, NEARLY_ONE):
        assert dist.sample(torch.full((1, 2), u)).tolist() == [[0, 2]]
    assert dist.entropy().item() == pytest.approx(0, abs=1e-6)


# --- bits


def test_bernoulli_is_torchs():
    logits = torch.randn(50, 6, generator=rng()) * 4
    dist, theirs = Bernoulli(logits, (2, 3)), td.Bernoulli(logits=logits)
    action = (torch.rand(50, 2, 3, generator=rng(1)) < 0.5).to(torch.int8)
    torch.testing.assert_close(dist.log_prob(action), theirs.log_prob(action.flatten(1).float()).sum(-1))
    torch.testing.assert_close(dist.entropy(), theirs.entropy().sum(-1))
    assert dist.mode().dtype == torch.int8
    assert torch.equal(dist.mode().flatten(1) == 1, logits > 0)


def test_bernoulli_frequencies_and_extremes():
    p = torch.tensor([0.1, 0.5, 0.9])
    sample = Bernoulli(p.logit().expand(50_000, 3), (3,)).sample(noise(50_000, 3))
    assert sample.dtype == torch.int8
    assert sample.shape == (50_000, 3)
    assert ((sample.float().mean(0) - p).abs() < 4 * (p * (1 - p) / 50_000).sqrt()).all()
    sure = Bernoulli(torch.tensor([[200.0, -200.0]]), (2,))
    for u in (TINY, NEARLY_ONE):
        assert sure.sample(torch.full((1, 2), u)).tolist() == [[1, 0]]
    assert sure.log_prob(torch.tensor([[1, 0]])).item() == 0
    assert sure.log_prob(torch.tensor([[0, 1]])).item() == -400
    assert sure.entropy().item() == pytest.approx(0, abs=1e-30)


def test_bernoulli_gradients_are_those_of_the_logistic_function_at_zero_too():
    """A fresh policy sits at logit 0 exactly where an observation is 0."""
    logits = torch.tensor([[0.0, 0.0, 2.0, -50.0]], requires_grad=True)
    action = torch.tensor([[1, 0, 1, 1]])
    (gradient,) = torch.autograd.grad(Bernoulli(logits, (4,)).log_prob(action).sum(), logits)
    torch.testing.assert_close(gradient, action - torch.sigmoid(logits.detach()))
    (gradient,) = torch.autograd.grad(Bernoulli(logits, (4,)).entropy().sum(), logits)
    x = logits.detach()
    torch.testing.assert_close(gradient, -x * torch.sigmoid(x) * torch.sigmoid(-x))


def test_a_bit_that_is_sure_has_no_gradient_of_entropy_and_not_nan():
    logits = torch.tensor([[-1e9, -100.0, 100.0, 1e9]], requires_grad=True)
    (gradient,) = torch.autograd.grad(Bernoulli(logits, (4,)).entropy().sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros(1, 4))


# --- boxes

CENTER, HALF = torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.5])  # the box [-3, 5] x [-0.5, 0.5]


def boxes(cls: Any, rows: int = 7, shape: tuple[int, ...] = (2,), scale: float = 1.0) -> Any:
    mean = torch.randn(rows, 2, generator=rng()) * scale
    return cls(mean, torch.tensor([-0.5, 0.3]), CENTER, HALF, shape)


def test_gaussian_log_prob_and_entropy_are_torchs_in_the_units_of_the_environment():
    dist = boxes(Gaussian)
    theirs = td.Normal(CENTER + HALF * dist.mean, HALF * dist.log_std.exp())
    action = torch.randn(7, 2, generator=rng(1)) * 3
    torch.testing.assert_close(dist.log_prob(action), theirs.log_prob(action).sum(-1))
    torch.testing.assert_close(dist.entropy(), theirs.entropy().sum(-1))
    torch.testing.assert_close(dist.mode(), theirs.mean)
    u = noise(7, 2)
    torch.testing.assert_close(dist.sample(u), theirs.icdf(u))


def test_squashed_log_prob_is_torchs():
    dist = boxes(SquashedGaussian)
    transforms = [td.TanhTransform(), td.AffineTransform(CENTER.double(), HALF.double())]
    theirs = td.TransformedDistribution(td.Normal(dist.mean.double(), dist.log_std.exp().double()), transforms)
    u = torch.linspace(-5, 5, 7, dtype=torch.float64).unsqueeze(-1).expand(7, 2)
    wide = SquashedGaussian(dist.mean.double(), dist.log_std.double(), CENTER.double(), HALF.double(), (2,))
    action = CENTER + HALF * torch.tanh(u)
    torch.testing.assert_close(wide.log_prob(action), theirs.log_prob(action).sum(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dist.entropy(), td.Normal(dist.mean, dist.log_std.exp()).entropy().sum(-1))


@pytest.mark.parametrize(
    ("u", "expected"),
    [
        (0, -0.918939),
        (0.5, -0.803710),
        (1, -0.551377),
        (3, -0.800282),
        (10, -32.305233),
        (-10, -32.305233),
        (100, -4802.305233),
        (-100, -4802.305233),
    ],
)
def test_tanh_gaussian_golden_values(u: float, expected: float):
    """At 10 the usual log(1 - a^2 + 1e-6) gives -37.1, at 100 -4987."""
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-6 * max(1.0, abs(expected)))):
        x = torch.tensor([float(u)], dtype=dtype, requires_grad=True)
        mean, log_std = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
        out = tanh_normal_log_prob(x, mean, log_std)
        assert out.item() == pytest.approx(expected, abs=tolerance)
        gradients = torch.autograd.grad(out.sum(), (x, mean, log_std))
        assert gradients[0].item() == pytest.approx(-u + 2 * math.tanh(u), abs=1e-5)
        assert gradients[1].item() == pytest.approx(u, abs=1e-5)
        assert gradients[2].item() == pytest.approx(u * u - 1, rel=1e-6)


def test_densities_integrate_to_one():
    for mean, log_std in ((0.0, 0.0), (0.7, -1.0), (-1.0, 0.3)):
        x = 1 + 4 * torch.tanh(torch.linspace(-7.2, 7.2, 20_001, dtype=torch.float64))
        parameters = [torch.tensor([v], dtype=torch.float64) for v in (mean, log_std, 1.0, 4.0)]
        squashed = SquashedGaussian(parameters[0].expand(len(x), 1), *parameters[1:], (1,))
        assert torch.trapezoid(squashed.log_prob(x.unsqueeze(-1)).exp(), x).item() == pytest.approx(1, abs=1e-4)
        x = torch.linspace(-60, 60, 200_001, dtype=torch.float64)
        normal = Gaussian(parameters[0].expand(len(x), 1), *parameters[1:], (1,))
        assert torch.trapezoid(normal.log_prob(x.unsqueeze(-1)).exp(), x).item() == pytest.approx(1, abs=1e-6)


def test_actions_are_rescaled_to_the_box_and_back():
    y = torch.tensor([-1, 0, 0.75, 1])
    mean = torch.atanh(y.clamp(-1 + 1e-7, 1 - 1e-7)).unsqueeze(-1)
    one = [torch.tensor([v]) for v in (0.0, 1.0, 4.0)]
    mode = SquashedGaussian(mean, *one, (1,)).mode()
    torch.testing.assert_close(mode.flatten(), torch.tensor([-3.0, 1, 4, 5]), rtol=0, atol=1e-5)
    assert ((mode > -3) & (mode < 5)).all()
    linear = Gaussian(y.unsqueeze(-1), *one, (1,))
    assert linear.mode().flatten().tolist() == [-3, 1, 4, 5]
    peak = linear.log_prob(linear.mode())
    torch.testing.assert_close(peak, torch.full((4,), -math.log(4) - 0.5 * math.log(2 * math.pi)))


def test_squashed_samples_stay_inside_and_their_log_prob_is_finite():
    for scale in (1.0, 20.0):
        dist = boxes(SquashedGaussian, 1000, scale=scale)
        for u in (noise(1000, 2), torch.full((1000, 2), TINY), torch.full((1000, 2), NEARLY_ONE)):
            action = dist.sample(u)
            assert (((action - CENTER) / HALF).abs() < 1).all()
            assert torch.isfinite(dist.log_prob(action)).all()
            assert torch.isfinite(dist.log_prob(dist.mode())).all()
    edge = torch.stack([CENTER - HALF, CENTER + HALF]).repeat(500, 1)
    assert torch.isfinite(boxes(SquashedGaussian, 1000).log_prob(edge)).all()


@pytest.mark.parametrize("cls", [Gaussian, SquashedGaussian])
def test_box_gradients_are_finite_at_extremes(cls: Any):
    mean = torch.tensor([[100.0, -100.0], [0.0, 0.0], [1e4, 1.0]], requires_grad=True)
    log_std = torch.tensor([-5.0, 5.0], requires_grad=True)
    dist = cls(mean, log_std, CENTER, HALF, (2,))
    for u in (TINY, 0.5, NEARLY_ONE):
        action = dist.sample(torch.full((3, 2), u)).detach()
        gradients = torch.autograd.grad(dist.log_prob(action).sum() + dist.entropy().sum(), (mean, log_std))
        assert all(torch.isfinite(g).all() for g in gradients)


def test_choice_gradients_are_finite_at_extremes():
    logits = torch.tensor([[1e6, -1e6, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    for mask in (None, torch.tensor([[1, 0, 1], [0, 1, 0]])):
        dist = Categorical(logits, mask=mask)
        (gradient,) = torch.autograd.grad(dist.log_prob(dist.mode()).sum() + dist.entropy().sum(), logits)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("cls", [Gaussian, SquashedGaussian])
def test_box_entropy_and_frequencies(cls: Any):
    """Monte Carlo: the mean of -log p over samples is the entropy; under the squash it is that of the normals."""
    n = 20_000
    mean, log_std = torch.full((n, 1), 0.3), torch.tensor([-0.7])
    dist = cls(mean, log_std, torch.tensor([1.0]), torch.tensor([4.0]), (1,))
    action = dist.sample(grid(n))
    if cls is Gaussian:
        estimate = -dist.log_prob(action).mean().item()
        x = action.flatten().double()
    else:
        u = torch.atanh((action.double() - 1) / 4).flatten()
        estimate = -td.Normal(0.3, math.exp(-0.7)).log_prob(u).mean().item()
        x = 1 + 4 * u
    assert dist.entropy()[0].item() == pytest.approx(estimate, abs=0.005)
    deciles = 1 + 4 * td.Normal(0.3, math.exp(-0.7)).icdf(torch.linspace(0.1, 0.9, 9))
    counts = np.histogram(x.numpy(), [-np.inf, *deciles.tolist(), np.inf])[0]
    assert np.abs(counts - n / 10).max() < 5


@pytest.mark.parametrize("cls", [Gaussian, SquashedGaussian])
@pytest.mark.parametrize("shape", [(), (2,), (1, 2)])
def test_boxes_of_any_shape(cls: Any, shape: tuple[int, ...]):
    size = math.prod(shape)
    mean = torch.zeros(5, size)
    dist = cls(mean, torch.zeros(size), torch.zeros(size), torch.ones(size), shape)
    assert dist.sample(noise(5, size)).shape == (5, *shape)
    assert dist.mode().shape == (5, *shape)
    assert dist.log_prob(dist.mode()).shape == dist.entropy().shape == (5,)


def test_standard_normals_from_uniforms():
    u = grid(100_001).flatten()
    z = standard_normal(u).double()
    assert z[50_000] == 0
    assert z.mean().item() == pytest.approx(0, abs=1e-5)
    assert z.var().item() == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(z, td.Normal(0.0, 1.0).icdf(u.double()), rtol=1e-4, atol=1e-5)
    ends = standard_normal(torch.tensor([TINY, NEARLY_ONE]))
    assert ends[0] == -ends[1]
    assert 5 < ends[1] < 5.5


# --- several leaves


def test_joint_is_the_product_of_its_parts():
    structure = tree_structure({"box": 0, "bits": 0, "choice": 0})
    parts = [Bernoulli(torch.randn(6, 3, generator=rng()), (3,)), boxes(Gaussian, 6),
             Categorical(torch.randn(6, 4, generator=rng()), 2)]  # fmt: skip
    dist = Joint(parts, [3, 2, 1], structure)
    u = noise(6, 6)
    sample, mode = dist.sample(u), dist.mode()
    assert sorted(sample) == ["bits", "box", "choice"]
    assert torch.equal(sample["bits"], parts[0].sample(u[:, :3]))
    assert torch.equal(sample["box"], parts[1].sample(u[:, 3:5]))
    assert torch.equal(sample["choice"], parts[2].sample(u[:, 5:]))
    for action in (sample, mode):
        total = sum(p.log_prob(action[k]) for p, k in zip(parts, sorted(sample)))
        torch.testing.assert_close(dist.log_prob(action), total)
    torch.testing.assert_close(dist.entropy(), sum(p.entropy() for p in parts))
    assert torch.equal(mode["choice"], parts[2].mode())


# --- the same bits however many rows lie beside


def test_a_rows_bits_do_not_depend_on_its_neighbours():
    rows = 96
    parameters = torch.randn(rows, 7, generator=rng()) * 2
    small = torch.randn(7, generator=rng(1)) * 0.3
    u = noise(rows, 7)

    def results(a: int, b: int) -> list[Tensor]:
        p, n = parameters[a:b].clone(), u[a:b].clone()
        out: list[Tensor] = []
        mask = torch.ones(b - a, 7)
        mask[:, 2] = 0
        for dist in (
            Categorical(p, mask=mask),
            MultiCategorical(p, (3, 4), (0, 0), (2,)),
            Bernoulli(p, (7,)),
            Gaussian(p, small, small, small.exp(), (7,)),
            SquashedGaussian(p, small, small, small.exp(), (7,)),
        ):
            size = {Categorical: 1, MultiCategorical: 2}.get(type(dist), 7)
            action = dist.sample(n[:, :size])
            out += [action, dist.log_prob(action), dist.mode(), dist.entropy()]
        return out

    whole = results(0, rows)
    for size in (4, 8, 12, 16, 32):
        for start in range(0, rows - size + 1, size):
            for one, of_whole in zip(results(start, start + size), whole):
                assert torch.equal(one, of_whole[start : start + size])
