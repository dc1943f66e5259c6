"""Parameters of tests, most of which run only where slow tests are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def slow_but(quick: str, cases: Mapping[str, Any]) -> list[Any]:
    """The cases as parameters by their names; those whose names do not stand in `quick` (space between) are slow.

    Args:
        cases: value of each name, a tuple where there are many parameters.
    """
    unknown = set(quick.split()) - set(cases)
    assert not unknown, f"{sorted(unknown)} are none of {sorted(cases)}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), id=name,
            marks=[] if name in quick.split() else [pytest.mark.slow],
        )
        for name, value in cases.items()
    ]  # fmt: skip
