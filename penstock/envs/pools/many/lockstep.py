"""A row of environments with agents that act at once: the views that write it, and its values before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree, tree_map
from penstock.envs.pools.many.parallel import AgentStep
from penstock.envs.pools.many.rows import column_of, writable
from penstock.envs.pools.pool import row_views


class RowViews(NamedTuple):
    """Views that a step of one row reads and writes in one policy's batch."""

    obs: Tree
    """Observations of the next row."""
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
    """`first` of the next row."""


class RowDefaults:
    """Default values of a row, seat by seat, before it is written."""

    def __init__(self, policies: int) -> None:
        self.obs: list[list[Any]] = [[] for _ in range(policies)]
        self.rewards: list[list[Any]] = [[] for _ in range(policies)]
        self.partly: list[int] = []
        """Environments in which not every seat has an agent that acted and goes on."""
        self.invalid: list[tuple[int, int]] = []
        """Policy and column where the row is not valid."""
        self.came: list[tuple[int, int]] = []
        """Policy and column where an agent comes."""
        self.ended: list[tuple[int, AgentStep]] = []
        """Environment and last step of an agent."""
        self.over: list[int] = []

    def seat(self, e: int, steps: Sequence[AgentStep], seats: Sequence[int], views: Sequence[RowViews]) -> None:
        """Adds what became of an environment's agents, seat by seat of each policy."""
        at = {(step.policy, step.column): step for step in steps}
        for p, n in enumerate(seats):
            for b in range(e * n, e * n + n):
                step = at.get((p, b))
                if step is None:
                    self.invalid.append((p, b))
                    self.obs[p].append(column_of(views[p].before, b))
                    self.rewards[p].append(0.0)
                    continue
                self.obs[p].append(step.obs)
                self.rewards[p].append(step.reward)
                if not step.valid:
                    self.invalid.append((p, b))
                    self.came.append((p, b))
                elif step.terminated or step.truncated:
                    self.ended.append((e, step))


def row_views_of(out: SampleBatch, spec: Tree, t: int) -> RowViews:
    """The views of row t of a batch, made once for each buffer. spec: of its observations."""
    views = row_views(out, t)
    return RowViews(*views, writable(views[0], spec), tree_map(lambda x: x[t], out.obs), out.first[t + 1])
