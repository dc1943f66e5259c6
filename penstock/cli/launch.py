"""`penstock launch ALGO --env ID --grid ... --seeds ...`: a sweep, the short form of `penstock tune --grid`."""

from __future__ import annotations

from penstock.cli import tune


def run(argv: list[str]) -> int:
    """Launches a sweep by the arguments; returns the exit code."""
    return tune.run(argv, "launch")
