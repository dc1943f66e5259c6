"""Shares of a batch: the columns of each worker, and invalidating those of a worker that died."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.core.batch import ROWS_AND_NEXT, SampleBatch
from penstock.core.noise import env_seed
from penstock.core.shared_memory import share
from penstock.core.tree import Tree, struct, tree_assign, tree_leaves
from penstock.envs.pools.messages import last, slot_at, slot_name
from penstock.envs.pools.pool import TABLE_WORDS, EpisodeLog
from penstock.envs.pools.settings import CALLING, CLOSING, MAKING, RESETTING
from penstock.envs.seats import Seating


class WatchedMemory(Protocol):
    """Memory that another process reads while this one's environments are at work, as `SharedMemory`."""

    @property
    def memory_fd(self) -> int | None:
        """Descriptor of the file that holds the batches; None: they are in this process's own memory."""
        ...

    @property
    def activity(self) -> Any:
        """Six words in which a SerialPool notes the activity of its environments."""
        ...

    def episode_table(self, B: int, evaluation: bool = False) -> Any:
        """[B, TABLE_WORDS] int64: the episode table of a SerialPool with B slots."""
        ...


class SharedMemory(NamedTuple):
    """Shared memory of a parent process, into which this process's sampler writes batches, episodes and activity."""

    memory_fd: int
    """Descriptor of the file that holds the batches."""
    activity: Any
    """Six words in which a SerialPool notes the activity of its environments."""
    episode_tables: tuple[int, int] = (-1, -1)
    """Descriptors of files for the episode table of its pool, and for that of a SerialPool's evaluations."""

    def episode_table(self, B: int, evaluation: bool = False) -> Any:
        """[B, TABLE_WORDS] int64: a SerialPool's episode table, at the start of its file, where the parent reads it."""
        zeros = np.zeros((B, TABLE_WORDS), np.int64)
        return share(self.episode_tables[evaluation], zeros, "the episode table")[1]


@struct
class LogAndTurns:
    """The part of environments of many agents that is in no batch, by the environments of one ProcessPool."""

    log: EpisodeLog
    """Episodes that ended since `bind`."""
    turns: Any
    """[E, 3] int64 of the turn that waits for an action: policy, column of its batch, row; policy -1: none."""

    @staticmethod
    def allocate(seating: Seating, E: int, T: int, info_keys: Sequence[str]) -> LogAndTurns:
        """Empty, for batches of T rows."""
        most = seating.most_episodes(T)
        return LogAndTurns(EpisodeLog.allocate(E, most, len(seating.agents), info_keys), np.full((E, 3), -1, np.int64))


def columns(envs: slice, seats: int) -> slice:
    """The columns of some environments in the batch of a policy with this many seats in each."""
    return slice(envs.start * seats, envs.stop * seats)


def even_split(n: int, parts: int) -> list[int]:
    """Sizes that differ by at most one, the larger ones first."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def part_of(group: slice, workers: int, w: int) -> slice | None:
    """The columns of worker w in a group; None if there are too few for it."""
    sizes = even_split(group.stop - group.start, workers)
    start = group.start + sum(sizes[:w])
    return slice(start, start + sizes[w]) if sizes[w] else None


def cut(batch: SampleBatch, slots: slice, row: int, null_action: Tree) -> int:
    """Invalidates these columns from a row on; the observation repeats, as in an idle slot.

    Returns:
        the number of rows lost.
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


def cut_turns(batch: SampleBatch, slots: slice, null_action: Tree) -> int:
    """Invalidates the rows after the last complete row of each of these columns of turns.

    Returns:
        the number of rows that were begun and are lost.
    """
    T = batch.spec.T
    for b in range(slots.start, slots.stop):
        whole = np.flatnonzero(batch.valid[:, b])
        cut(batch, slice(b, b + 1), int(whole[-1]) + 1 if len(whole) else 0, null_action)
    return T * (slots.stop - slots.start) - int(batch.valid[:, slots].sum())


def mark_ends(batch: SampleBatch, slots: slice) -> None:
    """Makes the rows valid in which agents ended, in columns of turns."""
    batch.valid[:, slots] |= batch.terminated[:, slots] | batch.truncated[:, slots]


def carry_columns(source: SampleBatch, out: SampleBatch, slots: slice) -> None:
    """Copies row T of some columns of one batch to row 0 of the next, which may be the same buffer."""
    for name in ROWS_AND_NEXT:
        tree_assign(getattr(out, name), (0, slots), getattr(source, name), (-1, slots))


def at_work(name: str, seed: int, activity: Sequence[int], episode_table: Sequence[int], action: Tree) -> str:
    """Start of a message about a worker that died: its slot and the activity of its environment.

    Args:
        activity, episode_table: as `SerialPool` keeps them; of the episode table the slot's line.
    """
    local, doing, _, first, tick, evaluation = activity
    slot, (episode, _, began, *_) = first + local, episode_table
    if doing in (MAKING, CLOSING):
        where = "its construction" if doing == MAKING else "close()"
        return f"{slot_name(name, bool(evaluation), slot)} in {where}"
    phase, step = ("reset", 0) if doing == RESETTING else ("step", tick - began - 1)
    phase = "a call of envs" if doing == CALLING else phase
    episode_seed = env_seed(seed, slot, max(episode, 0), bool(evaluation))
    return slot_at(name, bool(evaluation), slot, phase, episode, step, episode_seed) + last(action)
