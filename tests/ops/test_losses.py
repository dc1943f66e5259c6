import math

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.ops import (
    approx_kl,
    clipped_squared_error,
    clipped_surrogate,
    explained_variance,
    masked_mean,
    normalized,
    squared_error,
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_mean_is_over_valid_rows():
    x = tensor(1, 2, 6, math.nan)
    valid = torch.tensor([True, False, True, False])
    assert masked_mean(x, valid) == 3.5
    assert masked_mean(x[:3], None) == 3
    assert masked_mean(x, torch.zeros(4, dtype=torch.bool)) == 0
    assert masked_mean(x[:0], None) == 0
    assert masked_mean(x.reshape(2, 2), valid.reshape(2, 2)) == 3.5
    with pytest.raises(ConfigError, match=r"x \(4,\), valid \(2, 2\)"):
        masked_mean(x, valid.reshape(2, 2))


def test_invalid_rows_get_no_gradient():
    x = tensor(1, 2, 6).requires_grad_()
    masked_mean(x, torch.tensor([True, False, True])).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0, 0.5]


def test_normalized_over_valid_rows():
    x = tensor(1, 1e9, 3, 5).reshape(2, 2)
    valid = torch.tensor([[True, False], [True, True]])
    out = normalized(x, valid)
    assert out[valid].tolist() == pytest.approx([-1, 0, 1], abs=1e-7)  # deviation 2 with n - 1
    assert out.shape == x.shape
    one = torch.tensor([[True, False], [False, False]])
    assert torch.equal(normalized(x, one), x)
    assert torch.equal(normalized(x, ~one & one), x)
    same = torch.ones(4, 2)
    assert torch.equal(normalized(same, same.bool()), torch.zeros(4, 2))


def test_normalized_does_not_see_invalid_rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator)
    valid = torch.rand(20, 3, generator=generator) < 0.6
    poisoned = x.masked_fill(~valid, 1e30)
    assert torch.equal(normalized(poisoned, valid)[valid], normalized(x, valid)[valid])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # clipped: no gradient
        (0.5, 2.0, -1.0, -1.0),  # would be better clipped, so it is not
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_the_clipped_surrogate(ratio: float, advantage: float, loss: float, slope: float):
    """Schulman et al. 2017, figure 1. The slope is over the log ratio: -ratio * A where it is not clipped."""
    log_ratio = tensor(math.log(ratio)).requires_grad_()
    got, got_ratio = clipped_surrogate(log_ratio, tensor(advantage), 0.2)
    got.sum().backward()
    assert got.item() == pytest.approx(loss)
    assert got_ratio.item() == pytest.approx(ratio)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope)


def test_the_surrogate_is_a_lower_bound():
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantage = torch.randn(2, 1000, generator=generator)
    loss, ratio = clipped_surrogate(log_ratio, advantage, 0.2)
    assert (-loss <= ratio * advantage).all()


def test_kl_is_zero_at_equality_and_never_negative():
    log_ratio = torch.linspace(-3, 3, 601, dtype=torch.float64)
    kl = approx_kl(log_ratio, log_ratio.exp())
    assert (kl >= -1e-15).all()  # but for rounding
    assert approx_kl(tensor(0), tensor(1)).item() == 0
    assert approx_kl(tensor(math.log(2)), tensor(2)).item() == pytest.approx(1 - math.log(2))


def test_kl_estimates_the_divergence():
    """Between two known categoricals its expectation under the old one is KL(old, new), exactly."""
    old, new = tensor(0.2, 0.3, 0.5), tensor(0.4, 0.4, 0.2)
    log_ratio = new.log() - old.log()
    expected = (old * (old.log() - new.log())).sum()
    assert (old * approx_kl(log_ratio, log_ratio.exp())).sum().item() == pytest.approx(expected.item())


def test_the_clipped_value_loss_by_hand():
    value, return_, before = tensor(1, 2, 5, -1, 3), tensor(2, 0, 5, -3, 0), tensor(0, 2, 4, 0, 1)
    # 0.5 stays away by 1.5; 2; 4.5 away by 0.5; -0.5 away by 2.5; 3, as 1.5 would be nearer
    found = clipped_squared_error(value, return_, before, 0.5, None)
    assert found.item() == pytest.approx((2.25 + 4 + 0.25 + 6.25 + 9) / 5)
    assert clipped_squared_error(value, return_, before, 9.0, None) == squared_error(value, return_, None)
    valid = torch.tensor([True, False, False, True, False])
    assert clipped_squared_error(value, return_, before, 0.5, valid).item() == pytest.approx((2.25 + 6.25) / 2)
    value.requires_grad_()
    (step,) = torch.autograd.grad(clipped_squared_error(value, return_, before, 0.5, None), value)
    assert step.tolist() == pytest.approx([0, 0.8, 0, 0, 1.2])  # none where the clipped one is larger


def test_explained_variance():
    return_ = tensor(1, 2, 3, 1e9).reshape(2, 2)
    valid = torch.tensor([[True, True], [True, False]])
    assert explained_variance(return_, return_, valid) == 1
    assert explained_variance(torch.full_like(return_, 7), return_, valid) == 0
    assert explained_variance(-return_, return_, valid).item() == pytest.approx(-3)
    assert explained_variance(return_ + 5, return_, valid) == 1  # a constant error is no variance
    assert explained_variance(return_, torch.ones_like(return_), valid).isnan()
    assert explained_variance(return_, return_, ~valid).isnan()


def test_arrays_that_would_broadcast_are_refused():
    row, column, valid = torch.ones(3), torch.ones(3, 1), torch.ones(3, dtype=torch.bool)
    calls = {
        r"squared_error got prediction \(3, 1\), target \(3,\)": lambda: squared_error(column, row, None),
        r"squared_error got prediction \(3,\), target \(3, 1\)": lambda: squared_error(row, column, valid),
        r"masked_mean got x \(3, 3\)": lambda: masked_mean(row * column, None),
        r"clipped_squared_error got .* before \(3, 1\)": lambda: clipped_squared_error(row, row, column, 0.2, None),
        r"normalized got advantage \(3, 1\), valid \(3,\)": lambda: normalized(column, valid),
        r"clipped_surrogate got log_ratio \(3,\), advantage \(3, 1\)": lambda: clipped_surrogate(row, column, 0.2),
        r"approx_kl got log_ratio \(3,\), ratio \(3, 1\)": lambda: approx_kl(row, column),
        r"explained_variance got value \(3,\), return_ \(3, 1\)": lambda: explained_variance(row, column, valid),
    }
    for message, call in calls.items():
        with pytest.raises(ConfigError, match=message):
            call()
