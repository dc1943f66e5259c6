"""The moves of an open turn-based episode, in order, and its replay in a resumed run."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.tree import tree_leaves

_FLOAT64 = struct.Struct("d")


class TurnJournal:
    """The moves of one episode, and a digest of every turn's observation and reward; at most `limit` moves."""

    __slots__ = ("_limit", "_moves", "digest")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._moves: list[tuple[int, Any]] = []  # number of the agent, and its action as the environment took it
        self.digest = 0

    def add(self, k: int, action: Any) -> None:
        """A move of agent k."""
        if len(self._moves) <= self._limit:
            self._moves.append((k, action))

    def look(self, obs: Any, reward: Any) -> None:
        """A turn: the agent's observation, and its reward since its last turn."""
        if self._limit:
            self.digest = zlib.crc32(_FLOAT64.pack(reward), _crc(obs, self.digest))

    @property
    def moves(self) -> list[tuple[int, Any]]:
        """(number of the agent, its action) of every move."""
        return self._moves

    def to_plain(self) -> dict[str, Any] | None:
        """Plain data; None if there were too many moves."""
        if len(self._moves) > self._limit:
            return None
        by_agent: dict[int, list[list[Any]]] = {}
        for k, action in self._moves:
            by_agent.setdefault(k, []).append(tree_leaves(action))
        return {
            "order": np.array([k for k, _ in self._moves], np.int64),
            "actions": [[k, *(np.stack(x) for x in zip(*rows))] for k, rows in by_agent.items()],
            "digest": self.digest,
        }


def replay_turns(
    env: Any,
    journal: TurnJournal,
    plain: Mapping[str, Any],
    action_of: Callable[[str, list[Any]], Any],
    agents: Sequence[str],
    before_move: Callable[[int], None],
) -> bool:
    """Plays the moves that `to_plain` described in an environment that was reset; True if all is as it was, to the bit.

    It ends where an agent is to act, whose turn is part of the digest.

    Args:
        action_of: (agent, leaves of an action) -> the action. agents: `possible_agents`. before_move: called with the
            number of moves so far.
    """
    actions: list[Any] = plain["actions"]
    rows: dict[int, Any] = {k: iter(list(zip(*leaves))) for k, *leaves in actions}
    try:
        order: list[int] = plain["order"].tolist()
        for moves, k in enumerate(order):
            if not _to_turn(env, journal) or env.agent_selection != agents[k]:
                return False
            before_move(moves)
            action = action_of(agents[k], [x[()] for x in next(rows[int(k)])])
            journal.add(k, action)
            env.step(action)
        return _to_turn(env, journal) and journal.digest == plain["digest"]
    except Exception:
        return False  # the episode went well before, so this is one more way of not being reproducible


def _to_turn(env: Any, journal: TurnJournal) -> bool:
    """Goes on to the turn of an agent that is to act; False if there is none."""
    while env.agents:
        obs, reward, terminated, truncated, _ = env.last()
        journal.look(obs, reward)
        if not (terminated or truncated):
            return True
        env.step(None)
    return False


def _crc(obs: Any, n: int) -> int:
    # An exact dict is known at once.
    parts = obs.values() if isinstance(obs, (dict, Mapping)) else obs if isinstance(obs, tuple) else (obs,)
    for x in parts:
        if x.__class__ is np.ndarray:
            try:
                n = zlib.crc32(x, n)
            except ValueError:  # it is not contiguous, and asking first takes as long as the sum
                n = zlib.crc32(x.tobytes(), n)
        elif isinstance(x, (dict, Mapping, tuple)):
            n = _crc(x, n)
        elif isinstance(x, (np.generic, bool, int, float)):
            n = zlib.crc32(np.asarray(x).tobytes(), n)  # anything else is refused where it is written
    return n
