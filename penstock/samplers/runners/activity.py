"""Activity of a runner's environments in its note: slot, step and seed of the one at work, also while a call hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import penstock.actors.note as note
from penstock.envs.pools.pool import TABLE_WORDS
from penstock.workers.control import ACTIVITY_WORDS
from penstock.workers.shares import at_work

_ACTIVITY = slice(1, 1 + ACTIVITY_WORDS)
_SEED = _ACTIVITY.stop
"""Place of the seed of the evaluation that was opened last."""
_TABLES = slice(_SEED + 1, note.WORDS * 3 // 4), slice(note.WORDS * 3 // 4, note.WORDS)
"""Places of the episode tables of training and evaluation, each after its number of slots."""


class Activity:
    """Words of this process's note as the memory that a SerialSampler notes its activity in."""

    memory_fd = None

    def __init__(self, words: note.Words) -> None:
        self._words = words
        self.activity = words.data[_ACTIVITY]  # whose items are set faster than an array's

    def episode_table(self, B: int, evaluation: bool = False) -> Any:
        """[B, TABLE_WORDS] int64 in the note, or beside it if there are too many slots."""
        room, size = self._words[_TABLES[evaluation]], B * TABLE_WORDS
        fits = size < len(room)
        room[0] = B if fits else 0
        return (room[1 : 1 + size] if fits else np.zeros(size, np.int64)).reshape(B, TABLE_WORDS)


def note_evaluation(seed: int) -> None:
    """Notes the seed of an evaluation that is about to begin, where another process reads it."""
    words = note.watched()
    if words is not None:
        words[_SEED] = seed % 2**63


def described(words: Sequence[int], name: str, seed: int) -> str:
    """The environment at work in words; "" where there is none, or the runner's sampler does not say.

    Args:
        words: of a runner's note. name: of the environment. seed: of the run.
    """
    slot, doing, _, _, _, evaluation = activity = words[_ACTIVITY]
    B, *episode_table = words[_TABLES[bool(evaluation)]]
    line = episode_table[slot * TABLE_WORDS : (slot + 1) * TABLE_WORDS]
    return at_work(name, words[_SEED] if evaluation else seed, activity, line, None) if doing and slot < B else ""
