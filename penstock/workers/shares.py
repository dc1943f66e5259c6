"""Which columns of a batch are whose, and what becomes of those whose worker died."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.batch import ROWS_AND_NEXT, SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.noise import env_seed
from penstock.core.spec import EnvSpec, describe
from penstock.core.tree import Tree, tree_assign, tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.pools.messages import last, place
from penstock.envs.pools.serial import MAKING, RESETTING


def even_split(n: int, parts: int) -> list[int]:
    """Sizes that differ by at most one, the larger ones first."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def part(group: slice, workers: int, w: int) -> slice | None:
    """The columns of worker w in a group; None if there are too few for it."""
    sizes = even_split(group.stop - group.start, workers)
    start = group.start + sum(sizes[:w])
    return slice(start, start + sizes[w]) if sizes[w] else None


def one_spec(specs: list[EnvSpec], config: EnvConfig) -> EnvSpec:
    """The one spec that all workers report. Raises ConfigError where they differ."""
    for spec in specs:
        if spec != specs[0]:
            raise ConfigError(
                f"{config.name} differs between workers: one shows {describe(specs[0].obs)} and takes {describe(specs[0].action)}, "
                f"another shows {describe(spec.obs)} and takes {describe(spec.action)}; make its spaces the same in every instance"
            )
    return specs[0]


def cut(batch: SampleBatch, slots: slice, row: int, null_action: Tree) -> int:
    """From this row on nothing in these columns is valid; the observation stands still, as of an idle slot.

    Returns:
        how many rows were lost.
    """
    T = batch.spec.T
    if row >= T:
        return 0
    tree_assign(batch.obs, (slice(row + 1, None), slots), batch.obs, (row, slots))
    tree_assign(batch.action, (slice(row, None), slots), null_action)
    batch.first[row + 1 :, slots] = False
    for x in (batch.reward, batch.terminated, batch.truncated, batch.valid):
        x[row:, slots] = 0
    for column in tree_leaves(batch.info.get("env")):
        column[row:, slots] = np.nan
    return (T - row) * (slots.stop - slots.start)


def carry_columns(source: SampleBatch, out: SampleBatch, slots: slice) -> None:
    """Row T of some columns of one batch becomes row 0 of the next, which may be the same buffer."""
    for name in ROWS_AND_NEXT:
        tree_assign(getattr(out, name), (0, slots), getattr(source, name), (-1, slots))


def at_work(name: str, seed: int, mark: Sequence[int], ledger: Sequence[int], action: Tree) -> str:
    """Which slot was at what, as a message begins: from the `mark` and the slot's line of the `ledger` of a SerialPool."""
    local, doing, _, first, tick, evaluation = mark
    slot, (episode, _, began) = first + local, ledger
    if doing == MAKING:
        return f"{'evaluation slot' if evaluation else 'slot'} {slot} of {name} in its construction"
    phase, step = ("reset", 0) if doing == RESETTING else ("step", tick - began - 1)
    episode_seed = env_seed(seed, slot, max(episode, 0), bool(evaluation))
    return place(name, bool(evaluation), slot, phase, episode, step, episode_seed) + last(action)
