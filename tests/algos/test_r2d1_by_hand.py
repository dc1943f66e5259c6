"""R2D1 on one sequence whose every number was worked out on paper: burn-in, double Q, ends, masks, weights, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.algos.r2d1 import R2D1, loss_fn, postprocess_fn
from penstock.core.batch import Inputs, TrainBatch
from penstock.envs.toy import TMaze
from penstock.learn.algorithm import Loss
from penstock.samplers.serial import SerialSampler
from tests.algos.r2d1_slow import SMALL

CFG = replace(SMALL, discount=0.5, n_step=2, burn_in=1, train_length=2, value_rescale=False, dueling=False)


class Adder(nn.Module):
    """Memory c <- decay * c + obs, zeroed before a first row; Q = c * weight."""

    def __init__(self, decay: float, weight: tuple[float, float]) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(decay))
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, inputs: Inputs, obs: Tensor, state: Any) -> tuple[Tensor, Any]:
        c, out = state["h"], []
        for t in range(len(obs)):
            c = self.decay * (c * ~inputs.first[t].unsqueeze(-1)) + obs[t, :, :1]
            out.append(c * self.weight)
        return torch.stack(out), {"h": c}


def learned(
    cfg: R2D1,
    reward: tuple[float, ...] = (9, 1, 2, 4, 8),
    *,
    terminated: tuple[int, ...] = (),
    truncated: tuple[int, ...] = (),
    invalid: tuple[int, ...] = (),
    first: tuple[int, ...] = (),
    target: tuple[float, float] = (5.0, 3.0),
    weights: tuple[float, ...] = (1.0,),
) -> tuple[Loss, list[float]]:
    """The loss of 1 row of burn-in, 2 trained and 2 beyond, begun with memory 10, and the gradient of (decay, weight).

    Every observation is 1, and actions are 0, 0, 1, 1, 0. So the online memory is 11 12 13 14 15, that of the target
    network, whose decay is a half, 6 4 3 2.5 2.25; the online network prefers action 1. A column for each weight.
    """  # fmt: skip
    n = len(weights)
    agent: Any = cfg.build(SerialSampler(T=2, B=1).build(TMaze, 0).spec).agent
    agent.online, agent.target = Adder(1.0, (1.0, 2.0)), Adder(0.5, target)

    def marked(rows: tuple[int, ...], length: int = 5) -> Tensor:
        return torch.tensor([[t in rows] * n for t in range(length)])

    rows = {
        "action": torch.tensor([0, 0, 1, 1, 0]).unsqueeze(-1).expand(5, n),
        "reward": torch.tensor(reward, dtype=torch.float32).unsqueeze(-1).expand(5, n),
        "terminated": marked(terminated), "truncated": marked(truncated), "weight": torch.tensor(weights),
    }  # fmt: skip
    inputs = Inputs(torch.ones(6, n, 2), None, None, marked(first, 6))
    x = TrainBatch(inputs, rows, ~marked(invalid), {"h": torch.full((n, 1), 10.0)})
    with torch.no_grad():
        x = postprocess_fn(agent, x, cfg)
    loss = loss_fn(agent, x, cfg)
    assert isinstance(loss.total, Tensor)
    decay, weight = torch.autograd.grad(loss.total, (agent.online.decay, agent.online.weight))
    return loss, [decay.item(), *weight.tolist()]


def total(loss: Loss) -> float:
    return loss.metrics["loss"].item()


def priority(loss: Loss) -> list[float]:
    assert loss.priorities is not None
    return loss.priorities.tolist()


def test_two_trained_rows_after_one_that_burns_in() -> None:
    """Q 12 and 26, targets 1 + 2/2 + 7.5/4 and 2 + 4/2 + 6.75/4; no gradient passes memory 11 to the burn-in."""
    loss, gradient = learned(CFG)
    assert total(loss) == (8.125**2 + 20.3125**2) / 4
    assert priority(loss) == pytest.approx([0.9 * 20.3125 + 0.1 * 14.21875])
    assert gradient == [(8.125 * 11 + 20.3125 * 2 * (12 + 11)) / 2, 8.125 * 12 / 2, 20.3125 * 13 / 2]
    assert {name: float(x) for name, x in loss.metrics.items()} == {
        "loss": (8.125**2 + 20.3125**2) / 4, "q": 19.0, "td_error": 14.21875,
    }  # fmt: skip


def test_without_double_the_target_network_chooses() -> None:
    """Bootstraps of 12.5 and 11.25, by action 0."""
    loss, _ = learned(replace(CFG, double=False))
    errors = 12 - (2 + 12.5 / 4), 26 - (4 + 11.25 / 4)
    assert total(loss) == (errors[0] ** 2 + errors[1] ** 2) / 4


def test_without_burn_in_both_networks_start_from_the_stored_state() -> None:
    """The same rows with the first one trained: Q 11 12, memory of the target 3 and 2.5 at the bootstraps."""
    loss, gradient = learned(replace(CFG, burn_in=0, train_length=3))
    errors = [11 - (9 + 0.5 + 3 * 3 / 4), 8.125, 20.3125]
    assert total(loss) == pytest.approx(sum(e * e for e in errors) / 6)
    # d(11, 12, 13)/d decay is 10, 11 + 10, 12 + 11 + 10.
    assert gradient[0] == pytest.approx((errors[0] * 10 + errors[1] * 21 + errors[2] * 2 * 33) / 3)


def test_nothing_follows_a_terminated_row() -> None:
    """Targets 1 + 2/2 and 2."""
    loss, _ = learned(CFG, terminated=(2,), invalid=(3,), first=(4,))
    assert total(loss) == (10.0**2 + 24.0**2) / 4
    assert priority(loss) == pytest.approx([0.9 * 24 + 0.1 * 17])


def test_the_value_of_its_last_observation_follows_a_truncated_row() -> None:
    """Targets 1 + 2/2 + 7.5/4 and 2 + 7.5/2."""
    loss, _ = learned(CFG, truncated=(2,), invalid=(3,), first=(4,))
    assert total(loss) == (8.125**2 + 20.25**2) / 4


def test_memory_begins_anew_inside_a_sequence() -> None:
    """An end in the burn-in: row 1 resets and counts nowhere, row 2 has memory 1, and nothing of what was before."""
    loss, gradient = learned(CFG, terminated=(0,), invalid=(1,), first=(2,))
    error = 2.0 - (2 + 4 / 2 + 3 * 1.75 / 4)
    assert total(loss) == error**2 / 2
    assert priority(loss) == pytest.approx([-error])
    assert gradient == [0.0, 0.0, error]


def test_rows_after_a_loss_count_nowhere() -> None:
    """A slot idle from row 2 on: row 1 bootstraps with 3 * 3 at once, and is all that is trained."""
    loss, gradient = learned(CFG, invalid=(2, 3, 4))
    assert total(loss) == 6.5**2 / 2
    assert priority(loss) == pytest.approx([6.5])
    assert gradient == [6.5 * 11, 6.5 * 12, 0.0]


def test_a_sequence_without_a_valid_row_trains_nothing() -> None:
    loss, gradient = learned(CFG, invalid=(1, 2, 3, 4))
    assert total(loss) == 0 and priority(loss) == [0] and gradient == [0, 0, 0]


def test_values_are_rescaled() -> None:
    """h(8) = 2.008 is what row 3 bootstraps with: y1 = h(1 + 2/2 + 8/4) = h(4), and y2 = h(2 + 4/2) by an end."""
    cfg = replace(CFG, value_rescale=True)
    loss, _ = learned(cfg, terminated=(3,), invalid=(4,), target=(5.0, 2.008 / 2.5))
    y = 5.0**0.5 - 1 + 0.004
    assert total(loss) == pytest.approx(((12 - y) ** 2 + (26 - y) ** 2) / 4, rel=1e-6)


def test_each_sequence_has_its_weight() -> None:
    """Weights multiply the loss and the gradient; the mean is over rows, and priorities know nothing of them."""
    (plain, slope), (weighted, slopes) = learned(CFG), learned(CFG, weights=(1.0, 0.25))
    assert total(weighted) == total(plain) * 1.25 / 2
    assert slopes == [x * 1.25 / 2 for x in slope]
    assert priority(weighted) == priority(plain) * 2


@pytest.mark.parametrize(("eta", "expected"), [(1.0, 20.3125), (0.0, 14.21875), (0.5, 17.265625)])
def test_eta_mixes_the_largest_and_the_mean_error(eta: float, expected: float) -> None:
    assert priority(learned(replace(CFG, eta=eta))[0]) == pytest.approx([expected])
