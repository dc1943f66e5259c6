"""Which CPUs do workers, action server and learner run on? A placement as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """CPUs of the processes of one run; empty means anywhere."""

    workers: tuple[tuple[int, ...], ...] = ()
    """CPU numbers of each worker, in their order."""
    server: tuple[int, ...] = ()
    """CPUs of the action server."""
    learner: tuple[int, ...] = ()
    """CPUs of the learner."""
    why: str = ""
    """How it came about, in a sentence."""
