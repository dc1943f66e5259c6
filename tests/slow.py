"""Rows of a parametrised test that run with `-m slow`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """The rows, tuples of as many values as the test takes or one value each, marked slow."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rows]
