"""Agents that act in a CpuSampler's workers: the loop over a worker's slots, and the learner's side of it."""

from __future__ import annotations

import copy
from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import copy_parameters, live_in, parameters_of
from penstock.core.batch import SampleBatch
from penstock.core.noise import Noise, Purpose
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.pools.serial import SerialPool
from penstock.samplers.collector import GroupViews
from penstock.samplers.traced import loop
from penstock.workers import control
from penstock.workers.messages import Acting
from penstock.workers.pool import ProcessPool

DETERMINISTIC = -1
"""The `mode` word for acting without noise; any other value is a Purpose."""


class Actor:
    """An agent whose parameters lie in shared memory, where the learner writes them between two batches.

    Args:
        pool: the worker's slots, whose numbers address their noise.
        parameters: by name as `parameters_of` returns them. batches: the worker's columns of every buffer.
        states: for each policy [b, ...] recurrent states before the next batch, in shared memory.
    """

    def __init__(
        self,
        pool: SerialPool,
        agent: Agent,
        parameters: dict[str, Any],
        batches: list[SampleBatch],
        states: Tree,
    ) -> None:
        torch.set_num_threads(1)
        live_in(agent, parameters)
        self._pool, self._agent, self._states = _Counting(pool), agent, states
        self._slots, self._batches, self._collect = pool, batches, loop()
        slots, null, cpu = pool.groups[0].slots, pool.spec.null_action, torch.device("cpu")
        self._views = [GroupViews(batch, slots, null, cpu, agent.noise_size) for batch in batches]

    def collect(self, block: MutableSequence[int], itr: int, mode: int) -> None:
        """Fills the worker's columns of the buffer that the command names."""
        buffer = block[control.BUFFER]
        view = self._views[buffer]
        self._pool.block = block
        padding = view.padded - view.n

        def padded(x: Any) -> torch.Tensor:
            rows = torch.from_numpy(x.copy())
            return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])]) if padding else rows

        states = [tree_map(padded, self._states[0])]
        noise = None if mode == DETERMINISTIC else Noise(self._slots.seed, Purpose(mode), itr, self._slots.first_slot)
        self._collect(self._pool, [self._agent], [self._batches[buffer]], [view], states, noise)
        for x, y in zip(tree_leaves(self._states[0]), tree_leaves(states[0])):
            x[...] = y[: view.n].numpy()


class _Counting:
    """A SerialPool that writes the number of finished rows into the worker's block."""

    def __init__(self, pool: SerialPool) -> None:
        self._pool, self.groups = pool, pool.groups
        self.seats, self.takes_turns = pool.seats, pool.takes_turns
        self.pending, self.finished = pool.pending, pool.finished
        self.block: MutableSequence[int] = []

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        self._pool.bind(outs)
        self.block[control.ROWS] = 0

    def send(self, group: int, row: int) -> None:
        self._pool.send(group, row)
        self._row = row + 1

    def recv(self) -> int:
        self.block[control.ROWS] = self._row
        return 0


class WorkerActors:
    """Has each worker run the one loop over its own slots, with its own copy of the agent."""

    remote = True
    """Recurrent states are in shared memory and updated there."""
    device = None

    def serve(
        self,
        pool: ProcessPool,
        agents: Sequence[Agent],
        batches: Sequence[SampleBatch],
        views: Any,
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """Publishes the parameters, between two batches, and has the batch filled; arguments as of `collect`."""
        there = {name: torch.from_numpy(x) for name, x in pool.parameters.items()}
        copy_parameters(agents[0], there)
        mode = DETERMINISTIC if noise is None else int(noise.purpose)
        pool.collect(batches[0], 0 if noise is None else noise.batch, mode)

    def place(
        self, pool: ProcessPool, batches: list[SampleBatch], states: Tree, agents: Sequence[Agent]
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves buffers, states and parameters into shared memory, and sends every worker a copy of the agent."""
        (agent,) = agents
        arrays = {name: np.ascontiguousarray(x.detach().cpu().numpy()) for name, x in parameters_of(agent).items()}
        return pool.place(batches, states, Acting("penstock.samplers.actor:Actor", copy.deepcopy(agent).cpu(), arrays))

    def metrics(self) -> dict[str, float]:
        """Nothing: workers wait for nobody."""
        return {}

    def close(self) -> None:
        """Nothing: the workers end with their pool."""
