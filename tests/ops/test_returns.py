import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.ops import continues, discounted_return, discounted_sum, gae, td_error

# Five steps of one slot: truncated at step 1, where the last observation is worth 10, and terminated at step 3. Each
# end is followed by a reset row, whose observation is the last one of the episode before.
REWARD = [1, 2, 0, 3, 4, 0, 5]
VALUE = [0.5, 1, 10, 1.5, 2, 77, 2.5, 3]
TERMINATED = [0, 0, 0, 0, 1, 0, 0]
TRUNCATED = [0, 1, 0, 0, 0, 0, 0]
VALID = [1, 1, 0, 1, 1, 0, 1]


def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def golden(**changes: list[float]) -> tuple[Tensor, ...]:
    rows = {"reward": REWARD, "value": VALUE, "terminated": TERMINATED, "truncated": TRUNCATED, "valid": VALID}
    return tuple(column((rows | changes)[k], torch.float64 if k in ("reward", "value") else torch.bool) for k in rows)


def test_the_golden_case():
    advantage, return_ = gae(*golden(), discount=0.9, gae_lambda=0.8)
    valid = torch.tensor(VALID, dtype=torch.bool)
    assert advantage[valid, 0].tolist() == pytest.approx([8.6, 10, 4.74, 2, 5.2], abs=1e-12)
    assert return_[valid, 0].tolist() == pytest.approx([9.1, 11, 6.24, 4, 7.7], abs=1e-12)
    assert advantage[~valid].tolist() == [[0], [0]]


def test_known_mistakes_would_not_pass():
    as_terminal, _ = gae(*golden(terminated=TRUNCATED), discount=0.9, gae_lambda=0.8)
    assert as_terminal[:2, 0].tolist() == pytest.approx([2.12, 1])
    of_the_reset, _ = gae(*golden(value=[0.5, 1, 1.5, 1.5, 2, 77, 2.5, 3]), discount=0.9, gae_lambda=0.8)
    assert of_the_reset[:2, 0].tolist() == pytest.approx([3.092, 2.35])
    no_boundary = torch.zeros(7, 1, dtype=torch.bool)
    reward, value, terminated, _, _ = golden()
    leaking, _ = gae(reward, value, terminated, no_boundary, ~no_boundary, discount=0.9, gae_lambda=0.8)
    assert leaking[1, 0] != pytest.approx(10)


def test_an_end_at_the_border_of_a_batch():
    """The last row: open, truncated and terminated, without any row after it."""
    one = torch.ones(1, 3, dtype=torch.float64)
    value = torch.tensor([[2.0, 2, 2], [10, 10, 10]], dtype=torch.float64)
    terminated, truncated = torch.tensor([[False, False, True]]), torch.tensor([[False, True, False]])
    advantage, return_ = gae(one, value, terminated, truncated, one.bool(), discount=0.5, gae_lambda=0.9)
    assert advantage.tolist() == [[4, 4, -1]]
    assert return_.tolist() == [[6, 6, 1]]


@dataclass
class Case:
    reward: Tensor
    value: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor

    def rows(self) -> tuple[Tensor, ...]:
        return self.reward, self.value, self.terminated, self.truncated, self.valid

    def map(self, fn) -> "Case":
        return Case(*(fn(x) for x in self.rows()))

    def cut(self, t0: int, t1: int) -> "Case":
        return Case(self.reward[t0:t1], self.value[t0 : t1 + 1], self.terminated[t0:t1], self.truncated[t0:t1],
                    self.valid[t0:t1])  # fmt: skip


def random_case(rng: np.random.Generator, reset: Literal["next_step", "batch_end"]) -> Case:
    """Episodes of random length and end, with a reset row after each or idle rows to the end of the batch, and faults."""
    T, B = int(rng.integers(1, 20)), int(rng.integers(1, 5))
    reward, value = rng.normal(size=(T, B)), rng.normal(size=(T + 1, B))
    terminated, truncated, valid = (np.zeros((T, B), bool) for _ in range(3))
    for b in range(B):
        resetting = rng.random() < 0.3
        for t in range(T):
            if resetting:
                reward[t, b] = 0
                resetting = reset == "batch_end" and t > 0
                continue
            valid[t, b] = True
            kind = rng.choice(4, p=[0.7, 0.12, 0.12, 0.06])
            terminated[t, b], truncated[t, b] = kind in (1, 3), kind in (2, 3)
            resetting = kind > 0 or rng.random() < 0.03  # the last: a fault, without any end
    return Case(*(torch.from_numpy(x) for x in (reward, value, terminated, truncated, valid)))


def random_cases(count: int = 100) -> Iterator[tuple[np.random.Generator, Case]]:
    rng = np.random.default_rng(0)
    for i in range(count):
        yield rng, random_case(rng, "next_step" if i % 2 else "batch_end")


def gae_by_loop(case: Case, discount: float, gae_lambda: float) -> Tensor:
    """Each row's advantage straight from the definition, a sum of decayed one-step errors to the end of its stretch."""
    T, B = case.reward.shape
    out = torch.zeros(T, B, dtype=torch.float64)
    for b in range(B):
        for start in range(T):
            weight, t = 1.0, start
            while t < T and bool(case.valid[t, b]):
                after = 0.0 if case.terminated[t, b] else float(case.value[t + 1, b])
                out[start, b] += weight * (float(case.reward[t, b]) + discount * after - float(case.value[t, b]))
                if case.terminated[t, b] or case.truncated[t, b]:
                    break
                weight *= discount * gae_lambda
                t += 1
    return out


def test_gae_is_the_loop_on_any_layout():
    for rng, case in random_cases():
        discount, gae_lambda = rng.choice([0.0, 0.5, 0.99, 1.0]), rng.choice([0.0, 0.3, 0.95, 1.0])
        expected = gae_by_loop(case, discount, gae_lambda)
        advantage, return_ = gae(*case.rows(), discount=discount, gae_lambda=gae_lambda)
        torch.testing.assert_close(advantage, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(return_, expected + case.value[:-1], rtol=1e-12, atol=1e-12)
        assert (advantage[~case.valid] == 0).all()
        single = case.map(lambda x: x.float() if x.dtype == torch.float64 else x)
        low, _ = gae(*single.rows(), discount=discount, gae_lambda=gae_lambda)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), expected, rtol=1e-4, atol=1e-4)


def test_lambda_0_is_the_one_step_error():
    for _, case in random_cases(20):
        advantage, _ = gae(*case.rows(), discount=0.9, gae_lambda=0.0)
        error = td_error(case.reward, case.value[:-1], case.value[1:], case.terminated, discount=0.9)
        assert torch.equal(advantage[case.valid], error[case.valid])


def test_lambda_1_is_the_discounted_return():
    for _, case in random_cases(20):
        return_ = discounted_return(*case.rows(), discount=0.9)
        T, B = case.reward.shape
        for b in range(B):
            for t in range(T):
                if not case.valid[t, b]:
                    continue
                total, weight, k = 0.0, 1.0, t
                while True:
                    total += weight * float(case.reward[k, b])
                    weight *= 0.9
                    ended = bool(case.terminated[k, b] | case.truncated[k, b])
                    k += 1
                    if ended or k == T or not case.valid[k, b]:
                        break
                total += 0.0 if case.terminated[k - 1, b] else weight * float(case.value[k, b])
                assert float(return_[t, b]) == pytest.approx(total, abs=1e-10)


def test_slots_do_not_touch_each_other():
    for rng, case in random_cases(30):
        order = torch.from_numpy(rng.permutation(case.reward.shape[1]))
        advantage, return_ = gae(*case.rows(), discount=0.9, gae_lambda=0.8)
        permuted, permuted_return = gae(*case.map(lambda x, o=order: x[:, o]).rows(), discount=0.9, gae_lambda=0.8)
        assert torch.equal(permuted, advantage[:, order])
        assert torch.equal(permuted_return, return_[:, order])


def test_a_batch_cut_anywhere_gives_the_same_numbers():
    """The second part's value at the cut, corrected by its advantage there, is what the first part bootstraps with."""
    for _, case in random_cases(60):
        T = len(case.reward)
        whole, whole_return = gae(*case.rows(), discount=0.9, gae_lambda=0.8)
        one_step, _ = gae(*case.rows(), discount=0.9, gae_lambda=0.0)
        for t in range(1, T):
            later, _ = gae(*case.cut(t, T).rows(), discount=0.9, gae_lambda=0.8)
            torch.testing.assert_close(later, whole[t:], rtol=1e-12, atol=1e-12)
            goes_on = continues(*case.rows()[2:])[t - 1]
            first = case.cut(0, t)
            earlier, _ = gae(*first.rows(), discount=0.9, gae_lambda=0.8)
            carried = torch.where(goes_on, 0.9 * 0.8 * whole[t], 0.0)
            torch.testing.assert_close(earlier[t - 1] + carried, whole[t - 1], rtol=1e-12, atol=1e-12)
            one_step_cut, _ = gae(*first.rows(), discount=0.9, gae_lambda=0.0)
            assert torch.equal(one_step_cut, one_step[:t])
            bootstrapped = Case(first.reward, first.value.clone(), *first.rows()[2:])
            bootstrapped.value[t] = torch.where(goes_on, whole_return[t], first.value[t])
            torch.testing.assert_close(discounted_return(*bootstrapped.rows(), discount=0.9)[t - 1][goes_on],
                (case.reward[t - 1] + 0.9 * whole_return[t])[goes_on], rtol=1e-12, atol=1e-12)  # fmt: skip


def test_invalid_rows_never_leak():
    """Neither their rewards nor, where no valid row ends there, their values; not even NaN."""
    for poison in (1e30, math.nan, math.inf):
        for _, case in random_cases(40):
            bad = case.map(torch.clone)
            bad.reward[~case.valid] = poison
            read = torch.zeros_like(case.value, dtype=torch.bool)  # V is read at a valid row, and after one
            read[:-1] |= case.valid
            read[1:] |= case.valid & ~case.terminated
            bad.value[~read] = poison
            bad.terminated[~case.valid] = True
            advantage, return_ = gae(*bad.rows(), discount=0.9, gae_lambda=0.8)
            expected, expected_return = gae(*case.rows(), discount=0.9, gae_lambda=0.8)
            assert torch.equal(advantage, expected)
            assert torch.equal(return_[case.valid], expected_return[case.valid])


def test_traces_stop_at_ends_and_before_invalid_rows():
    terminated, truncated, valid = golden()[2:]
    assert continues(terminated, truncated, valid)[:, 0].tolist() == [True, False, False, True, False, False, False]
    fault = torch.tensor([[1, 1, 0, 1, 1]], dtype=torch.bool).T
    never = torch.zeros_like(fault)
    assert continues(never, never, fault)[:, 0].tolist() == [True, False, False, True, False]
    every = torch.ones(3, 1, dtype=torch.bool)
    second = torch.tensor([[0, 1, 0]], dtype=torch.bool).T
    none = torch.zeros_like(every)
    assert continues(second, none, every)[:, 0].tolist() == [True, False, False]
    assert continues(none, second, every)[:, 0].tolist() == [True, False, False]
    assert not valid[2, 0]  # and the arguments are left alone
    assert continues(never[:1], never[:1], fault[:1]).tolist() == [[False]]


def test_discounted_sum_is_the_loop():
    generator = torch.Generator().manual_seed(0)
    for T in (1, 2, 3, 7, 8, 9, 64, 129):
        x, decay = (torch.rand(T, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        before = x.clone(), decay.clone()
        expected, y = torch.zeros_like(x), torch.zeros(3, dtype=torch.float64)
        for t in reversed(range(T)):
            y = x[t] + (decay[t] * y if t < T - 1 else 0)
            expected[t] = y
        torch.testing.assert_close(discounted_sum(x, decay), expected, rtol=1e-13, atol=0)
        assert torch.equal(x, before[0])
        assert torch.equal(decay, before[1])


def test_a_truncated_row_bootstraps_and_a_terminal_one_does_not():
    error = td_error(column([1, 1]), column([2, 2]), column([10, math.inf]), column([0, 1], torch.bool), discount=0.5)
    assert error[:, 0].tolist() == [4, -1]


def test_shapes_are_checked():
    rows = golden()
    with pytest.raises(ConfigError, match=r"value of shape \(7, 1\) for reward \(7, 1\); expected \[T\+1, B\]"):
        gae(rows[0], rows[1][:-1], *rows[2:], discount=0.9, gae_lambda=0.8)
    with pytest.raises(ConfigError, match="one shape"):
        gae(rows[0], rows[1], rows[2][:, [0, 0]], *rows[3:], discount=0.9, gae_lambda=0.8)
    with pytest.raises(ConfigError, match="one shape"):
        gae(*rows[:3], rows[3][:-1], rows[4], discount=0.9, gae_lambda=0.8)
    with pytest.raises(ConfigError, match="one shape"):
        discounted_sum(torch.zeros(3), torch.zeros(3))


def test_endless_reward_1_is_worth_10_however_it_is_cut():
    """Limit 1 and limit 1,000 give the same target; a truncation treated as an end would give 5.263 or 4.138."""
    for limit in (1, 3, 1000):
        T = 12
        grid = np.array([(t % (limit + 1)) for t in range(T)])
        valid, truncated = column(grid < limit, torch.bool), column(grid == limit - 1, torch.bool)
        reward, value = valid.double(), torch.full((T + 1, 1), 10.0, dtype=torch.float64)
        never = torch.zeros_like(valid)
        _, return_ = gae(reward, value, never, truncated, valid, discount=0.9, gae_lambda=0.95)
        torch.testing.assert_close(return_[valid], torch.full_like(return_[valid], 10.0))
