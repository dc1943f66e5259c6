"""Settings of GpuSampler and its alternating forms that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.GpuSampler(8, 6, workers=8, groups=2), r"leaves 10 of 8 workers x 2 groups without a slot; use B>=16 or workers<=3"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
