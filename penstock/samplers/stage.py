"""Where a live sampler plays: a pool with its buffers, views and recurrent states, and who does the work there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import Inputs, SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.layout import ROW_MULTIPLE
from penstock.core.spec import BatchSpec, EnvSpec, allocate
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map
from penstock.envs.pools.pool import EnvPool
from penstock.samplers.collector import Fill, GroupViews, collect


@dataclass(frozen=True)
class Crew:
    """Who does the work of a live sampler; as it is, everything happens in this process."""

    evaluation: Callable[[int], EnvPool]
    """Makes a pool of so many slots with evaluation seeds, which is closed with the sampler."""
    evaluation_slots: int | None = None
    """Slots of every evaluation where there is no choice; None for one for each episode, up to 16."""
    fill: Fill = collect
    """Fills a batch: the one loop, or whatever has it run elsewhere."""
    place: Callable[[Any, list[SampleBatch], Tree, Agent], tuple[list[SampleBatch], Tree]] | None = None
    """Moves a pool's buffers, and recurrent states [B, ...] if agents act in its workers, to where those see them."""
    remote_agents: bool = False
    """Agents act in the workers, and their recurrent states are in shared memory; else they are the loop's own."""
    refuse: Callable[[Any, int, int, str], list[int]] | None = None
    """What becomes of a slot that broke the contract in a row of the batch: (pool, slot, row, message) -> slots that were
    cut there. None: the error is raised."""
    metrics: Callable[[], dict[str, float]] = dict
    """Further `sampler/...` and `faults/...` metrics."""
    faults: Counter[str] = field(default_factory=Counter[str])
    """Counts that go into a checkpoint."""
    close: Callable[[], None] = lambda: None
    """Called once after the pools are closed."""


class Stage:
    """A pool with the buffers, views and recurrent states that it plays in."""

    def __init__(
        self, pool: EnvPool, agent: Agent, spec: BatchSpec, crew: Crew, buffers: int, device: torch.device
    ) -> None:
        self.pool, self._agent, self._remote = pool, agent, crew.remote_agents
        info, state = examples(agent, pool.spec)
        self.batches = [allocate_batch(pool.spec, spec, info, state, pool.info_keys) for _ in range(buffers)]
        rows = tree_map(lambda x: x.cpu().numpy().copy(), agent.initial_state(spec.B)) if crew.remote_agents else None
        if crew.place is not None:
            self.batches, rows = crew.place(pool, self.batches, rows, agent)
        self.views: list[list[GroupViews]] = [
            []
            if crew.remote_agents
            else [GroupViews(batch, slots, pool.spec.null_action, device) for slots in pool.groups]
            for batch in self.batches
        ]
        self.states: list[Tree] = [rows]
        if not crew.remote_agents:
            self.states = [None] * len(pool.groups)
            self.forget()

    def forget(self) -> None:
        """Recurrent states as before an episode."""
        self.set_states(None)

    def forget_slots(self, slots: list[int]) -> None:
        """Recurrent states of these slots as before an episode."""
        rows, fresh = self.get_states(), tree_map(lambda x: x.cpu().numpy(), self._agent.initial_state(1))
        tree_assign(rows, slots, fresh, 0)
        self.set_states(rows)

    def get_states(self) -> Tree:
        """[B, ...] arrays."""

        def rows(x: Any, n: int) -> Any:
            return x[:n].cpu().numpy().copy() if isinstance(x, Tensor) else x[:n].copy()

        parts = [tree_map(lambda x, n=b.stop - b.start: rows(x, n), s) for b, s in zip(self.pool.groups, self.states)]
        return tree_map(lambda *xs: np.concatenate(xs), *parts)

    def set_states(self, rows: Tree) -> None:
        """The inverse of `get_states`; None for those before an episode."""
        if self._remote:  # in shared memory, so in place
            fresh = tree_map(lambda x: x.cpu().numpy(), self._agent.initial_state(len(self.batches[0].first[0])))
            tree_map(np.copyto, self.states[0], fresh if rows is None else rows)
            return
        for group, (slots, view) in enumerate(zip(self.pool.groups, self.views[0])):
            state = tree_map(lambda x, v=view: x.to(v.device), self._agent.initial_state(view.padded))
            if rows is not None:
                tree_map(lambda x, y, b=slots, n=view.n: x[:n].copy_(torch.from_numpy(y[b])), state, rows)
            self.states[group] = state


def examples(agent: Agent, spec: EnvSpec) -> tuple[Tree, Tree]:
    """Examples of what `act` records and of the recurrent state, one row without its leading dimension."""
    device = agent_device(agent)
    n = ROW_MULTIPLE

    def rows(tree: Tree) -> Tree:
        return tree_map(lambda x: torch.as_tensor(x, device=device), tree)

    action = tree_map(lambda leaf: np.broadcast_to(leaf.null(), (n, *leaf.shape)).copy(), spec.action)
    inputs = Inputs(
        rows(allocate(spec.obs, n)),
        rows(action),
        torch.zeros(n, device=device),
        torch.ones(n, dtype=torch.bool, device=device),
    )
    for leaf, x in zip(tree_leaves(spec.obs), tree_leaves(inputs.obs)):
        x += torch.as_tensor(leaf.null(), device=device)
    with torch.inference_mode():
        state = agent.initial_state(n)
        _, info, _ = agent.act(inputs, state, torch.full((n, agent.noise_size), 0.5, device=device))
    if not isinstance(info, dict) or "env" in info:
        raise ConfigError(f"act() recorded {type(info).__name__} {list(info)}; expected a dict without the key 'env'")
    return tree_map(lambda x: x[0].cpu().numpy(), info), tree_map(lambda x: x[0].cpu().numpy(), state)
