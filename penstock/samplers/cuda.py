"""Acting on a CUDA device: batches in pinned memory, and the forward of each group as one CUDA graph.

A small forward is some thirty kernel launches, which take longer than the kernels; a graph launches all at once. It
replays fixed addresses, so inputs, noise, state and outputs have buffers of their own for each group, and the recurrent
state never leaves the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs, SampleBatch
from penstock.core.tree import Tree, tree_leaves, tree_map

_WARM_UPS = 3
"""Runs before a capture, in which libraries allocate what they keep: torch's documentation asks for them."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records the launches of a function; returns a function that launches all of them again."""


class GraphedAgent:
    """Stands in for an agent in the loop: `act` replays one graph for each group.

    Args:
        agent: on the device; its parameters may change, but not their addresses.
        capture: `cuda_capture`; on the CPU, where nothing can be captured, a function that runs its argument once more.
    """

    def __init__(self, agent: Agent, capture: Capture) -> None:
        self.noise_size, self.env_ranks = agent.noise_size, agent.env_ranks
        self.held_noise, self.evaluates_with_noise = agent.held_noise, agent.evaluates_with_noise
        self._agent, self._capture = agent, capture
        self._graphs: dict[int, tuple[Any, Callable[[], None], Any]] = {}

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        """As `Agent.act`; the next call with this state overwrites the answer.

        A deterministic action is computed without a graph: only evaluations take one.
        """
        if noise is None:
            return self._agent.act(inputs, state, None)
        leaves = tree_leaves(state)
        key = leaves[0].data_ptr() if leaves else -inputs.first.shape[0]
        if key not in self._graphs:
            held = tree_map(torch.clone, (tuple(inputs), state, noise))
            outputs: list[Any] = []

            def run() -> None:
                action, info, after = self._agent.act(Inputs(*held[0]), held[1], held[2])
                tree_map(lambda x, y: x.copy_(y), held[1], after)
                outputs[:] = [(action, info)]

            replay = self._capture(run)
            tree_map(lambda x, y: x.copy_(y), held[1], state)  # the captures' warm-ups have moved it
            key = tree_leaves(held[1])[0].data_ptr() if leaves else key
            self._graphs[key] = held, replay, outputs
        held, replay, outputs = self._graphs[key]
        tree_map(lambda x, y: x.copy_(y, non_blocking=True), (held[0], held[2]), (tuple(inputs), noise))
        replay()
        action, info = outputs[0]
        return action, info, held[1]


def cuda_capture(run: Callable[[], None]) -> Callable[[], None]:
    """Captures `run` in a CUDA graph after warming up on a stream of its own; returns its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def pin(batches: list[SampleBatch]) -> None:
    """Locks the memory of buffers that share a slab, so that copies to the device run by themselves.

    Raises:
        RuntimeError: the driver refuses, such as for want of lockable memory.
    """
    ranges = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in tree_leaves(batches) if x.nbytes]
    first, last = min(a for a, _ in ranges), max(b for _, b in ranges)
    cudart: Any = torch.cuda.cudart()
    status = cudart.cudaHostRegister(first, last - first, 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {last - first:,} bytes failed with status {int(status)}")


def unpin(batches: list[SampleBatch]) -> None:
    """The inverse of `pin`, before the memory is given back."""
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(min(x.ctypes.data for x in tree_leaves(batches) if x.nbytes))
