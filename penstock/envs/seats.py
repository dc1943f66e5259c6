"""Seats: which policy plays which agent, and in which column of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from penstock.core.spec import EnvSpec

PolicyMap: TypeAlias = "Mapping[str, str] | Callable[[str, int, int], str]"
"""Policy id by agent, or a function (agent, number of the episode, its seed) -> policy id, pure, asked at reset."""


@dataclass(frozen=True)
class AgentSpecs:
    """What an environment of many agents says of itself."""

    specs: Mapping[str, EnvSpec]
    """Observation and action of each of its `possible_agents`, in their order."""
    turns: bool
    """Agents act one after the other (AEC), not all at once (Parallel)."""


@dataclass(frozen=True)
class Seating:
    """The seats of each policy in every environment; a column of a policy's batch is one seat of one environment.

    Seat i of policy p in environment e is column `e * seats[p] + i`.
    """

    policies: tuple[str, ...]
    seats: tuple[int, ...]
    """Seats of each policy in one environment."""
    specs: tuple[EnvSpec, ...]
    """Of each policy; `spec.agents` is its number of seats."""
    agents: tuple[str, ...]
    """The environment's `possible_agents`."""
    turns: bool
    mapping: PolicyMap
