"""Journals of environments whose agents act at once, and the replay of their open episodes in a resumed run."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.errors import PenstockError
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_structure, tree_unflatten
from penstock.envs.pools.many.parallel import AgentStep, ParallelEnvs
from penstock.envs.pools.values import write_tree


class ParallelJournal:
    """The actions of recent batches, back to the opening of the oldest open episode, and digests of the answers.

    An environment whose episode has more than `limit` steps cannot be replayed, and its actions are forgotten.
    """

    def __init__(self, seats: Sequence[int], E: int, limit: int) -> None:
        self._seats, self._limit = seats, limit
        self._chunks: deque[tuple[int, list[list[Any]]]] = (
            deque()
        )  # number of the first row; by policy leaves [T, B, *A]
        self._rows = 0
        self._start: list[int | None] = [None] * E  # first row of the episode in the chunks; None: not known
        self._earlier: list[list[list[Any]] | None] = [None] * E  # by policy leaves [L, seats, *A] from before them
        self._unseen = [0] * E  # steps that no batch shows
        self._digest: list[list[int]] = [[] for _ in range(E)]
        self._from = [0] * E  # row of this batch from which on the digest is to go

    def open(self, e: int, row: int) -> None:
        """An episode of environment e opens, `row` of the batch being its first."""
        self._start[e], self._earlier[e], self._unseen[e] = self._rows + row, None, 0
        self._digest[e], self._from[e] = [], row

    def before_row_0(
        self, e: int, actions: Mapping[str, Tree], where: Sequence[tuple[str, int, int]], outs: Sequence[SampleBatch]
    ) -> None:
        """A step before the first batch."""
        taken: list[list[Any]] = []
        for p, (n, out) in enumerate(zip(self._seats, outs)):
            row = [np.zeros((1, n, *x.shape[2:]), x.dtype) for x in tree_leaves(out.action)]
            for agent, q, b in where:
                if p == q:
                    for x, y in zip(row, tree_leaves(actions[agent])):
                        x[0, b - e * n] = y
            taken.append(row)
        earlier = self._earlier[e]
        self._earlier[e] = taken if earlier is None else _joined([earlier, taken])
        self._unseen[e] += 1

    def record(self, outs: Sequence[SampleBatch]) -> None:
        """Takes a batch that is whole."""
        if not self._limit:
            return
        T = outs[0].spec.T
        self._chunks.append((self._rows, [[x.copy() for x in tree_leaves(out.action)] for out in outs]))
        views = [([x[1:] for x in tree_leaves(out.obs)], out.reward, out.valid) for out in outs]
        self._rows += T
        for e, start in enumerate(self._start):
            if start is None:
                continue
            if self._rows - start > self._limit:
                self._start[e] = None
                continue
            digest, since = self._digest[e] or [0] * sum(len(obs) + 1 for obs, _, _ in views), self._from[e]
            i = 0
            for n, (obs, reward, valid) in zip(self._seats, views):
                own = slice(since, None), slice(e * n, e * n + n)
                rows = valid[own]
                for x in (*obs, reward):
                    digest[i] = zlib.crc32(x[own][rows].tobytes(), digest[i])
                    i += 1
            self._digest[e], self._from[e] = digest, 0
        oldest = min((start for start in self._start if start is not None), default=self._rows)
        while self._chunks and self._chunks[0][0] + len(self._chunks[0][1][0][0]) <= oldest:
            self._chunks.popleft()

    def episode(self, e: int) -> dict[str, Any] | None:
        """The open episode of environment e as plain data; None if it is too long."""
        start = self._start[e]
        if start is None:
            return None
        earlier = self._earlier[e]
        parts = [] if earlier is None else [earlier]
        for first, chunk in self._chunks:
            rows = slice(max(start - first, 0), None)
            parts.append([[x[rows, e * n : e * n + n].copy() for x in leaves] for n, leaves in zip(self._seats, chunk)])
        return {"actions": _joined(parts), "unseen": self._unseen[e], "digest": list(self._digest[e])}

    def load(self, e: int, episode: Mapping[str, Any] | None) -> None:
        """Goes on after an episode that was restored."""
        if episode is None:
            self._start[e] = None
            return
        self._start[e], self._from[e] = self._rows, 0
        self._earlier[e] = [list(leaves) for leaves in episode["actions"]] or None
        self._unseen[e], self._digest[e] = episode["unseen"], list(episode["digest"])


def replay_parallel(
    parallel: ParallelEnvs,
    e: int,
    found: Mapping[str, Any],
    outs: Sequence[SampleBatch],
    to_env: Sequence[Callable[[Tree], Sequence[Any]]],
) -> bool:
    """Replays the open episode of environment e from its seed; True if it leads to the same again, bit for bit.

    That is to observations and rewards of the same digest, the same agents on the same seats, and last to the
    observations in row T of `outs`.
    """
    journal = found["journal"]
    if journal is None:
        return False
    host, seats = parallel.host, parallel.seats
    structures = [tree_structure(out.prev_action) for out in outs]
    scratch = [tree_map(lambda x: np.zeros((1, *x.shape[2:]), x.dtype), out.obs) for out in outs]
    digest = [[0] * (len(tree_leaves(row)) + 1) for row in scratch]
    shown: dict[tuple[int, int], AgentStep] = {}
    actions: list[list[Any]] = journal["actions"]
    L = len(actions[0][0]) if actions else 0
    try:
        steps = parallel.open(e, host.reset(e, again=True))
        shown.update({(step.policy, step.column): step for step in steps})
        for t in range(L):
            rows = [f(tree_unflatten(s, [x[t] for x in xs])) for f, s, xs in zip(to_env, structures, actions)]
            chosen = {agent: rows[p][b - e * seats[p]] for agent, p, b in parallel.where[e]}
            if not chosen:
                return False
            host.repeat(e, t)
            steps = parallel.answer(e, host.step(e, chosen), chosen)
            at = {(step.policy, step.column): step for step in steps}
            shown.update(at)
            for p, b in sorted(at) if t >= journal["unseen"] else ():
                if at[p, b].valid:
                    write_tree(scratch[p], 0, at[p, b].obs)
                    seen = [*tree_leaves(scratch[p]), np.float32(at[p, b].reward)]
                    digest[p] = [zlib.crc32(x.tobytes(), n) for x, n in zip(seen, digest[p])]
    except (PenstockError, IndexError, KeyError, TypeError, ValueError):
        return False  # the episode went well before, so this is one more way of not being reproducible
    flat = [n for each in digest for n in each]
    if host.over[e] or parallel.snapshot(e) != found["there"] or (journal["digest"] or flat) != flat:
        return False
    for _, p, b in parallel.where[e]:
        write_tree(scratch[p], 0, shown[p, b].obs)
        for x, y in zip(tree_leaves(scratch[p]), tree_leaves(outs[p].obs)):
            if x[0].tobytes() != y[-1, b].tobytes():
                return False
    return True


def _joined(parts: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """Leaves by policy, one part after the other."""
    return [[np.concatenate(x) for x in zip(*leaves)] for leaves in zip(*parts)]
