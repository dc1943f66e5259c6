"""The part of a CpuSampler's worker that runs the agent: the one loop, over the worker's own slots."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import live_in
from penstock.core.batch import SampleBatch
from penstock.core.noise import Purpose
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.pools.serial import SerialPool
from penstock.samplers.collector import GroupViews, Noise, collect
from penstock.workers import control

DETERMINISTIC = -1
"""`mode` without noise; otherwise it is the Purpose."""


class Actor:
    """An agent whose parameters lie in shared memory, where the learner writes them between two batches.

    Args:
        first_slot: number of the worker's first slot, which addresses its noise.
        parameters: by name as `parameters_of` gives them. batches: the worker's columns of every buffer.
        states: [b, ...] recurrent states before the next batch, in shared memory.
    """

    def __init__(
        self,
        pool: SerialPool,
        first_slot: int,
        agent: Agent,
        parameters: dict[str, Any],
        batches: list[SampleBatch],
        states: Tree,
    ) -> None:
        torch.set_num_threads(1)
        live_in(agent, parameters)
        self._pool, self._first_slot, self._agent, self._states = _Counting(pool), first_slot, agent, states
        self._batches = batches
        cpu = torch.device("cpu")
        self._views = [GroupViews(batch, pool.groups[0], pool.spec.null_action, cpu) for batch in batches]

    def collect(self, block: MutableSequence[int], itr: int, mode: int) -> None:
        """Fills the worker's columns of the buffer that the command names."""
        buffer = block[control.BUFFER]
        view = self._views[buffer]
        self._pool.block = block
        padding = view.padded - view.n

        def padded(x: Any) -> torch.Tensor:
            rows = torch.from_numpy(x.copy())
            return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])]) if padding else rows

        states = [tree_map(padded, self._states)]
        noise = None if mode == DETERMINISTIC else Noise(self._pool.seed, Purpose(mode), itr, self._first_slot)
        collect(self._pool, self._agent, self._batches[buffer], [view], states, noise)
        for x, y in zip(tree_leaves(self._states), tree_leaves(states[0])):
            x[...] = y[: view.n].numpy()


class _Counting:
    """An EnvPool that publishes how many rows are whole."""

    def __init__(self, pool: SerialPool) -> None:
        self._pool, self.groups, self.spec = pool, pool.groups, pool.spec
        self.block: MutableSequence[int] = []

    @property
    def seed(self) -> int:
        return self._pool.seed

    def bind(self, out: SampleBatch) -> None:
        self._pool.bind(out)
        self.block[control.ROWS] = 0

    def send(self, group: int, row: int) -> None:
        self._pool.send(group, row)
        self._row = row + 1

    def recv(self) -> int:
        self.block[control.ROWS] = self._row
        return 0
