"""What a live sampler is given by `initialize`: its agent, and the buffers that the loop fills with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.acting import check_acting, examples
from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.slab import share
from penstock.core.spec import BatchSpec, EnvSpec, allocate
from penstock.core.tree import Tree, tree_assign, tree_map
from penstock.envs.pools.pool import EnvPool
from penstock.samplers.collector import GroupViews, Server


class Installed:
    """The agent that a live sampler was initialized with.

    Args:
        info_keys: of the environment's info. first_slot: number of the sampler's first slot among `total_slots` of
            several samplers; None for B slots in all.

    Raises:
        ConfigError: the sampler's slots lie outside of `total_slots`.
    """

    def __init__(
        self, spec: EnvSpec, batch_spec: BatchSpec, info_keys: tuple[str, ...], first_slot: int, total_slots: int | None
    ) -> None:
        self._spec, self._batch_spec, self._info_keys = spec, batch_spec, info_keys
        self.total_slots = first_slot + batch_spec.B if total_slots is None else total_slots
        if first_slot < 0 or self.total_slots < first_slot + batch_spec.B:
            raise ConfigError(
                f"first_slot={first_slot} with B={batch_spec.B} are slots {first_slot} to "
                f"{first_slot + batch_spec.B - 1}, and total_slots={total_slots}; use total_slots >= "
                f"{max(first_slot, 0) + batch_spec.B} and first_slot >= 0"
            )
        self._agent: Agent | None = None
        self._closed = False
        self.info: Tree = None
        """Example of the info of one row."""
        self.state: Tree = None
        """Example of the recurrent state of one slot."""

    @property
    def agent(self) -> Agent:
        """Raises ConfigError before `take` and after `close`."""
        if self._agent is None:
            raise ConfigError(
                "the sampler was shut down; build another"
                if self._closed
                else "the sampler has no agent yet; call sampler.initialize(policy.agent) first"
            )
        return self._agent

    def take(self, agent: Agent) -> dict[str, Any]:
        """Makes this the agent; returns examples of one step of one slot, as `Sampler.initialize` does."""
        if agent.spec != self._spec:
            raise ConfigError(f"the agent was built for {agent.spec}; this sampler's environment has {self._spec}")
        agent.set_slots(self.total_slots)
        self.info, self.state = examples(agent, self._spec)
        check_acting(agent, self._spec)
        self._agent = agent
        obs = tree_map(lambda x: x[0], allocate(self._spec.obs, 1))
        null = tree_map(lambda leaf: leaf.null(), self._spec.action)
        return {"obs": obs, "action": null, "info": self.info, "state": self.state}

    def close(self) -> None:
        """Forgets the agent for good."""
        self._agent, self._closed = None, True

    def allocate(self) -> SampleBatch:
        """A batch of zeros as the agent and the environment fill it."""
        return allocate_batch(self._spec, self._batch_spec, self.info, self.state, self._info_keys)

    def blank_batch(self) -> SampleBatch:
        """The same, in which every row is valid."""
        _ = self.agent
        batch = self.allocate()
        batch.valid[...] = True
        return batch


class Buffers:
    """A pool with the batches, views and recurrent states that the loop fills.

    Args:
        buffers: number of batches. slab: descriptor of shared memory for them, where the pool has none of its own.
    """

    def __init__(
        self,
        pool: EnvPool,
        agent: Agent,
        spec: BatchSpec,
        server: Server | None = None,
        buffers: int = 1,
        slab: int | None = None,
    ) -> None:
        self.pool, self.agent = pool, agent
        self._remote = server is not None and server.remote
        env_spec = pool.specs[0]
        info, state = examples(agent, env_spec)
        self.batches = [allocate_batch(env_spec, spec, info, state, pool.info_keys) for _ in range(buffers)]
        rows = self._fresh(spec.B) if self._remote else None
        if server is not None:
            self.batches, rows = server.place(pool, self.batches, rows, agent)
        else:
            self.batches, rows = pool.place(self.batches, rows)
        if slab is not None:
            self.batches = share(slab, self.batches, f"{buffers} batches of {spec}")[1]
        device = (server.device if server is not None else None) or agent_device(agent)
        self.views: list[list[GroupViews]] = [
            []
            if self._remote
            else [GroupViews(batch, slots, env_spec.null_action, device, agent.noise_size) for _, slots in pool.groups]
            for batch in self.batches
        ]
        self.states: list[Tree] = [rows] if self._remote else [None] * len(pool.groups)
        if not self._remote:
            self.set_states(None)

    def forget_slots(self, slots: list[int]) -> None:
        """Recurrent states of these slots as before an episode."""
        rows = self.get_states()
        tree_assign(rows, slots, self._fresh(1), 0)
        self.set_states(rows)

    def get_states(self) -> Tree:
        """[B, ...] arrays."""

        def rows(x: Any, n: int) -> Any:
            return x[:n].cpu().numpy().copy() if isinstance(x, Tensor) else x[:n].copy()

        sizes = [slots.stop - slots.start for _, slots in self.pool.groups]
        parts = [tree_map(lambda x, n=n: rows(x, n), s) for n, s in zip(sizes, self.states)]
        return tree_map(lambda *xs: np.concatenate(xs), *parts)

    def set_states(self, rows: Tree) -> None:
        """The inverse of `get_states`; None for those before an episode."""
        if self._remote:  # in shared memory, so in place
            fresh = self._fresh(len(self.batches[0].first[0])) if rows is None else rows
            tree_map(np.copyto, self.states[0], fresh)
            return
        for group, ((_, slots), view) in enumerate(zip(self.pool.groups, self.views[0])):
            state = tree_map(lambda x, v=view: x.to(v.device), self.agent.initial_state(view.padded))
            if rows is not None:
                tree_map(lambda x, y, b=slots, n=view.n: x[:n].copy_(torch.from_numpy(y[b])), state, rows)
            self.states[group] = state

    def _fresh(self, B: int) -> Tree:
        """[B, ...] arrays of the recurrent state before an episode."""
        return tree_map(lambda x: x.cpu().numpy().copy(), self.agent.initial_state(B))


def last_row(batch: SampleBatch) -> dict[str, Tree]:
    """Copies of the inputs in row T, by the batch's names: the next batch begins with them."""
    names = ("obs", "first", "prev_action", "prev_reward")
    return {name: tree_map(lambda x: x[-1].copy(), getattr(batch, name)) for name in names}
