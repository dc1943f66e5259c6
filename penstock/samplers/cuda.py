"""Acting on a CUDA device: batches in pinned memory, and the forward of each group as one CUDA graph.

A small forward is some thirty kernel launches, which take longer than the kernels; a graph launches all at once. It
replays fixed addresses, so inputs, noise, state and outputs have buffers of their own for each group, and the recurrent
state never leaves the device.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs, SampleBatch
from penstock.core.tree import Tree, tree_leaves, tree_map

_WARM_UPS = 3
"""Warm-up runs before a capture, in which libraries allocate their workspaces; torch's documentation requires them."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records the launches of a function; returns a function that launches all of them again."""


class _Graph(NamedTuple):
    """The launches of one group's forward, and the buffers that they read and write."""

    held: Any
    """Inputs, state and noise."""
    replay: Callable[[], None]
    outputs: Any
    """Action and info."""
    lent: list[weakref.ref[Tensor]]
    """The last state returned to the loop, if any; once it is gone, nothing uses this graph."""


class GraphedAgent:
    """Stands in for an agent in the loop: `act` replays one graph for each group.

    An agent cannot be captured if its `act` reads values of tensors: a warning says so, and it acts without graphs.

    Args:
        agent: on the device; its parameters may change, but not their addresses.
        capture: `cuda_capture`; on the CPU, where nothing can be captured, a function that runs its argument once more.
    """

    def __init__(self, agent: Agent, capture: Capture) -> None:
        self.noise_size, self.env_ranks = agent.noise_size, agent.env_ranks
        self.held_noise, self.evaluates_with_noise = agent.held_noise, agent.evaluates_with_noise
        self._agent, self._capture = agent, capture
        self._graphs: dict[int, _Graph] = {}
        self._refused = False

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        """Like `Agent.act`; the next call with this state overwrites the answer.

        A deterministic action is computed without a graph: only evaluations take one.
        """
        if noise is None or self._refused:
            return self._agent.act(inputs, state, noise)
        leaves = tree_leaves(state)
        key = leaves[0].data_ptr() if leaves else -inputs.first.shape[0]
        if key not in self._graphs:
            self._forget_lost()
            held = tree_map(torch.clone, (tuple(inputs), state, noise))
            outputs: list[Any] = []

            def run() -> None:
                action, info, after = self._agent.act(Inputs(*held[0]), held[1], held[2])
                tree_map(lambda x, y: x.copy_(y), held[1], after)
                outputs[:] = [(action, info)]

            try:
                replay = self._capture(run)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._refuse(error)
                return self._agent.act(inputs, state, noise)
            tree_map(lambda x, y: x.copy_(y), held[1], state)  # the captures' warm-ups have moved it
            key = tree_leaves(held[1])[0].data_ptr() if leaves else key
            self._graphs[key] = _Graph(held, replay, outputs, [])
        held, replay, outputs, lent = self._graphs[key]
        tree_map(lambda x, y: x.copy_(y, non_blocking=True), (held[0], held[2]), (tuple(inputs), noise))
        replay()
        action, info = outputs[0]
        after = tree_map(lambda x: x.view_as(x), held[1])  # the same memory, in tensors that can be seen to go
        lent[:] = [weakref.ref(x) for x in tree_leaves(after)[:1]]
        return action, info, after

    def _forget_lost(self) -> None:
        """Gives back the graphs of states that a restart, a resume or a lost slot has replaced."""
        self._graphs = {key: x for key, x in self._graphs.items() if not x.lent or x.lent[0]() is not None}

    def _refuse(self, error: RuntimeError) -> None:
        self._refused = True
        self._graphs.clear()
        warnings.warn(
            f"act() of {type(self._agent).__name__} cannot be captured in a CUDA graph "
            f"({str(error).splitlines()[0]:.200}); it acts without, as with sampler.cuda_graph=False. Does it ask for "
            "numbers of a tensor (item, tolist, nonzero, if), or make tensors of Python numbers?",
            stacklevel=2,
        )


def cuda_capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Captures `run` in a CUDA graph of a device after warming up on a stream of its own; returns its replay."""
    with torch.cuda.device(device):  # which need not be the process's current one
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as nccl's, may make driver calls that a capture forbids in its own thread.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    return graph.replay


def pin(batches: list[SampleBatch], device: torch.device) -> bool:
    """Locks the memory of buffers that share one file, so that copies to the device run by themselves.

    Returns False, after a warning, if the driver refuses, for example for lack of lockable memory; copies then block.
    """
    ranges = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in tree_leaves(batches) if x.nbytes]
    first, last = min(a for a, _ in ranges), max(b for _, b in ranges)
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = int(cudart.cudaHostRegister(first, last - first, 0))
        if not status:
            return True
        _clear_error(device)
    warnings.warn(
        f"the driver does not lock {last - first:,} bytes of memory (cudaHostRegister: status {status}), so copies to "
        f"{device} are slower; raise the limit (ulimit -l), or use a smaller sampler.T or B",
        stacklevel=2,
    )
    return False


def unpin(batches: list[SampleBatch], device: torch.device) -> None:
    """Inverse of `pin`, before the memory is given back."""
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        if int(cudart.cudaHostUnregister(min(x.ctypes.data for x in tree_leaves(batches) if x.nbytes))):
            _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """Has torch meet the error that the driver keeps, which the next operation would be blamed for."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
