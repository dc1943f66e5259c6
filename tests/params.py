"""Parameters of tests, most of which run only where slow tests are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def slow_but(quick: str | list[str], cases: Mapping[str, Any] | Iterable[str]) -> list[Any]:
    """The cases as parameters by their names; all but those named in `quick` (space between) are slow.

    Args:
        cases: value of each name, a tuple where there are many parameters; or names, each its own value.
    """
    quick = quick.split() if isinstance(quick, str) else quick
    cases = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    unknown = set(quick) - set(cases)
    assert not unknown, f"{sorted(unknown)} are none of {sorted(cases)}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), id=name,
            marks=[] if name in quick else [pytest.mark.slow],
        )
        for name, value in cases.items()
    ]  # fmt: skip


def pairs_first(first: Mapping[str, Any], second: Mapping[str, Any], third: Mapping[str, Any]) -> list[Any]:
    """The product of three parameters, of which a cover of all pairs of values is quick and the rest slow.

    A Latin square: the third value follows from the first two. The third has the fewest values, which makes the cover one.
    """
    assert len(third) <= min(len(first), len(second))
    cases: dict[str, Any] = {}
    quick: list[str] = []
    for i, (a, x) in enumerate(first.items()):
        for j, (b, y) in enumerate(second.items()):
            for k, (c, z) in enumerate(third.items()):
                cases[name := f"{a}-{b}-{c}"] = x, y, z
                if k == (i + j) % len(third):
                    quick.append(name)
    return slow_but(quick, cases)
