"""States of samplers that are divided by slots: that of a LiveSampler, and what all such samplers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from penstock.core.errors import CheckpointError
from penstock.core.tree import Tree, tree_map
from penstock.envs.pools.calls import CallRecord, from_plain, plain
from penstock.envs.pools.pool import PoolState
from penstock.samplers.trackers.slots import EpisodeStats, Journal

State = dict[str, Any]


@dataclass(frozen=True)
class LiveState:
    """The state of a LiveSampler of B slots between two batches; trees and counts are by policy id."""

    collected: bool
    """True if a batch was filled; else the other fields have no meaning."""
    pool: PoolState
    row: Tree
    """[B, ...] inputs in the last row, as `last_row` returns them."""
    agent_states: Tree
    """[B, ...] recurrent states after that row; None: the states before an episode."""
    stats: State
    """State of an EpisodeStats; empty with many agents, as their pool keeps the sums."""
    journal: Sequence[Any]
    """State of a Journal; empty where nothing is kept to replay."""
    out_of_bounds: Tree
    """Number of observations outside their space, by policy id."""
    evaluation_calls: Sequence[CallRecord] = ()
    """The calls that every evaluation environment has had."""

    @classmethod
    def resetting(
        cls,
        pool: PoolState,
        collected: bool,
        row: Tree,
        out_of_bounds: Tree,
        evaluation_calls: Sequence[CallRecord] = (),
    ) -> LiveState:
        """The state of slots that lost their open episodes, with last row `row`; `PoolState.resetting` makes `pool`."""
        B = len(pool.episode)
        stats, journal = EpisodeStats(B, 0.0).state_dict(), Journal(B, 0).state_dict()
        return cls(collected, pool, row, None, stats, journal, out_of_bounds, evaluation_calls)

    def to_plain(self) -> State:
        """Plain data for a checkpoint; `LiveState.from_plain` is the inverse."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "evaluation_calls"}
        calls = {"evaluation_calls": plain([self.evaluation_calls])[0]} if self.evaluation_calls else {}
        return {**own, "pool": self.pool.to_plain(), **calls}

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> LiveState:
        """The state that `to_plain` described."""
        (calls,) = from_plain([state.get("evaluation_calls", ())])
        known: dict[str, Any] = {**state, "pool": PoolState.from_plain(state["pool"]), "evaluation_calls": calls}
        return cls(**known)

    @classmethod
    def join_states(cls, states: Sequence[State]) -> State:
        """Joins plain states of samplers of consecutive slots into one of a sampler of all slots: see `Divisible`."""
        parts = [cls.from_plain(x) for x in states]
        stats = [x.stats for x in parts]
        return cls(
            parts[0].collected,
            PoolState.join([x.pool for x in parts]),
            side_by_side([x.row for x in parts]),
            side_by_side([x.agent_states for x in parts]),
            EpisodeStats.join_states(stats) if stats[0] else {},
            [slot for x in parts for slot in x.journal],
            tree_map(lambda *xs: sum(xs), *(x.out_of_bounds for x in parts)),
            parts[0].evaluation_calls,
        ).to_plain()

    @classmethod
    def split_state(cls, state: State, slots: Sequence[slice]) -> list[State]:
        """Inverse of `join_states`; the first state gets the counts since the run began.

        Raises:
            CheckpointError: the state has another number of slots.
        """
        if not state["collected"]:
            calls = state["pool"].get("calls", [])
            return [{**state, "pool": {**state["pool"], "calls": calls[at]}} for at in slots]
        full = cls.from_plain(state)
        total, journal = len(full.pool.episode), list(full.journal)
        check_slots(total, slots)
        trees = {"row": full.row, "agent_states": full.agent_states, "stats": full.stats}
        none = tree_map(lambda _: 0, full.out_of_bounds)
        return [
            cls(
                True,
                pool,
                **columns_of(trees, at, total),
                journal=journal[at],
                out_of_bounds=none if at.start else full.out_of_bounds,
                evaluation_calls=full.evaluation_calls,
            ).to_plain()
            for pool, at in zip(full.pool.split(slots), slots)
        ]


def check_slots(total: int, slots: Sequence[slice]) -> None:
    """Raises CheckpointError unless a state of `total` slots can be divided into these."""
    if total != slots[-1].stop:
        raise CheckpointError(
            f"the checkpoint holds {total} slots; this run has sampler.B={slots[-1].stop} over all learners"
        )


def side_by_side(trees: Sequence[Tree]) -> Tree:
    """Trees of arrays [b, ...] as one of arrays [sum of b, ...]."""
    return tree_map(lambda *xs: np.concatenate(xs), *trees)


def columns_of(tree: Tree, slots: slice, total: int, axis: int = 0) -> Tree:
    """Views of the columns of `slots`, out of `total` slots on an axis; each seat of a slot is a column."""

    def columns(x: Any) -> Any:
        seats = x.shape[axis] // total
        at = slice(slots.start * seats, slots.stop * seats)
        return x[(slice(None),) * axis + (at,)]

    return tree_map(columns, tree)
