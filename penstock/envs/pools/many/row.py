"""One row of environments whose agents act at once: views of the batches that it goes to, and what it will hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.core.tree import Tree
from penstock.envs.pools.many.parallel import AgentStep


class RowViews(NamedTuple):
    """Views that a step of one row reads and writes in one policy's batch."""

    obs: Tree
    """Of the row that comes next."""
    action: Tree
    reward: Any
    terminated: Any
    truncated: Any
    valid: Any
    info: dict[str, Any]
    flat: Tree
    """`obs` for `row_writer`."""
    before: Tree
    """Observations of this row."""
    first: Any
    """Of the row that comes next."""


class Row:
    """What a row holds, seat by seat, before it is written."""

    def __init__(self, policies: int) -> None:
        self.obs: list[list[Any]] = [[] for _ in range(policies)]
        self.rewards: list[list[Any]] = [[] for _ in range(policies)]
        self.flags: list[Any] = []
        """Of agents that must go on."""
        self.partly: list[int] = []
        """Environments in which not every seat has an agent that acted and goes on."""
        self.invalid: list[list[int]] = [[] for _ in range(policies)]
        """Columns of each policy whose row is not valid."""
        self.came: list[list[int]] = [[] for _ in range(policies)]
        """Columns of each policy in which an agent comes."""
        self.ended: list[list[tuple[int, AgentStep]]] = [[] for _ in range(policies)]
        self.over: list[int] = []
