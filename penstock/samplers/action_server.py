"""ActionServer: acts for slots that are stepped elsewhere, one batched forward for each group and row."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device, tensors_of
from penstock.core.batch import SampleBatch
from penstock.core.noise import Noise
from penstock.core.tree import Tree
from penstock.envs.pools.native_groups import NativeGroups
from penstock.samplers.collector import GroupViews
from penstock.samplers.cuda import GraphedAgent, cuda_capture, pin, unpin
from penstock.samplers.traced_loop import loop
from penstock.workers.pool import ProcessPool


class ActionServer:
    """Runs the one loop over worker processes, with the agents themselves or with copies on another device.

    Args:
        device: where to act; None for where the agents are. graph: use CUDA graphs, where that is a CUDA device.
    """

    remote = False
    """Agents act here, in the loop."""

    def __init__(self, device: str | None, graph: bool = True) -> None:
        self._graph, self._collect = graph, loop()
        self._graphed: dict[int, GraphedAgent] = {}
        self._copies: dict[int, Agent] = {}
        self._pinned: list[tuple[list[SampleBatch], torch.device, bool]] = []
        # With its index: `cuda` alone would not equal the device of an agent that is there.
        self.device = None if device is None else torch.empty(0, device=device).device
        self._waited = self._took = 0.0

    def serve_actions(
        self,
        pool: ProcessPool | NativeGroups,
        agents: Sequence[Agent],
        batches: Sequence[SampleBatch],
        views: Sequence[GroupViews],
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """Fills training batches; arguments as in `collect`."""
        started, waited = time.perf_counter(), pool.wait_s
        acting: list[Any] = [self._there(policy, agent) for policy, agent in enumerate(agents)]
        if self._graph and not pool.takes_turns and views[0].device.type == "cuda":
            for policy, agent in enumerate(acting):
                if policy not in self._graphed:
                    capture = functools.partial(cuda_capture, device=views[0].device)
                    self._graphed[policy] = GraphedAgent(agent, capture)
                acting[policy] = self._graphed[policy]
        self._collect(pool, acting, batches, views, states, noise)
        self._took += time.perf_counter() - started
        self._waited += pool.wait_s - waited

    def serve_actions_evaluation(
        self,
        pool: ProcessPool | NativeGroups,
        agents: Sequence[Agent],
        batches: Sequence[SampleBatch],
        views: Sequence[GroupViews],
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """Fills batches of an evaluation; its waits are not counted."""
        self._collect(pool, [self._there(*each) for each in enumerate(agents)], batches, views, states, noise)

    def serve(self, pool: ProcessPool | NativeGroups, *rest: Any) -> None:
        """`serve_actions` or `serve_actions_evaluation`, as the pool is."""
        (self.serve_actions_evaluation if pool.evaluation else self.serve_actions)(pool, *rest)

    def metrics(self) -> dict[str, float]:
        """Shares of the sampling time: waiting for environments, and acting."""
        if not self._took:
            return {}
        share = self._waited / self._took
        return {"sampler/env_wait": share, "sampler/agent_wait": 1.0 - share}

    def place(
        self, pool: ProcessPool | NativeGroups, batches: list[SampleBatch], states: Tree, agents: Sequence[Agent]
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves buffers to where the workers see them; they are locked in memory where a CUDA device reads them."""
        there, states = pool.place(batches, states)
        if pool.evaluation:  # which takes the place of an earlier one
            self._unpin(evaluations=True)
        device = self.device or agent_device(agents[0])
        if there is not batches and device.type == "cuda" and pin(there, device):
            self._pinned.append((there, device, pool.evaluation))
        return there, states

    def close(self) -> None:
        """Unlocks memory and forgets graphs and copies."""
        self._unpin(evaluations=True)
        self._unpin(evaluations=False)
        self._graphed.clear()
        self._copies.clear()

    def _there(self, policy: int, agent: Agent) -> Agent:
        """The agent, or its copy on the server's device with the same parameters."""
        if self.device is None or self.device == agent_device(agent):
            return agent
        if policy not in self._copies:
            self._copies[policy] = copy.deepcopy(agent).to(self.device)
        with torch.no_grad():  # buffers that no checkpoint holds as well: acting may depend on them
            torch._foreach_copy_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                tensors_of(self._copies[policy]), tensors_of(agent)
            )
        return self._copies[policy]

    def _unpin(self, evaluations: bool) -> None:
        for batches, device, evaluation in self._pinned:
            if evaluation == evaluations:
                unpin(batches, device)
        self._pinned = [each for each in self._pinned if each[2] != evaluations]
