"""Targets, losses, priorities and ladders of value learning against numbers by hand and slow loops."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.ops import (
    critic_loss,
    discounted_return,
    double_q,
    dueling,
    epsilon_ladder,
    huber,
    log_space_ladder,
    n_step_return,
    polyak_,
    sequence_priority,
    td_error,
    td_loss,
    value_rescale,
    value_unscale,
)

Record = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""reward, value, terminated, truncated, valid."""


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def golden() -> Record:
    """G2: six steps of one slot, truncated at the third (the last observation is worth 100), terminated at the fifth.

    Each end is followed by a reset row; 77 is worth the observation of a terminal state, which nothing may read.
    """
    rows = [1, 2, 4, 0, 8, 16, 0, 32], [10, 20, 30, 100, 40, 50, 77, 60, 70]
    flags = [0, 0, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 1, 0, 1]
    reward, value = (torch.tensor(x, dtype=torch.float64).unsqueeze(1) for x in rows)
    terminated, truncated, valid = (torch.tensor(x, dtype=torch.bool).unsqueeze(1) for x in flags)
    return reward, value, terminated, truncated, valid


def random_records(count: int = 200) -> Iterator[tuple[np.random.Generator, Record]]:
    """Rows of every kind in any order: ends, double ends, resets, idle stretches and faults without an end."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        shape = int(rng.integers(1, 15)), int(rng.integers(1, 5))
        value = rng.normal(size=(shape[0] + 1, shape[1]))
        flags = (rng.random((3, *shape)) < np.array([0.15, 0.15, 0.8]).reshape(3, 1, 1)).astype(bool)
        terminated, truncated, valid = (torch.from_numpy(x) for x in flags)
        record = torch.from_numpy(rng.normal(size=shape)), torch.from_numpy(value)
        yield rng, (*record, terminated & valid, truncated & valid, valid)


def n_step_by_loop(record: Record, discount: float, n: int) -> Tensor:
    reward, value, terminated, truncated, valid = record
    T, B = reward.shape
    out = torch.zeros(T, B, dtype=torch.float64)
    for b in range(B):
        for start in range(T):
            if not valid[start, b]:
                continue
            for t in range(start, T):
                out[start, b] += discount ** (t - start) * reward[t, b]
                last = t == T - 1 or not valid[t + 1, b] or t - start == n - 1
                if terminated[t, b] or truncated[t, b] or last:
                    break
            if not terminated[t, b]:
                out[start, b] += discount ** (t - start + 1) * value[t + 1, b]
    return out


@pytest.mark.parametrize(("n", "expected"), [(1, [11, 17, 54, 33, 16, 67]), (3, [15.5, 29, 54, 16, 16, 67])])
def test_the_golden_n_step_target(n: int, expected: list[float]):
    record = golden()
    got = n_step_return(*record, discount=0.5, n=n)
    assert got[record[-1]].tolist() == expected
    assert (got[~record[-1]] == 0).all()


def test_n_step_is_the_loop_on_any_layout():
    for rng, record in random_records():
        n, discount = int(rng.integers(1, 7)), float(rng.choice([0.0, 0.5, 0.99, 1.0]))
        got = n_step_return(*record, discount=discount, n=n)
        torch.testing.assert_close(got, n_step_by_loop(record, discount, n), rtol=1e-12, atol=1e-12)


def test_n_step_between_its_ends():
    """n=1 is the one-step error plus V; a large n is the discounted return."""
    for _, record in random_records(50):
        reward, value, terminated, _, valid = record
        one = td_error(reward, value[:-1], value[1:], terminated, discount=0.9) + value[:-1]
        torch.testing.assert_close(n_step_return(*record, discount=0.9, n=1)[valid], one[valid])
        rest = discounted_return(*record, discount=0.9)
        for n in (len(reward), 1000):
            torch.testing.assert_close(n_step_return(*record, discount=0.9, n=n)[valid], rest[valid])


def test_n_step_never_reads_invalid_rows():
    for rng, record in random_records(50):
        reward, value, terminated, truncated, valid = (x.clone() for x in record)
        reward[~valid] = math.nan
        read = torch.zeros_like(value, dtype=torch.bool)
        read[1:] = valid & ~terminated
        value[~read] = math.nan
        terminated[~valid] = True
        n = int(rng.integers(1, 7))
        got = n_step_return(reward, value, terminated, truncated, valid, discount=0.9, n=n)
        assert torch.equal(got, n_step_return(*record, discount=0.9, n=n))


def test_huber():
    """G13: the slope is the error, clipped at +-1."""
    x = tensor(-2, -1, -0.5, 0, 0.5, 1, 2).requires_grad_()
    loss = huber(x)
    loss.sum().backward()
    assert loss.tolist() == [1.5, 0.5, 0.125, 0, 0.125, 0.5, 1.5]
    assert x.grad is not None
    assert x.grad.tolist() == [-1, -1, -0.5, 0, 0.5, 1, 1]
    wide = x.detach().clone().requires_grad_()
    huber(wide, math.inf).sum().backward()
    assert wide.grad is not None
    assert torch.equal(wide.grad, wide)
    assert torch.equal(huber(wide, math.inf), 0.5 * wide.square())
    assert huber(tensor(3, -3), 2.0).tolist() == [4, 4]
    assert huber(tensor(math.nan)).isnan().all()
    for delta in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="expected delta > 0"):
            huber(x, delta)


def test_double_q_takes_the_action_of_one_and_the_value_of_the_other():
    online, target = tensor(1, 2, 5, 4).reshape(2, 2), tensor(30, 10, 7, 9).reshape(2, 2)
    assert double_q(online, target).tolist() == [10, 7]  # the target's own maximum is 30 and 9
    assert double_q(online[None], target[None]).tolist() == [[10, 7]]
    assert double_q(torch.zeros(1, 3), torch.tensor([[1.0, 2, 3]])).tolist() == [1]
    with pytest.raises(ConfigError, match=r"q_online \(2, 2\), q_target \(1, 2\)"):
        double_q(online, target[:1])


def test_dueling_subtracts_the_mean_advantage():
    value, advantage = tensor(10, 20).reshape(2, 1), tensor(1, 3, -1, 5).reshape(2, 2)
    assert dueling(value, advantage).tolist() == [[9, 11], [17, 23]]
    torch.testing.assert_close(dueling(value, advantage + 7), dueling(value, advantage))
    assert torch.equal(dueling(value, advantage).mean(1, keepdim=True), value)
    atoms = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stacked = dueling(atoms.sum(1, keepdim=True), atoms)
    for k in range(5):
        torch.testing.assert_close(stacked[..., k], dueling(atoms[..., k].sum(1, keepdim=True), atoms[..., k]))
    torch.testing.assert_close(dueling(value[None], advantage[None], dim=-1)[0], dueling(value, advantage))
    for wrong in (value[:, 0], value[:1], advantage):
        with pytest.raises(ConfigError, match="one shape but for 1 on axis 1"):
            dueling(wrong, advantage)
    with pytest.raises(ConfigError, match="axis 2"):
        dueling(value, advantage, dim=2)


def test_value_rescale():
    """G6, and that float32 keeps what the paper's form of the inverse loses."""
    assert value_rescale(tensor(3, -8, 0)).tolist() == pytest.approx([1.003, -2.008, 0], abs=1e-12)
    assert value_unscale(tensor(1.003, -2.008, 0)).tolist() == pytest.approx([3, -8, 0], abs=1e-11)
    size = torch.logspace(-12, 6, 2000, dtype=torch.float64)
    x = torch.cat((-size, size))
    torch.testing.assert_close(value_unscale(value_rescale(x)), x, rtol=2e-10, atol=0)
    torch.testing.assert_close(value_rescale(value_unscale(x)), x, rtol=2e-10, atol=0)
    textbook = x.sign() * ((x.abs() + 1).sqrt() - 1) + 1e-3 * x
    torch.testing.assert_close(value_rescale(x), textbook, rtol=1e-12, atol=1e-15)
    root = ((1 + 4e-3 * (x.abs() + 1.001)).sqrt() - 1) / 2e-3
    torch.testing.assert_close(value_unscale(x), x.sign() * (root.square() - 1), rtol=1e-9, atol=1e-11)
    single = x.float()
    torch.testing.assert_close(value_unscale(value_rescale(single)), single, rtol=2e-6, atol=0)
    torch.testing.assert_close(value_unscale(value_rescale(x, 0.0), 0.0), x, rtol=1e-10, atol=0)
    for function in (value_rescale, value_unscale):
        with pytest.raises(ConfigError, match=r"eps=-0\.1"):
            function(x, -0.1)


def test_value_rescale_is_smooth_at_0():
    x = tensor(0.0).requires_grad_()
    (slope,) = torch.autograd.grad(value_rescale(x).sum(), x)
    (inverse,) = torch.autograd.grad(value_unscale(x).sum(), x)
    assert slope.item() == pytest.approx(0.501)
    assert inverse.item() == pytest.approx(1 / 0.501)


def test_sequence_priority():
    """G10, with a masked row that would change both the maximum and the mean, and a column without a valid row."""
    abs_td = torch.stack((tensor(1, 2, 3, math.nan), tensor(4, 0, 50, 60), tensor(1, 1, 1, 1)), 1)
    valid = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    assert sequence_priority(abs_td, valid).tolist() == pytest.approx([2.9, 0.9 * 4 + 0.1 * 2, 0])
    assert sequence_priority(abs_td, valid, 1.0).tolist() == [3, 4, 0]
    assert sequence_priority(abs_td, valid, 0.0).tolist() == [2, 2, 0]
    with pytest.raises(ConfigError, match=r"one shape \[T, B\]"):
        sequence_priority(abs_td, valid[:2])
    with pytest.raises(ConfigError, match=r"eta=1\.5"):
        sequence_priority(abs_td, valid, 1.5)


def test_polyak():
    """G13: a quarter twice is 7/16. Whole tensors move in place, without a graph; 1 copies even over NaN."""
    target, source = [torch.zeros(2), torch.zeros(3, 2)], [torch.ones(2), torch.ones(3, 2).requires_grad_()]
    places = [x.data_ptr() for x in target]
    polyak_(target, source, 0.25)
    polyak_(target, source, 0.25)
    assert all((x == 0.4375).all() and not x.requires_grad for x in target)
    polyak_(target, source, 0.0)
    assert (target[0] == 0.4375).all()
    target[0][0] = math.nan
    polyak_(tuple(target), tuple(source), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(target, source))
    assert [x.data_ptr() for x in target] == places
    parameters = list(torch.nn.Linear(2, 2).parameters())
    polyak_(parameters, [torch.zeros(2, 2), torch.zeros(2)], 1.0)
    assert all((x == 0).all() and x.requires_grad for x in parameters)
    polyak_([], [], 0.5)
    for arguments, text in (
        ((target, source[:1], 0.5), "2 targets for 1 sources"),
        ((target, source[::-1], 0.5), r"target \(2,\), source \(3, 2\); expected equal shapes in pair 0"),
        ((target, source, 1.5), r"tau=1\.5"),
    ):
        with pytest.raises(ConfigError, match=text):
            polyak_(*arguments)


def test_epsilon_ladders():
    """G8."""
    expected = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    assert epsilon_ladder(8).tolist() == pytest.approx(expected, rel=1e-6)
    assert epsilon_ladder(1).tolist() == pytest.approx([0.4])
    assert epsilon_ladder(3, 0.5, 2.0).tolist() == [0.5, 0.25, 0.125]
    assert log_space_ladder(3, 0.001, 0.1).tolist() == pytest.approx([0.001, 0.01, 0.1])
    assert log_space_ladder(1, 0.001, 0.1).tolist() == pytest.approx([0.1])
    assert torch.equal(log_space_ladder(4, 0.5, 0.5), torch.full((4,), 0.5))
    assert epsilon_ladder(8).dtype == log_space_ladder(8, 0.1, 0.2).dtype == torch.float32
    for make in (lambda: epsilon_ladder(0), lambda: epsilon_ladder(2, 0.0), lambda: epsilon_ladder(2, 0.4, -1.0)):
        with pytest.raises(ConfigError, match="expected slots >= 1, 0 < base <= 1, alpha >= 0"):
            make()
    for slots, low, high in ((0, 0.1, 0.2), (2, 0.0, 0.2), (2, 0.3, 0.2)):
        with pytest.raises(ConfigError, match="expected slots >= 1 and 0 < low <= high"):
            log_space_ladder(slots, low, high)


def test_n_step_shapes_are_checked():
    record = golden()
    with pytest.raises(ConfigError, match="n=0"):
        n_step_return(*record, discount=0.5, n=0)
    with pytest.raises(ConfigError, match=r"value \(8, 1\).*value \[T\+1, B\]"):
        n_step_return(record[0], record[1][:-1], *record[2:], discount=0.5, n=2)
    with pytest.raises(ConfigError, match=r"reward \(7, 1\)"):
        n_step_return(record[0][:-1], record[1][:-1], *record[2:], discount=0.5, n=2)
    with pytest.raises(ConfigError, match="one shape"):
        n_step_return(*record[:3], record[3][:-1], record[4], discount=0.5, n=2)


def test_the_golden_loss_of_critics() -> None:
    q, target = torch.tensor([[1.0, 3.0], [2.0, -1.0]], requires_grad=True), torch.tensor([0.0, 1.0])
    total, priorities = critic_loss(q, target)
    assert total.item() == pytest.approx((1 + 4) / 2 + (4 + 4) / 2) and priorities is None
    assert torch.autograd.grad(total, q)[0].tolist() == [[1.0, 2.0], [2.0, -2.0]]  # 2 error / N
    total, priorities = critic_loss(q, target, torch.tensor([0.5, 1.0]))
    assert total.item() == pytest.approx((0.5 + 4) / 2 + (2 + 4) / 2)
    assert priorities is not None and priorities.tolist() == [1.5, 2.0] and not priorities.requires_grad


def test_critics_and_targets_that_would_broadcast_are_refused() -> None:
    for q, target in ((torch.zeros(2, 3), torch.zeros(3, 1)), (torch.zeros(3), torch.zeros(3))):
        with pytest.raises(ConfigError, match="critic_loss got q"):
            critic_loss(q, target)


def test_the_golden_loss_of_one_network() -> None:
    q, target = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([0.5, 0.0])
    total, priorities = td_loss(q, target)
    assert total.item() == pytest.approx((0.125 + 2.5) / 2) and priorities is None
    assert torch.autograd.grad(total, q)[0].tolist() == [0.25, 0.5]  # clipped errors / N
    total, priorities = td_loss(q, target, torch.tensor([1.0, 0.5]), math.inf)
    assert total.item() == pytest.approx((0.125 + 0.5 * 4.5) / 2)
    assert priorities is not None and priorities.tolist() == [0.5, 3.0] and not priorities.requires_grad
    for wrong in (torch.zeros(2, 1), torch.zeros(1)):
        with pytest.raises(ConfigError, match="td_loss got q"):
            td_loss(q, wrong)
    with pytest.raises(ConfigError, match="td_loss got delta=0"):
        td_loss(q, target, None, 0.0)
