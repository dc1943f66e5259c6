"""Values of MLflow's API."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class RunStatus:
    RUNNING = 1

    @staticmethod
    def to_string(status: int) -> str:
        return {1: "RUNNING"}[status]
