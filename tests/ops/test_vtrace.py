"""V-trace by hand, against a slow loop of its definition, and where it must be the same as GAE."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.ops import continues, gae, td_error, vtrace
from tests.ops.test_returns import Case, column, golden, random_cases

RATIO = [0.5, 2.0, 7.0, 3.0, 0.25, 7.0, 0.5]
VALID = [0, 1, 3, 4, 6]
"""Rows of the golden case that are valid; the episode is truncated after row 1 and terminated after row 4."""


def logs(ratio: list[float]) -> Tensor:
    return column(ratio).log()


def test_the_golden_case():
    """Errors 1.4, 10, 3.3, 2 and 5.2; rho 0.5, 1.5, 1.5, 0.25, 0.5; c 0.5, 1, 1, 0.25, 0.5; discount times lambda 0.72.

    v - V: 0.5 * 1.4 + 0.72 * 0.5 * 15 = 6.1, 15, 1.5 * 3.3 + 0.72 * 0.5 = 5.31, 0.5, 2.6.
    A: 0.5 * (1.4 + 0.72 * 15) = 6.1, 15, 1.5 * (3.3 + 0.72 * 0.5) = 5.49, 0.5, 2.6.
    """
    target, advantage = vtrace(logs(RATIO), *golden(), discount=0.9, vtrace_lambda=0.8, rho_bar=1.5, c_bar=1.0)
    assert target[VALID, 0].tolist() == pytest.approx([6.6, 16, 6.81, 2.5, 5.1], abs=1e-12)
    assert advantage[VALID, 0].tolist() == pytest.approx([6.1, 15, 5.49, 0.5, 2.6], abs=1e-12)
    assert advantage[[2, 5]].tolist() == [[0], [0]]


def test_known_mistakes_would_not_pass():
    def rows(**changes: float) -> list[float]:
        settings = {"discount": 0.9, "vtrace_lambda": 0.8, "rho_bar": 1.5, "c_bar": 1.0} | changes
        target, advantage = vtrace(logs(RATIO), *golden(), **settings)
        return [*target[VALID, 0].tolist(), *advantage[VALID, 0].tolist()]

    right = rows()
    assert rows(rho_bar=1.0)[1] == pytest.approx(11)
    assert rows(c_bar=1.5)[2] == pytest.approx(1.5 + 4.95 + 0.72 * 1.5 * 0.5)
    assert rows(vtrace_lambda=1.0)[0] == pytest.approx(0.5 + 0.7 + 0.9 * 0.5 * 15)
    assert rows(rho_bar=math.inf, c_bar=math.inf)[2] == pytest.approx(1.5 + 9.9 + 0.72 * 3 * 0.5)
    assert len({tuple(x) for x in (right, rows(rho_bar=1.0), rows(c_bar=1.5), rows(vtrace_lambda=1.0))}) == 4


def by_loop(case: Case, ratio: Tensor, discount: float, vtrace_lambda: float, rho_bar: float, c_bar: float):
    """Equation 1 as a sum over the rows that follow, with the product of c between, then q of section 4.2."""
    T, B = case.reward.shape
    target, advantage = case.value[:-1].clone(), torch.zeros(T, B, dtype=torch.float64)

    def error(t: int, b: int) -> float:
        after = 0.0 if case.terminated[t, b] else float(case.value[t + 1, b])
        return float(case.reward[t, b]) + discount * after - float(case.value[t, b])

    for b in range(B):
        for start in range(T):
            weight, t = 1.0, start
            while t < T and bool(case.valid[t, b]):
                target[start, b] += weight * min(rho_bar, float(ratio[t, b])) * error(t, b)
                weight *= discount * vtrace_lambda * min(c_bar, float(ratio[t, b]))
                if case.terminated[t, b] or case.truncated[t, b]:
                    break
                t += 1
    goes_on = continues(case.terminated, case.truncated, case.valid)
    for b in range(B):
        for t in range(T):
            if case.valid[t, b]:
                ahead = float(target[t + 1, b] - case.value[t + 1, b]) if goes_on[t, b] else 0.0
                rho = min(rho_bar, float(ratio[t, b]))
                advantage[t, b] = rho * (error(t, b) + discount * vtrace_lambda * ahead)
    return target, advantage


def test_it_is_the_loop_on_any_layout():
    for rng, case in random_cases(40):
        ratio = torch.from_numpy(np.exp(rng.normal(size=case.reward.shape)))
        settings = {
            "discount": float(rng.choice([0.0, 0.5, 0.99, 1.0])),
            "vtrace_lambda": float(rng.choice([0.0, 0.9, 1.0])),
            "rho_bar": float(rng.choice([0.7, 1.0, 3.0, math.inf])),
            "c_bar": float(rng.choice([0.5, 1.0, math.inf])),
        }
        expected, expected_advantage = by_loop(case, ratio, **settings)
        target, advantage = vtrace(ratio.log(), *case.rows(), **settings)
        torch.testing.assert_close(target, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(advantage, expected_advantage, rtol=1e-10, atol=1e-10)
        assert (advantage[~case.valid] == 0).all()


@pytest.mark.parametrize("trace_lambda", [1.0, 0.95, 0.3, 0.0])
def test_on_policy_it_is_gae(trace_lambda: float):
    """With lambda 1 the target is the discounted return, with others the lambda return."""
    for _, case in random_cases(60):
        expected, return_ = gae(*case.rows(), discount=0.9, gae_lambda=trace_lambda)
        target, advantage = vtrace(
            torch.zeros_like(case.reward), *case.rows(), discount=0.9, vtrace_lambda=trace_lambda
        )
        torch.testing.assert_close(advantage, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(target[case.valid], return_[case.valid], rtol=1e-12, atol=1e-12)


def test_ratios_over_the_bars_count_as_the_bars_and_zero_ratios_keep_the_value():
    for _, case in random_cases(20):
        zeros = torch.zeros_like(case.reward)
        at_bar = vtrace(zeros, *case.rows(), discount=0.9)
        for far in (vtrace(zeros + 5, *case.rows(), discount=0.9), vtrace(zeros + 200, *case.rows(), discount=0.9)):
            assert torch.equal(far[0], at_bar[0]) and torch.equal(far[1], at_bar[1])
        target, advantage = vtrace(zeros - math.inf, *case.rows(), discount=0.9)
        assert torch.equal(target, case.value[:-1])
        assert not advantage.any()


def test_without_a_trace_it_is_one_step():
    for rng, case in random_cases(20):
        log_ratio = torch.from_numpy(rng.normal(size=case.reward.shape))
        target, advantage = vtrace(log_ratio, *case.rows(), discount=0.9, vtrace_lambda=0.0)
        error = td_error(case.reward, case.value[:-1], case.value[1:], case.terminated, discount=0.9)
        expected = log_ratio.exp().clamp(max=1.0) * error
        torch.testing.assert_close(advantage[case.valid], expected[case.valid])
        torch.testing.assert_close((target - case.value[:-1])[case.valid], expected[case.valid])


def test_invalid_rows_never_leak_nor_their_ratios():
    for poison in (1e30, math.nan, math.inf, -math.inf):
        for rng, case in random_cases(30):
            log_ratio = torch.from_numpy(rng.normal(size=case.reward.shape))
            bad, bad_ratio = case.map(torch.clone), log_ratio.clone()
            bad.reward[~case.valid], bad_ratio[~case.valid] = poison, poison
            bad.terminated[~case.valid] = True
            expected = vtrace(log_ratio, *case.rows(), discount=0.9, c_bar=0.9)
            got = vtrace(bad_ratio, *bad.rows(), discount=0.9, c_bar=0.9)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_single_precision_stays_single():
    for rng, case in random_cases(10):
        log_ratio = torch.from_numpy(rng.normal(size=case.reward.shape))
        low = case.map(lambda x: x.float() if x.dtype == torch.float64 else x)
        for x, y in zip(
            vtrace(log_ratio.float(), *low.rows(), discount=0.9), vtrace(log_ratio, *case.rows(), discount=0.9)
        ):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_fit_are_refused():
    reward, value, terminated, truncated, valid = golden()
    log_ratio = logs(RATIO)
    with pytest.raises(
        ConfigError, match=r"^vtrace got value of shape \(7, 1\) for reward \(7, 1\); expected \[T\+1, B\]"
    ):
        vtrace(log_ratio, reward, value[:-1], terminated, truncated, valid, discount=0.9)
    for wrong in (log_ratio[:-1], log_ratio.squeeze(1), log_ratio.unsqueeze(-1)):
        with pytest.raises(ConfigError, match=r"expected arrays of one shape \[T, B\]"):
            vtrace(wrong, reward, value, terminated, truncated, valid, discount=0.9)
    with pytest.raises(ConfigError, match=r"expected arrays of one shape \[T, B\]"):
        vtrace(log_ratio, reward, value, terminated, truncated, valid[:-1], discount=0.9)


def test_ratios_without_a_bound_stop_at_an_end():
    """Products of 64 ratios of 55 are infinite in float32, and infinity times the 0 of an end is no number."""
    T = 64
    no, zero = torch.zeros(T, 1, dtype=torch.bool), torch.zeros(T, 1)
    end = no.clone()
    end[40] = True
    bars = {"discount": 0.99, "rho_bar": float("inf"), "c_bar": float("inf")}
    target, advantage = vtrace(zero + 4.0, zero + 1.0, torch.zeros(T + 1, 1), end, no, ~no, **bars)
    assert not target.isnan().any() and not advantage.isnan().any()
    y, expected = 0.0, []
    for t in reversed(range(T)):
        y = math.e**4 * (1.0 + 0.99 * y * (t != 40 and t != T - 1))
        expected.append(y)
    finite = torch.tensor(expected[::-1], dtype=torch.float64).clamp(max=3.4e38).unsqueeze(1)
    close = target.double() / finite
    assert ((close - 1.0).abs() < 1e-3)[target.isfinite()].all()
    assert target[38:41].isfinite().all() and target[:8].isinf().all()
