"""Columns of runners in the batches of all of them: whose they are, and what stands there where nothing arrives."""

from __future__ import annotations

from penstock.core.batch import SampleBatch
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_assign, tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.pools.many.hosting import most_episodes
from penstock.envs.pools.pool import EpisodeLog, Group
from penstock.samplers.runners.runners import Runners
from penstock.workers.shares import cut


def seated(
    runners: Runners, config: EnvConfig, B: int, T: int
) -> tuple[tuple[EnvSpec, ...], tuple[Group, ...], EpisodeLog | None]:
    """Specs and groups of the policies of B slots, and of many agents the log of batches of T rows."""
    seating = config.seating
    if seating is None:
        return (runners.spec,), (Group(0, slice(0, B)),), None
    groups = tuple(Group(policy, slice(0, B * n)) for policy, n in enumerate(seating.seats))
    log = EpisodeLog.allocate(B, most_episodes(seating, T), len(seating.agents), config.all_info_keys)
    return seating.specs, groups, log


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
