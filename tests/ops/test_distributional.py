"""The C51 projection and the quantile loss against numbers by hand, slow loops and what a projection must keep."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.ops import categorical_cross_entropy, huber, project_categorical, quantile_huber


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ATOMS = tensor(-10, -5, 0, 5, 10)
PROB = tensor(0.1, 0.2, 0.4, 0.2, 0.1)


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (2, 0.5, [0, 0.08, 0.48, 0.40, 0.04]),
        (3, 0, [0, 0, 0.4, 0.6, 0]),
        (50, 0.5, [0, 0, 0, 0, 1]),
        (-50, 0.5, [1, 0, 0, 0, 0]),
        (5, 0, [0, 0, 0, 1, 0]),  # on an atom: floor and ceiling are the same, and both must not get nothing
        (10, 0, [0, 0, 0, 0, 1]),
        (-10, 0, [1, 0, 0, 0, 0]),
        (0, 1, [0.1, 0.2, 0.4, 0.2, 0.1]),
        (5, 1, [0, 0.1, 0.2, 0.4, 0.3]),
        (math.inf, 1, [0, 0, 0, 0, 1]),
    ],
)
def test_the_golden_projection(reward: float, discount: float, expected: list[float]):
    """G5, and what else can be read off the atoms."""
    for dtype in (torch.float32, torch.float64):
        inputs = (PROB.unsqueeze(0), tensor(reward), tensor(discount), ATOMS)
        got = project_categorical(*(x.to(dtype) for x in inputs))
        assert got.dtype == dtype
        assert got[0].tolist() == pytest.approx(expected, abs=1e-6 if dtype == torch.float32 else 1e-15)


Case = tuple[Tensor, Tensor, Tensor, Tensor]
"""prob [N, K], reward [N], discount [N], atoms [K]."""


def random_cases(count: int = 200, dtype: torch.dtype = torch.float64) -> Iterator[Case]:
    """Supports of any place and width, flat and spiky distributions, rewards inside, outside and on atoms."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        N, K = int(rng.integers(1, 6)), int(rng.choice([2, 3, 5, 21, 51]))
        low = rng.normal() * 10.0 ** rng.integers(-2, 3)
        atoms = np.linspace(low, low + 10.0 ** rng.uniform(-2, 3), K)
        prob = rng.dirichlet(np.full(K, 10.0 ** rng.uniform(-1.5, 1)), N)
        discount = rng.choice([0.0, 0.5, 0.99, 1.0], N)
        reward = rng.normal(size=N) * (atoms[-1] - atoms[0])
        reward = np.where(rng.random(N) < 0.3, rng.choice(atoms, N), reward)
        yield tuple(torch.from_numpy(x).to(dtype) for x in (prob, reward, discount, atoms))  # pyright: ignore


def project_by_loop(case: Case) -> Tensor:
    """The algorithm in the values of atoms, an atom at a time."""
    prob, reward, discount, atoms = (x.double().numpy() for x in case)
    N, K = prob.shape
    out = np.zeros((N, K))
    for n in range(N):
        for j in range(K):
            moved = min(max(reward[n] + discount[n] * atoms[j], atoms[0]), atoms[-1])
            i = min(int(np.searchsorted(atoms, moved, side="right")) - 1, K - 2)
            share = (moved - atoms[i]) / (atoms[i + 1] - atoms[i])
            out[n, i] += prob[n, j] * (1 - share)
            out[n, i + 1] += prob[n, j] * share
    return torch.from_numpy(out)


def test_the_projection_is_the_loop():
    for case in random_cases():
        torch.testing.assert_close(project_categorical(*case), project_by_loop(case), rtol=0, atol=1e-10)
    for case in random_cases(50, torch.float32):
        torch.testing.assert_close(project_categorical(*case).double(), project_by_loop(case), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_projection_is_a_distribution(dtype: torch.dtype):
    """Its mass is that of its input, to 1e-6; nothing is negative."""
    for prob, reward, discount, atoms in random_cases(dtype=dtype):
        got = project_categorical(prob, reward, discount, atoms)
        assert (got >= 0).all()
        torch.testing.assert_close(got.double().sum(1), prob.double().sum(1), rtol=0, atol=1e-6)


def test_the_mean_is_kept_where_nothing_falls_outside():
    generator = torch.Generator().manual_seed(0)
    for prob, _, discount, atoms in random_cases():
        room = (1 - discount) * (atoms[-1] - atoms[0])  # what is left for the reward once Z has shrunk
        reward = (1 - discount) * atoms[0] + room * torch.rand(len(prob), generator=generator, dtype=torch.float64)
        mean = project_categorical(prob, reward, discount, atoms) @ atoms
        size = float(atoms.abs().max())
        torch.testing.assert_close(mean, reward + discount * (prob @ atoms), rtol=0, atol=1e-12 * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_distribution_that_does_not_move_keeps_its_bits(dtype: torch.dtype):
    for prob, reward, discount, atoms in random_cases(dtype=dtype):
        still = torch.zeros_like(reward), torch.ones_like(discount)
        assert torch.equal(project_categorical(prob, *still, atoms), prob)


def test_a_batch_is_its_rows():
    for prob, reward, discount, atoms in random_cases(100, torch.float32):
        whole = project_categorical(prob, reward, discount, atoms)
        for n in range(len(prob)):
            assert torch.equal(
                project_categorical(prob[n, None], reward[n, None], discount[n, None], atoms)[0], whole[n]
            )


def test_nan_stays_in_its_row():
    prob = PROB.expand(3, -1)
    got = project_categorical(prob, tensor(2, math.nan, 2), tensor(0.5, 0.5, math.nan), ATOMS)
    assert got[0].tolist() == pytest.approx([0, 0.08, 0.48, 0.40, 0.04])
    assert got[1].isnan().any()
    assert got[2].isnan().any()


def test_cross_entropy():
    target, logp = tensor(0.5, 0.5, 0, 0, 1, 0).reshape(2, 3), tensor(0.25, 0.5, 0.25, 0.5, 0.5, 0).reshape(2, 3).log()
    assert categorical_cross_entropy(target, logp).tolist() == pytest.approx([1.5 * math.log(2), math.log(2)])
    logits = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    categorical_cross_entropy(target, logits.log_softmax(1)).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.full_like(target, 1 / 3) - target)  # softmax minus target
    assert categorical_cross_entropy(target * math.nan, logp).isnan().all()
    with pytest.raises(ConfigError, match=r"target_prob \(1, 3\), logp \(2, 3\)"):
        categorical_cross_entropy(target[:1], logp)


def quantile_by_loop(quantiles: Tensor, target: Tensor, taus: Tensor, kappa: float) -> Tensor:
    (N, K), M = quantiles.shape, target.shape[1]
    out = torch.zeros(N, dtype=torch.float64)
    for n in range(N):
        for i in range(K):
            for j in range(M):
                u = float(target[n, j] - quantiles[n, i])
                size = abs(u)
                loss = size if kappa == 0 else 0.5 * u * u if size <= kappa else kappa * (size - 0.5 * kappa)
                out[n] += abs(float(taus[n, i]) - (u < 0)) * loss / M
    return out


def test_the_golden_quantile_loss():
    """G14: two quantiles at 0, targets -1 and 1: each pays |tau - 1| / 4 for the one and tau / 4 for the other."""
    quantiles = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    loss = quantile_huber(quantiles, tensor(-1, 1).unsqueeze(0))
    assert loss.tolist() == [0.5]
    loss.sum().backward()
    assert quantiles.grad is not None
    assert quantiles.grad.tolist() == [[0.25, -0.25]]  # descent moves tau=.25 down and tau=.75 up


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0, 2.0])
def test_the_quantile_loss_is_the_loop(kappa: float):
    rng = np.random.default_rng(0)
    for _ in range(30):
        N, K, M = (int(x) for x in rng.integers(1, 6, 3))
        quantiles, target = (torch.from_numpy(rng.normal(size=(N, size)) * 2) for size in (K, M))
        midpoints = torch.tensor([(2 * i + 1) / (2 * K) for i in range(K)], dtype=torch.float64).expand(N, K)
        taus = torch.from_numpy(rng.random((N, K)))
        for given, used in ((None, midpoints), (midpoints[0], midpoints), (taus, taus)):
            got = quantile_huber(quantiles, target, given, kappa=kappa)
            torch.testing.assert_close(got, quantile_by_loop(quantiles, target, used, kappa), rtol=1e-12, atol=1e-12)


def test_descent_finds_the_quantiles():
    """Of 1 to 8 the quantiles at 1/8, 3/8, 5/8, 7/8 lie in [1, 2], [3, 4], [5, 6] and [7, 8]."""
    target = torch.arange(1.0, 9.0).unsqueeze(0)
    quantiles = torch.zeros(1, 4, requires_grad=True)
    for _ in range(400):
        (slope,) = torch.autograd.grad(quantile_huber(quantiles, target, kappa=0.01).sum() / 0.01, quantiles)
        quantiles = (quantiles - 0.05 * slope).detach().requires_grad_()
    low = torch.tensor([1.0, 3, 5, 7])
    assert (quantiles[0] > low - 0.1).all()
    assert (quantiles[0] < low + 1.1).all()


def test_one_quantile_is_half_the_huber_loss():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64).unsqueeze(1)
    torch.testing.assert_close(quantile_huber(torch.zeros_like(x), x), 0.5 * huber(x).squeeze(1))


def test_shapes_are_checked():
    prob, one = PROB.unsqueeze(0), tensor(1)
    with pytest.raises(ConfigError, match=r"prob \(1, 5\), atoms \(4,\); expected"):
        project_categorical(prob, one, one, ATOMS[:4])
    with pytest.raises(ConfigError, match="K >= 2"):
        project_categorical(prob[:, :1], one, one, ATOMS[:1])
    with pytest.raises(ConfigError, match=r"reward \(1, 1\), discount \(1,\), prob \(1, 5\)"):
        project_categorical(prob, one.unsqueeze(1), one, ATOMS)
    with pytest.raises(ConfigError, match=r"discount \(2,\)"):
        project_categorical(prob, one, tensor(1, 1), ATOMS)
    with pytest.raises(ConfigError, match=r"quantiles \(1, 5\), target \(2, 5\)"):
        quantile_huber(prob, prob.expand(2, -1))
    with pytest.raises(ConfigError, match=r"taus \(3,\)"):
        quantile_huber(prob, prob, tensor(0.1, 0.5, 0.9))
    with pytest.raises(ConfigError, match="kappa=-1"):
        quantile_huber(prob, prob, kappa=-1)
