"""Agents with given answers and few rows, for losses and targets by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.agents.actor_critic import Output
from penstock.agents.distributions import Categorical
from penstock.core.batch import Inputs, SampleBatch, TrainBatch, allocate_batch
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec

SPEC = EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("discrete", (), "int64", sizes=(3,)))


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


P, VALUE, RETURN = tensor([0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]), tensor(1, 2, 5), tensor(2, 0, 5)
ROWS = {
    "action": torch.tensor([0, 1, 2]),
    "logp": tensor(0.4, 0.4, 0.2).log(),  # ratios 1.25, 0.5, 1
    "advantage": tensor(2, -3, 1),
    "return": RETURN,  # named so by A2C and PPO
    "target": RETURN,  # and so by IMPALA and APPO
}


class Fixed:
    """Answers with the probabilities and values above, of all rows or of those given."""

    def __init__(self, rows: Any = slice(None)) -> None:
        self.logits, self.value = P[rows].log().requires_grad_(), VALUE[rows].clone().requires_grad_()

    def __call__(self, inputs: Inputs, state: Any = None) -> Output:
        return Output(Categorical(self.logits), self.value)


def minibatch(valid: torch.Tensor | None = None, **rows: torch.Tensor) -> TrainBatch:
    return TrainBatch(Inputs(None, None, None, None), rows, valid)


class Known:
    """An agent whose values, and probabilities if it has any, are given for every row [T+1, B]; it doubles rewards."""

    def __init__(self, value: torch.Tensor, p: torch.Tensor | None = None) -> None:
        self.value, self.p = value, p

    def __call__(self, inputs: Inputs, state: Any = None) -> Output:
        assert inputs.obs.ndim == 2 and self.p is not None
        return Output(Categorical(self.p.log().flatten(0, 1)), self.value.flatten())

    def values(self, batch: Any) -> torch.Tensor:
        return self.value

    def scaled_reward(self, reward: torch.Tensor) -> torch.Tensor:
        return 2 * reward

    def terminal(self, batch: Any) -> torch.Tensor:
        return batch.terminated

    def needed(self, inputs: Inputs) -> Inputs:
        return inputs


KNOWN = torch.tensor([[1.0], [2.0], [50.0], [4.0], [8.0]])
"""Values of the rows below."""


def four_rows(logp: Any) -> SampleBatch:
    """Two steps, a termination, a reset row, one step more, as arrays [4, 1]."""
    batch = allocate_batch(SPEC, BatchSpec(4, 1), {"logp": np.float32(0)})
    batch.reward[:, 0] = [1, 2, 0, 3]
    batch.terminated[1, 0] = True
    batch.valid[:, 0] = [True, True, False, True]
    batch.info["logp"][:, 0] = logp
    batch.action[:, 0] = [1, 2, 0, 1]
    return batch
