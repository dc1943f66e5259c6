"""Environments of many agents in worker processes: the same batches wherever they step and act, and faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.samplers.many import Rows, agents_of, bits
from tests.samplers.test_many_agents import DEALT, THREE, echoes

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

B = 5
PLACED: dict[str, Any] = {
    "cpu-1": lambda T: ps.CpuSampler(T, B, workers=1),
    "cpu-3": lambda T: ps.CpuSampler(T, B, workers=3),
    "gpu-2": lambda T: ps.GpuSampler(T, B, workers=2),
    "alternating-2": lambda T: ps.AlternatingSampler(T, B, workers=2),
    "no-overlap-1": lambda T: ps.NoOverlapAlternatingSampler(T, B, workers=1),
    "gpu-3-of-3": lambda T: ps.GpuSampler(T, B, workers=1, groups=3),
}


def outcome(settings: Any, config: Any, batches: int, evaluate: bool) -> list[Any]:
    """Bits of batches, episodes and evaluations."""
    sampler = settings.build(config, 3, first_slot=2)
    try:
        sampler.initialize(agents_of(sampler))
        found: list[Any] = []
        for k in range(batches):
            batch, episodes = sampler.obtain_samples(k)
            found.append((bits(batch), batch.env_steps, repr(episodes.to_plain())))
            if evaluate and k % 3 == 1:
                found.append(repr(sampler.evaluate_agent(k, 5, deterministic=k % 2 == 0).to_plain()))
    finally:
        sampler.shutdown()
    return found


@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_where_work_is_placed_changes_no_bit(kind: str) -> None:
    config, T = echoes(kind, THREE), 6
    expected = outcome(ps.SerialSampler(T, B), config, 6, True)
    for name, settings in PLACED.items():
        found = outcome(settings(T), config, 6, True)
        for k, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert one == other, (name, k)
