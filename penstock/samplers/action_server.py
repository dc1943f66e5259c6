"""ActionServer: acts for slots that are stepped elsewhere, one batched forward for each group and row."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree
from penstock.samplers.collector import GroupViews, Noise, collect
from penstock.samplers.cuda import GraphedAgent, cuda_capture, pin, unpin


class ActionServer:
    """Runs the one loop over worker processes, with the agent itself or with a copy on another device.

    Args:
        device: where to act; None for where the agent is. graph: use CUDA graphs, where that is a CUDA device.
    """

    def __init__(self, device: str | None, graph: bool = True) -> None:
        self._graph = graph
        self._graphed: GraphedAgent | None = None
        self._pinned: list[list[SampleBatch]] = []
        self._device = None if device is None else torch.device(device)
        self._copy: Agent | None = None
        self._waited = self._took = 0.0

    def serve_actions(
        self,
        pool: Any,
        agent: Agent,
        batch: SampleBatch,
        views: list[GroupViews],
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """Fills a training batch; arguments as of `collect`."""
        started, waited = time.perf_counter(), pool.wait_s
        acting = self._acting(agent)
        if self._graph and views[0].device.type == "cuda":
            if self._graphed is None:
                self._graphed = GraphedAgent(acting, cuda_capture)
            acting = self._graphed
        collect(pool, acting, batch, views, states, noise)
        self._took += time.perf_counter() - started
        self._waited += pool.wait_s - waited

    def serve_actions_evaluation(
        self,
        pool: Any,
        agent: Agent,
        batch: SampleBatch,
        views: list[GroupViews],
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """The same for a batch of an evaluation, whose waits are not counted."""
        collect(pool, self._acting(agent), batch, views, states, noise)

    def serve(
        self,
        pool: Any,
        agent: Agent,
        batch: SampleBatch,
        views: list[GroupViews],
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """`serve_actions` or `serve_actions_evaluation`, as the pool is."""
        serve = self.serve_actions_evaluation if pool.evaluation else self.serve_actions
        serve(pool, agent, batch, views, states, noise)

    def metrics(self) -> dict[str, float]:
        """Shares of the sampling time: waiting for environments, and acting."""
        if not self._took:
            return {}
        share = self._waited / self._took
        return {"sampler/env_wait": share, "sampler/agent_wait": 1.0 - share}

    def place(
        self, pool: Any, batches: list[SampleBatch], states: Tree, agent: Agent
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves buffers to where the workers see them; they are locked in memory where a CUDA device reads them."""
        batches, states = pool.attach(batches, states, None)
        if (self._device or agent_device(agent)).type == "cuda":
            pin(batches)
            self._pinned.append(batches)
        return batches, states

    def close(self) -> None:
        """Unlocks memory and forgets graphs."""
        for batches in self._pinned:
            unpin(batches)
        self._pinned, self._graphed, self._copy = [], None, None

    def _acting(self, agent: Agent) -> Agent:
        if self._device is None or self._device == agent_device(agent):
            return agent
        if self._copy is None:
            self._copy = copy.deepcopy(agent).to(self._device)
        self._copy.load_state_dict(agent.state_dict())
        return self._copy
