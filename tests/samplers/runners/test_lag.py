"""`sampler/lag` is of rows in every sampler: turns that stay open over a batch are older than others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.batch import SampleBatch
from penstock.envs.toy import EchoTurns

PPO = ps.PPO(minibatch=64, epochs=1, net=ps.Net(hidden=(8,)))
TWO = ps.Policies({"a": PPO, "b": PPO}, {"agent_0": "a", "agent_1": "b", "agent_2": "b"})


def lags(settings: Any) -> list[tuple[float, ...]]:
    """Mean, min and max of several batches as the sampler logs them, held against their rows."""
    live = settings.build(TWO.seat(EchoTurns), seed=0)
    try:
        policies = TWO.build(live.specs)
        live.initialize(policies.agents)
        out: list[tuple[float, ...]] = []
        for itr in range(6):
            batch, _ = live.obtain_samples(itr)
            parts: list[SampleBatch] = [*batch.values()]
            ages = itr - np.concatenate([part.version[part.valid] for part in parts])
            found = live.metrics()
            out.append(tuple(found[f"sampler/lag{kind}"] for kind in ("", "_min", "_max")))
            assert out[-1] == (ages.mean(), ages.min(), ages.max())
            ps.train_one_step(policies, batch)
        return out
    finally:
        live.shutdown()


def test_runners_count_the_lag_of_rows() -> None:
    runners = ps.RunnerSampler(runners=1, inner=ps.SerialSampler(T=4, B=2), backend="in-process", depth=1)
    assert any(low < mean < high for mean, low, high in lags(runners))


@pytest.mark.slow
def test_runners_and_an_asynchronous_sampler_count_alike() -> None:
    inner = ps.SerialSampler(T=4, B=2)
    runners = ps.RunnerSampler(runners=1, inner=inner, backend="in-process", depth=1)
    assert lags(runners) == lags(ps.AsyncSampler(inner=inner, depth=1))
