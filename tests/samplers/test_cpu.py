"""Settings of CpuSampler that contradict each other, by the messages of all samplers with worker processes."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError


def test_groups_with_a_cpu_sampler_name_the_sampler_that_has_them() -> None:
    text = r"sampler\.groups=2 with CpuSampler.*use AlternatingSampler.*leave groups out"
    with pytest.raises(ConfigError, match=text):
        ps.CpuSampler(groups=2)
    with pytest.raises(ConfigError, match=text):
        ps.CpuSampler(T=8, B=2, workers=2, groups=2)
    with pytest.raises(ConfigError, match=text):
        ps.override(ps.Experiment("CartPole-v1", ps.PPO(), ps.CpuSampler()), {"sampler.groups": 2})
    assert ps.CpuSampler(groups=1) == ps.CpuSampler()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.CpuSampler(8, 2, workers=4), r"leaves 2 of 4 workers without a slot; use B>=4 or workers<=2"),
        (lambda: ps.CpuSampler(0, 2, workers=1), "each must be at least 1"),
        (lambda: ps.CpuSampler(8, 4, 2, step_timeout_s=0), "both must be positive"),
        (lambda: ps.CpuSampler(8, 4, 2, affinity=ps.Placement(workers=((0,),))), "places 1 workers"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
