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
from penstock.envs.pools.factory import LocalPool
from penstock.samplers.collector import views_of
from penstock.samplers.traced_loop import loop
from penstock.workers import control
from penstock.workers.messages import WorkerAgents
from penstock.workers.pool import ProcessPool

DETERMINISTIC = -1
"""The `mode` word for acting without noise; any other value is a Purpose."""


class Actor:
    """Agents with parameters in shared memory, where the learner writes them between two batches.

    Args:
        pool: the worker's slots; their numbers address the noise. agents: one for each policy.
        parameters: for each agent its parameters by name, as `parameters_of` returns them.
        batches: for every buffer, the worker's columns of each policy.
        states: for each policy, [b, ...] recurrent states before the next batch, in shared memory.
    """

    def __init__(
        self,
        pool: LocalPool,
        agents: Sequence[Agent],
        parameters: Sequence[dict[str, Any]],
        batches: list[list[SampleBatch]],
        states: list[Tree],
    ) -> None:
        torch.set_num_threads(1)
        for agent, mine in zip(agents, parameters):
            live_in(agent, mine)
        self._pool, self._agents, self._states = _Counting(pool), agents, states
        self._slots, self._batches, self._collect = pool, batches, loop()
        self._views = [views_of(pool, agents, buffer, torch.device("cpu")) for buffer in batches]

    def collect(self, block: MutableSequence[int], itr: int, mode: int) -> None:
        """Fills the worker's columns of the buffer that the command names."""
        buffer = block[control.BUFFER]
        views, slots = self._views[buffer], self._slots
        self._pool.block = block
        states: list[Tree] = []
        for view, mine in zip(views, self._states):

            def padded(x: Any, padding: int = view.padded - view.n) -> torch.Tensor:
                rows = torch.from_numpy(x.copy())
                return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])]) if padding else rows

            states.append(tree_map(padded, mine))
        first = slots.host.slots.start
        seed = slots.host.seed
        noise = None if mode == DETERMINISTIC else Noise(seed, Purpose(mode), itr, first)
        self._collect(self._pool, self._agents, self._batches[buffer], views, states, noise)
        for view, mine, after in zip(views, self._states, states):
            for x, y in zip(tree_leaves(mine), tree_leaves(after)):
                x[...] = y[: view.n].numpy()


class _Counting:
    """A local pool that writes the number of finished rows into the worker's block."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool, self.groups = pool, pool.groups
        self.seats, self.takes_turns = pool.seats, pool.takes_turns
        self.pending, self.finished, self.send = pool.pending, pool.finished, pool.send
        self._given = pool.recv  # which of the groups that `send` has stepped; nothing to wait for
        self.block: MutableSequence[int] = []

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        self._pool.bind(outs)
        self.block[control.ROWS] = 0

    def recv(self) -> int:
        group = self._given()
        if group == 0:  # the other policies of the row follow
            self.block[control.ROWS] += 1
        return group


class WorkerActors:
    """Has each worker run the one loop over its own slots, with its own copies of the agents."""

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
        """Publishes the parameters, between two batches, and has the batch filled; arguments as in `collect`."""
        for agent, arrays in zip(agents, pool.parameters):
            copy_parameters(agent, {name: torch.from_numpy(x) for name, x in arrays.items()})
        mode = DETERMINISTIC if noise is None else int(noise.purpose)
        pool.collect(batches, 0 if noise is None else noise.batch, mode)

    def place(
        self, pool: ProcessPool, batches: list[SampleBatch], states: Tree, agents: Sequence[Agent]
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves buffers, states and parameters into shared memory, and sends every worker copies of the agents."""
        arrays = [
            {name: np.ascontiguousarray(x.detach().cpu().numpy()) for name, x in parameters_of(agent).items()}
            for agent in agents
        ]
        copies = [copy.deepcopy(agent).cpu() for agent in agents]
        return pool.place(batches, states, WorkerAgents("penstock.samplers.actor:Actor", copies, arrays))

    def metrics(self) -> dict[str, float]:
        """Does nothing: workers wait for nobody."""
        return {}

    def close(self) -> None:
        """Does nothing: the workers end with their pool."""
