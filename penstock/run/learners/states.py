"""States of samplers of some slots each, put together to that of one sampler of all slots, and taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from penstock.core.batch import AnyBatch, SampleBatch, batches_of
from penstock.core.errors import CheckpointError
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.pools.pool import PER_SLOT
from penstock.samplers.episodes import Episodes, join_episodes

State = dict[str, Any]
_BY_RANK = "by_rank"


def joined(states: Sequence[State], slots: Sequence[slice], blank: AnyBatch) -> State:
    """The state of one sampler of all slots, from those of samplers of consecutive ones.

    A sampler whose state is of a form of its own is kept as `by_rank`, and goes on with as many learners only.

    Args:
        blank: any batch of one of them, for the layout of batches that wait.
    """
    first = states[0]
    if "pool" in first:
        return _live(states)
    if "begun" in first:  # of a dataset: every sampler deals the episodes of all slots
        agent_state = _side_by_side([x["agent_state"] for x in states])
        return {**first, "steps": sum(x["steps"] for x in states), "agent_state": agent_state, "stats": _stats(states)}
    if "released" in first:
        return _ahead(states, slots, blank)
    return {_BY_RANK: list(states)}


def part(state: State, rank: int, slots: Sequence[slice], blank: AnyBatch) -> State:
    """The state of the sampler of `slots[rank]` from that of one of all slots.

    Raises:
        CheckpointError: it is of another number of slots, or of learners where it cannot be divided.
    """
    own, total = slots[rank], slots[-1].stop
    if _BY_RANK in state:
        if len(state[_BY_RANK]) != len(slots):
            raise CheckpointError(
                f"the checkpoint holds the samplers of {len(state[_BY_RANK])} learners, whose states cannot be divided "
                f"anew; this run has run.learners={len(slots)}: go on with as many"
            )
        return state[_BY_RANK][rank]
    held = _slots_of(state)
    if held not in (None, total):
        raise CheckpointError(f"the checkpoint holds {held} slots; this run has sampler.B={total} over all learners")
    if "pool" in state:
        return _part_of_live(state, own, rank)
    if "begun" in state:
        steps = state["steps"] if rank == 0 else 0
        agent_state = _seats(state["agent_state"], own, total)
        return {**state, "steps": steps, "agent_state": agent_state, "stats": _part_of_stats(state, own)}
    if "inner" not in state:
        return state  # nothing was collected yet
    waiting = {
        itr: {
            "rows": [_along(x, axis, own, total) for x, axis in zip(kept["rows"], _axes(blank))],
            "episodes": _of_slots(Episodes(**kept["episodes"]), own).to_plain(),
        }
        for itr, kept in state["waiting"].items()
    }
    inner = part(state["inner"], rank, slots, blank)
    return {**state, "inner": inner, "waiting": waiting, "opened": state["opened"][own]}


def _slots_of(state: State) -> int | None:
    """The slots that a state is of; None if nothing was collected yet."""
    if "pool" in state:
        return len(state["pool"]["episode"]) if state["collected"] else None
    if "begun" in state:
        return len(state["stats"]["return"]) if state["begun"] else None
    return len(state["opened"]) if "opened" in state else None


def _live(states: Sequence[State]) -> State:
    pools = [x["pool"] for x in states]
    faults: dict[str, int] = {}
    for pool in pools:
        for kind, count in pool["faults"].items():
            faults[kind] = faults.get(kind, 0) + count
    pool = {name: [x for one in pools for x in one[name]] for name in PER_SLOT}
    return {
        **states[0],
        "pool": {**pools[0], **pool, "faults": faults, "restarts": max(x["restarts"] for x in pools)},
        "row": _side_by_side([x["row"] for x in states]),
        "agent_states": _side_by_side([x["agent_states"] for x in states]),
        "stats": _stats(states),
        "journal": [slot for x in states for slot in x["journal"]],
        "out_of_bounds": _sum([x["out_of_bounds"] for x in states]),
    }


def _part_of_live(state: State, own: slice, rank: int) -> State:
    if not state["collected"]:
        return state
    total = len(state["pool"]["episode"])
    pool = {**state["pool"], **{name: list(state["pool"][name])[own] for name in PER_SLOT}}
    return {
        **state,
        "pool": pool if rank == 0 else {**pool, "faults": {}},
        "row": _seats(state["row"], own, total),
        "agent_states": _seats(state["agent_states"], own, total),
        "stats": _part_of_stats(state, own),
        "journal": list(state["journal"])[own],
        "out_of_bounds": tree_map(lambda x: x if rank == 0 else 0, state["out_of_bounds"]),
    }


def _ahead(states: Sequence[State], slots: Sequence[slice], blank: AnyBatch) -> State:
    first = states[0]
    if "inner" not in first:
        return first
    waiting: State = {}
    for itr in first["waiting"]:
        kept = [x["waiting"][itr] for x in states]
        rows = [np.concatenate(xs, axis) for *xs, axis in zip(*(x["rows"] for x in kept), _axes(blank))]
        found = [numbered(Episodes(**x["episodes"]), at.start) for x, at in zip(kept, slots)]
        waiting[itr] = {"rows": rows, "episodes": join_episodes(found).to_plain()}
    inner = joined([x["inner"] for x in states], slots, blank)
    return {**first, "inner": inner, "waiting": waiting, "opened": np.concatenate([x["opened"] for x in states])}


def numbered(episodes: Episodes, first: int) -> Episodes:
    """The episodes, their slots numbered from `first`."""
    return replace(episodes, slot=episodes.slot + first)


def _of_slots(episodes: Episodes, own: slice) -> Episodes:
    mine = (episodes.slot >= own.start) & (episodes.slot < own.stop)
    return numbered(episodes.at(mine), -own.start)


def _along(x: np.ndarray[Any, Any], axis: int, own: slice, total: int) -> np.ndarray[Any, Any]:
    """The columns of some of `total` environments along an axis."""
    seats = x.shape[axis] // total
    at = slice(own.start * seats, own.stop * seats)
    return x[at] if axis == 0 else x[:, at]


def _axes(blank: AnyBatch) -> list[int]:
    """Of each leaf of a batch, policy by policy, the axis of its slots."""
    axes: list[int] = []
    for batch in batches_of(blank).values():
        named: Any = {f.name: getattr(batch, f.name) for f in fields(batch)}  # pyright: ignore[reportArgumentType]
        of = {name: tree_map(lambda _, name=name: 0 if name == "state" else 1, x) for name, x in named.items()}
        axes += [int(axis) for axis in tree_leaves(SampleBatch(**of))]
    return axes


def _side_by_side(trees: Sequence[Tree]) -> Tree:
    return tree_map(lambda *xs: np.concatenate(xs, 0), *trees)


def _seats(tree: Tree, own: slice, total: int) -> Tree:
    """The columns of some of `total` environments, of which each has as many as a policy has seats: one, or more."""
    return tree_map(lambda x: x[own.start * (len(x) // total) : own.stop * (len(x) // total)], tree)


def _sum(counts: Sequence[Any]) -> Any:
    """The sum of numbers, or of those of each policy."""
    return tree_map(lambda *xs: sum(xs), *counts)


def _stats(states: Sequence[State]) -> State:
    stats = [x["stats"] for x in states]
    if not stats[0]:  # of many agents, whose pool keeps the sums
        return {}
    names = dict.fromkeys(name for x in stats for name in x["columns"])
    columns = {
        name: np.concatenate([x["columns"].get(name, np.full(len(x["return"]), np.nan)) for x in stats])
        for name in names
    }
    whole = {name: np.concatenate([x[name] for x in stats]) for name in ("return", "length", "discounted")}
    return {**whole, "columns": columns}


def _part_of_stats(state: Mapping[str, Any], own: slice) -> State:
    stats = state["stats"]
    if not stats:
        return {}
    columns = {name: x[own] for name, x in stats["columns"].items()}
    return {**{name: stats[name][own] for name in ("return", "length", "discounted")}, "columns": columns}
