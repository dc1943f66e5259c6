"""Discrete SAC's soft value by hand; the rest is in test_off_policy_conformance.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.algos.discrete_sac import postprocess_fn
from tests.algos.off_policy_slow import DISCRETE


def test_the_soft_value_by_hand() -> None:
    """Q = (-1, 1), alpha 0.5, pi(1) = 1 / (1 + e^-4) = 0.98201: soft V = 1.00907."""

    class Fixed:
        log_alpha = torch.tensor([math.log(0.5)])
        scaled_reward = staticmethod(lambda reward: reward)
        unless_stuck = staticmethod(lambda inputs, x: x)
        target_q = staticmethod(lambda x: torch.tensor([[[-1.0, 1.0]], [[3.0, 1.5]]]))

        def __call__(self, x: Any) -> Tensor:
            return torch.tensor([[-1.0, 1.0]]).div(0.5).log_softmax(-1)

    rows = {"next": None, "return": torch.zeros(1), "discount": torch.ones(1)}
    ready = postprocess_fn(Fixed(), ps.TrainBatch(None, rows, None), DISCRETE.cfg)  # pyright: ignore
    assert float(ready["target"]) == pytest.approx(1.00907, abs=1e-5)
