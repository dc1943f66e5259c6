"""Slots that are stepped by worker processes: which worker has which columns, what it is told, and what it leaves."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np

from penstock.agents.agent import Agent
from penstock.core.batch import SampleBatch
from penstock.core.slab import share
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.pools.serial import STEPPING, Reset
from penstock.workers import control
from penstock.workers.messages import Attach, MakePool, TakeOver
from penstock.workers.shares import at_work, cut, even_split, one_spec, part
from penstock.workers.supervisor import Workers

TRAINING, EVALUATION = 0, 1
"""Numbers of a sampler's two pools."""
_PARAMETERS = 4
"""The slab of the agent's parameters; a pool has slabs 2 * number (batches) and 2 * number + 1 (ledger)."""


class ProcessSlots:
    """B slots of one of a sampler's two pools, spread over its workers; an `Owner` for their supervisor.

    Args:
        exclusive: never have two groups stepping at a time.
    """

    def __init__(
        self,
        workers: Workers,
        number: int,
        config: EnvConfig,
        seed: int,
        B: int,
        *,
        groups: int = 1,
        reset: Reset = "next_step",
        max_decorrelation_steps: int = 0,
        exclusive: bool = False,
    ) -> None:
        self._workers, self._number, self._config, self.seed = workers, number, config, seed
        self.evaluation = number == EVALUATION
        self._reset: Reset = reset
        self._decorrelate, self._exclusive = max_decorrelation_steps, exclusive
        self.info_keys = tuple(dict.fromkeys((*config.info_keys, "is_success")))
        starts = np.cumsum([0, *even_split(B, groups)]).tolist()
        self.groups = tuple(slice(a, b) for a, b in zip(starts, starts[1:]))
        self.shares = [[part(group, workers.count, w) for group in self.groups] for w in range(workers.count)]
        self._owners = [w for w in range(workers.count) if any(self.shares[w])]
        self._ledger_places, self.ledger = share(
            workers.slabs[2 * number + 1], np.zeros((B, 3), np.int64), "the ledger"
        )
        self._batches: list[SampleBatch] = []
        self._batch_places: list[Tree] = []
        self._attached: list[Attach] | None = None
        self._current = self._previous = -1
        self._members: list[list[tuple[Any, int]]] = [[] for _ in self.groups]
        self._active: set[int] = set()
        self._out: list[tuple[int, int]] = []
        self._queue: deque[tuple[int, int]] = deque()
        self._found = -1
        self.wait_s = 0.0
        """Seconds that the loop has waited for environments."""
        self._collecting = self._binding = False
        self._unbound: set[int] = set()
        if number == TRAINING:
            plain = workers.start(self)
            made = [answer[0] for answer in plain]
        else:
            workers.owners[1:] = [self]  # in place of one with another number of slots
            made = [a and a[0] for a in workers.call([[self._make(w, False)] for w in range(workers.count)])]
        self.spec = one_spec([EnvSpec.from_plain(spec) for spec in made if spec is not None], config)

    def messages(self, w: int, replaces: bool) -> list[Any]:
        out: list[Any] = [self._make(w, replaces)]
        if self._attached is not None:
            out += [self._attached[w], *([TakeOver(self._number, self._previous_of(w))] if replaces else [])]
        return out

    def whereabouts(self, w: int, block: Any) -> str:
        mark = block[control.MARK : control.MARK + control.MARK_WORDS].tolist()
        if mark[5] != self.evaluation:
            return ""
        if not mark[1]:
            columns = ", ".join(f"{s.start} to {s.stop - 1}" for s in self.shares[w] if s)
            return f"between steps of {self._config.name}, slots {columns}"
        slot = mark[3] + mark[0]
        action = None
        if mark[1] == STEPPING and self._current >= 0:
            batch = self._batches[self._current]
            g = next(g for g, group in enumerate(self.groups) if slot < group.stop)
            row = max(block[control.ROWS] if self._collecting else block[control.DONE + g], 0)
            if row < batch.spec.T:
                action = tree_map(lambda x: x[row, slot].tolist(), batch.action)
        return at_work(self._config.name, self.seed, mark, self.ledger[slot].tolist(), action)

    def lost(self, w: int) -> None:
        if w not in self._active:
            return
        self._active.discard(w)
        block = self._workers.control.blocks[w]
        bound = block[control.ROWS] >= 0 if self._collecting else block[control.COMMAND] == block[control.DONE_COMMAND]
        if self._binding and not bound:
            self._unbound.add(w)
            return
        for g, slots in enumerate(self.shares[w]):
            if slots is not None:
                row = block[control.ROWS] if self._collecting else block[control.DONE + g]
                self._cut(slots, row)
                if not self._collecting:
                    self._members[g] = [m for m in self._members[g] if m[1] != w]

    def attach(
        self, batches: list[SampleBatch], states: Tree = None, agent: Agent | None = None
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves the buffers, and the recurrent states [B, ...] of agents that live in the workers, into shared memory."""
        n, T = self._number, batches[0].spec.T
        where, (self._batches, states) = share(
            self._workers.slabs[2 * n],
            (batches, states),
            f"{len(batches)} batch(es) of T={T}, B={self.groups[-1].stop}",
        )
        parameters = None
        if agent is not None:
            parameters, agent = self._share_parameters(agent)
        self._current = self._previous = -1
        self._attached = [
            Attach(n, 2 * n, where[0], where[1] if agent is not None else None, agent, parameters, _PARAMETERS)
            for _ in range(self._workers.count)
        ]
        self._workers.call([[message] if any(self.shares[w]) else None for w, message in enumerate(self._attached)])
        return self._batches, states

    def disown(self, slot: int, row: int, message: str) -> list[int]:
        """A row that is in the batch already broke the contract: its worker counts as failed there.

        Returns:
            the slots that lost their rows from `row` on.
        """
        w = next(w for w in self._owners if any(s is not None and s.start <= slot < s.stop for s in self.shares[w]))
        self._workers.condemn(w, message)
        mine = [s for s in self.shares[w] if s is not None]
        for slots in mine:
            self._cut(slots, row)
        return [b for s in mine for b in range(s.start, s.stop)]

    def _cut(self, slots: slice, row: int) -> None:
        """From this row on nothing in these columns of the current batch is valid."""
        lost = cut(self._batches[self._current], slots, row, self.spec.null_action)
        if lost:
            self._workers.faults.counts["lost_steps"] += lost

    def _index(self, out: SampleBatch) -> int:
        return next(i for i, batch in enumerate(self._batches) if batch is out)

    def _previous_of(self, w: int) -> int:
        """The last buffer of which this worker wrote row 0."""
        return self._previous if w in self._unbound else self._current

    def _make(self, w: int, keep: bool) -> MakePool:
        n = self._number
        return MakePool(
            n,
            self._config,
            self.seed,
            tuple(self.shares[w]),
            self._reset,
            self._decorrelate,
            n == EVALUATION,
            self._ledger_places,
            2 * n + 1,
            keep,
        )

    def _share_parameters(self, agent: Agent) -> tuple[Tree, Agent]:
        """Puts copies of the parameters into their slab; gives their places and an agent to send."""

        import torch

        from penstock.agents.parameters import parameters_of

        arrays = {name: np.ascontiguousarray(x.detach().cpu().numpy()) for name, x in parameters_of(agent).items()}
        where, there = share(self._workers.slabs[_PARAMETERS], arrays, "the agent's parameters")
        self._parameters = {name: torch.from_numpy(x).reshape(arrays[name].shape) for name, x in there.items()}
        return where, copy.deepcopy(agent).cpu()
