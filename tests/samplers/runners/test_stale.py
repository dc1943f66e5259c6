"""IMPALA and APPO over runners, in rounds and in ready mode: the exact answers of tasks that have one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.envs import toy
from penstock.learn.rows.postprocess import as_tensors
from penstock.samplers.runners.settings import RunnerSampler
from tests.algos.test_stale_probes import FAST_APPO, FAST_IMPALA, SHARED
from tests.samplers.placed import live
from tests.slow import slow

pytestmark = pytest.mark.timeout(120)


def trained(settings: Any, env: Any, algo: Any, batches: int) -> tuple[Any, Any]:
    sampler, policy = live(settings, env, algo)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    return sampler, policy


@pytest.mark.parametrize("algo", [*slow(FAST_IMPALA), FAST_APPO], ids=["impala", "appo"])
@pytest.mark.parametrize("mode", slow("rounds", "ready"))
def test_a_state_is_matched(mode: Any, algo: Any) -> None:
    settings = RunnerSampler(2, ps.SerialSampler(16, 8), "in-process", mode, depth=2)
    batches = (150 if algo is FAST_IMPALA else 25) * (2 if mode == "ready" else 1)
    sampler, policy = trained(settings, toy.Match, algo, batches)
    batch = as_tensors(sampler.obtain_samples(batches)[0], torch.device("cpu"))
    metrics = sampler.metrics()
    sampler.shutdown()
    assert metrics["sampler/lag"] == (4.0 if mode == "ready" else 2.0)
    assert np.abs(policy.agent.values(batch)[:-1][batch.valid].numpy() - 1).max() < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rounds", "ready"])
def test_what_was_shown_before_is_repeated_by_an_lstm(mode: Any) -> None:
    net = ps.Net(hidden=(32,), recurrent="lstm", recurrent_size=32)
    algo = ps.IMPALA(**{**SHARED, "entropy_coef": 0.0, "discount": 0.5, "net": net})
    each = 8 if mode == "rounds" else 16
    settings = RunnerSampler(2, ps.SerialSampler(32, each), "in-process", mode, depth=1)
    sampler, _ = trained(settings, lambda: toy.RepeatPrevious(1, 3), algo, 170)
    score = sampler.evaluate_agent(0, 50).mean_return
    sampler.shutdown()
    assert score > 0.95 * 15
