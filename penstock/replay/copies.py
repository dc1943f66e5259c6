"""Copies of a replay. Its arrays have views of one another, which copies one by one would lose."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.replay.replay import Replay


def copied(replay: Replay) -> Replay:
    """A replay of its own with the same rows, in memory.

    Raises:
        ConfigError: the rows lie in shards or with other learners, or do not fit into memory a second time.
    """
    settings = replay.settings
    if settings.shards or replay.partition is not None:
        where = "in shards" if settings.shards else "of several learners"
        raise ConfigError(
            f"a replay {where} cannot be copied; with run.learner_threads='auto', which times a copy, give a number"
        )
    made = type(replay)(
        replay.spec,
        replace(settings, dir=None),
        copy.deepcopy(replay.view),
        info=replay.info,
        priority_fn=replay.priority_fn,
        state=replay.state,
        exact=replay.exact,
    )
    made.least = replay.least
    if replay.prepared is not None:
        made.prepare(*replay.prepared)
        made.load_state_dict(copy.deepcopy(replay.state_dict()), replay.arrays())
    return made
