"""SAC's noise, its fixed temperature and the entropy it keeps to; the rest is in test_off_policy_conformance.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.algos.sac import postprocess_fn, target_entropy
from tests.algos.filled import drawn, filled, trained
from tests.algos.off_policy_slow import SAC

CFG, ENV = SAC.cfg, SAC.env


def test_present_and_next_actions_have_noise_of_their_own() -> None:
    policy, _ = filled(CFG, ENV)
    _, x = drawn(policy)
    assert x["noise"].shape == (12, 4) and float(x["noise"].min()) > 0.0 and float(x["noise"].max()) < 1.0
    agent: Any = policy.agent
    with torch.no_grad():
        plain = postprocess_fn(agent, x, CFG)
        changed = ps.TrainBatch(
            x.inputs, {**x.rows, "noise": torch.cat([1 - x["noise"][:, :2], x["noise"][:, 2:]], 1)}, None
        )
        again = postprocess_fn(agent, changed, CFG)
    assert torch.equal(plain["target"], again["target"]) and not torch.equal(plain["noise"], again["noise"])


def test_a_fixed_temperature_stays() -> None:
    policy, states = trained(replace(CFG, alpha=0.3), ENV, 3)
    assert all(float(s["log_alpha"]) == pytest.approx(math.log(0.3)) for s in states)
    assert set(policy.optimizers) == {"critic", "actor"}
    assert float(trained(CFG, ENV, 1)[1][0]["log_alpha"]) == 0.0


def test_entropy_kept_to_is_minus_the_number_of_elements() -> None:
    policy, _ = filled(CFG, ENV)
    agent: Any = policy.agent
    assert target_entropy(agent, CFG) == -2.0 and target_entropy(agent, replace(CFG, target_entropy=0.5)) == 0.5
