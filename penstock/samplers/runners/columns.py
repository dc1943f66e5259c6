"""Columns of runners in a joint batch: which runner each belongs to, and the filler for fragments that are missing."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree, tree_assign, tree_leaves
from penstock.envs.pools.pool import EpisodeLog, Group
from penstock.envs.seats import Seating
from penstock.workers.shares import cut


def side_by_side(seating: Seating, B: int) -> tuple[Group, ...]:
    """A group for each policy, with the columns of all of its seats in B slots."""
    return tuple(Group(policy, slice(0, B * n)) for policy, n in enumerate(seating.seats))


def log_of(seating: Seating, B: int, T: int, info_keys: Sequence[str]) -> EpisodeLog | None:
    """The log of batches of T rows of many agents in B slots; None where one agent acts."""
    most, agents = seating.most_episodes(T), len(seating.agents)
    return EpisodeLog.allocate(B, most, agents, info_keys) if seating.many else None


def stand_still(batch: SampleBatch, row: dict[str, Tree] | None, null_action: Tree) -> int:
    """Fills the columns of a runner that delivers nothing: its last row again and again, nothing valid.

    Args:
        batch: views of these columns. row: as `last_row` returns it; None before the first batch.

    Returns:
        The number of rows lost.
    """
    for name, leaves in (row or {}).items():
        tree_assign(getattr(batch, name), 0, leaves)
    for x in tree_leaves((batch.state, {key: column for key, column in batch.info.items() if key != "env"})):
        x[...] = 0
    return cut(batch, slice(0, batch.spec.B), 0, null_action)


def after_standing_still(row: dict[str, Tree], null_action: Tree) -> None:
    """Makes a last row, as `last_row` returns it, that of a batch in which its columns stand still."""
    row["first"][...], row["prev_reward"][...] = False, 0
    tree_assign(row["prev_action"], slice(None), null_action)
