"""The agents that a live sampler received by `initialize`, and the buffers that its loop fills with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent, Agents
from penstock.agents.example_step import check_acting, examples
from penstock.core.batch import ROWS_AND_NEXT, AnyBatch, MultiAgentBatch, SampleBatch, allocate_batch, as_arrays
from penstock.core.errors import ConfigError, nearest
from penstock.core.shared_memory import share
from penstock.core.spec import BatchSpec, EnvSpec, Share, allocate
from penstock.core.tree import Tree, tree_assign, tree_map
from penstock.envs.pools.pool import BatchColumns
from penstock.envs.seats import Seating
from penstock.samplers.collector import Server, views_of

C = TypeVar("C", bound=BatchColumns)
V = TypeVar("V")


class ActingAgents:
    """The agents that a live sampler was initialized with, one for each policy.

    Args:
        seating: of every environment; each slot is one environment. info_keys: of the environment's info.
        share: the sampler's slots, where several samplers divide those of a run.

    Raises:
        ConfigError: the sampler's slots lie outside of `share.total_slots`.
    """

    def __init__(
        self,
        seating: Seating,
        batch_spec: BatchSpec,
        info_keys: tuple[str, ...],
        share: Share,
    ) -> None:
        self._batch_spec, self._info_keys, self.seating = batch_spec, info_keys, seating
        self.many = seating.many
        """True if batches are MultiAgentBatch."""
        first_slot, total_slots = share.first_slot, share.total_slots
        self.total_slots = first_slot + batch_spec.B if total_slots is None else total_slots
        if self.total_slots < first_slot + batch_spec.B:
            raise ConfigError(
                f"first_slot={first_slot} and B={batch_spec.B} make slots {first_slot} to "
                f"{first_slot + batch_spec.B - 1}, beyond total_slots={total_slots}; expected total_slots of "
                f"{first_slot + batch_spec.B} or more"
            )
        self._agents: tuple[Agent, ...] = ()
        self._closed = False
        self.infos: list[Tree] = []
        """Example of the info of one row, for each policy."""
        self.states: list[Tree] = []
        """Example of the recurrent state of one slot, for each policy."""

    @property
    def agents(self) -> tuple[Agent, ...]:
        """One for each policy. Raises ConfigError before `take` and after `close`."""
        if not self._agents:
            given = "policies.agents" if self.many else "policy.agent"
            raise ConfigError(
                "the sampler was shut down; build another"
                if self._closed
                else f"the sampler has no agent yet; call sampler.initialize({given}) first"
            )
        return self._agents

    @property
    def agent(self) -> Agent:
        """The agent of the first policy, the only one in environments of one agent."""
        return self.agents[0]

    def by_id(self, each: Sequence[V]) -> dict[str, V]:
        """Values in the order of the policies, by policy id."""
        return dict(zip(self.seating.policies, each))

    def take(self, given: Agents) -> dict[str, Any]:
        """Makes these the agents; returns examples of one step of one slot, as `Sampler.initialize` does."""
        agents, seating = self._in_order(given), self.seating
        steps: list[tuple[Tree, Tree]] = []
        for policy, agent, spec, seats in zip(seating.policies, agents, seating.specs, seating.seats):
            if agent.spec != spec:
                whose = f"the agent of policy {policy!r}" if self.many else "the agent"
                raise ConfigError(f"{whose} was built for {agent.spec}; this sampler's environment has {spec}")
            agent.set_slots(self.total_slots * seats)
            steps.append(examples(agent, spec))
            check_acting(agent, spec)
        self._agents = agents
        self.infos, self.states = [info for info, _ in steps], [state for _, state in steps]
        views = [self._shown(spec, *each) for spec, each in zip(seating.specs, steps)]
        return self.by_id(views) if self.many else views[0]

    def _in_order(self, given: Agents) -> tuple[Agent, ...]:
        """The agents in the order of the policies. Raises ConfigError if they belong to other policies."""
        ids = self.seating.policies
        if isinstance(given, Mapping):
            if not self.many and len(given) == 1:
                return tuple(given.values())
            if given.keys() != set(ids):
                wrong = [f"{name!r}: {nearest(name, ids)}" for name in given if name not in ids]
                lack = [f"{name!r} is missing" for name in ids if name not in given]
                raise ConfigError(
                    f"initialize got agents of the policies {list(given)}; expected one agent for each policy that "
                    f"plays here, {list(ids)} ({'; '.join(wrong + lack)})"
                )
            return tuple(given[name] for name in ids)
        if len(ids) > 1:
            raise ConfigError(
                f"initialize got one {type(given).__name__}; expected an agent for each of the policies "
                f"{list(ids)}, e.g. {{{ids[0]!r}: ...}} or policies.agents"
            )
        return (given,)

    def _shown(self, spec: EnvSpec, info: Tree, state: Tree) -> dict[str, Any]:
        obs = tree_map(lambda x: x[0], allocate(spec.obs, 1))
        null = tree_map(lambda leaf: leaf.null(), spec.action)
        return {"obs": obs, "action": null, "info": info, "state": state}

    def close(self) -> None:
        """Forgets the agents for good."""
        self._agents, self._closed = (), True

    def allocate(self) -> list[SampleBatch]:
        """For each policy a batch of zeros, with the fields that its agent and the environment fill."""
        T, B = self._batch_spec
        return [
            allocate_batch(spec, BatchSpec(T, B * seats), info, state, self._info_keys)
            for spec, seats, info, state in zip(self.seating.specs, self.seating.seats, self.infos, self.states)
        ]

    def blank_batch(self) -> AnyBatch:
        """A batch of zeros in which every row is valid."""
        _ = self.agents
        batches = self.allocate()
        for batch in batches:
            batch.valid[...] = True
        return self.together(batches)

    def together(self, batches: Sequence[SampleBatch], seats: Sequence[int] | None = None) -> AnyBatch:
        """The batches of all policies as `obtain_samples` returns them: a SampleBatch where one agent acts.

        Args:
            seats: of each policy in one environment; given by evaluations, whose seats may differ from training.
        """
        if not self.many:
            return batches[0]
        environments: int | None = None
        if self.seating.turns:  # one agent moves at a time
            steps = sum(batch.env_steps for batch in batches)
        else:
            sizes = self.seating.seats if seats is None else seats
            acted = [x.valid.reshape(len(x.valid), -1, n).any(-1) for x, n in zip(batches, sizes) if n]
            environments = acted[0].shape[1]  # an evaluation has another number of them
            steps = int(np.count_nonzero(np.any(acted, 0)))
        return MultiAgentBatch(self.by_id(batches), steps, environments)


class Buffers(Generic[C]):
    """A pool with the batches, views and recurrent states that the loop fills.

    Args:
        agents: one for each policy of the pool, by its id. spec: T and B slots; with many agents, B environments.
        buffers: number of batches. memory_fd: descriptor of shared memory for them, where the pool has none of its own.
    """

    def __init__(
        self,
        pool: C,
        agents: Mapping[str, Agent],
        spec: BatchSpec,
        server: Server | None = None,
        buffers: int = 1,
        memory_fd: int | None = None,
    ) -> None:
        self.pool, self._policies, self.agents = pool, tuple(agents), tuple(agents.values())
        self._remote = server is not None and server.remote
        self._columns = [spec.B * seats for seats in pool.seats]
        parts = [
            (env_spec, BatchSpec(spec.T, columns), *examples(agent, env_spec), pool.info_keys)
            for agent, env_spec, columns in zip(self.agents, pool.specs, self._columns)
        ]
        self.batches = [allocate_batch(*part) for _ in range(buffers) for part in parts]
        """Buffer after buffer; in each buffer one batch for each policy, in order."""
        rows = [self._fresh(p, columns) for p, columns in enumerate(self._columns)] if self._remote else None
        if server is not None:
            self.batches, rows = server.place(pool, self.batches, rows, self.agents)
        else:
            self.batches, rows = pool.place(self.batches, rows)
        if memory_fd is not None:
            self.batches = share(memory_fd, self.batches, f"{buffers} batches of {spec}")[1]
        where = None if server is None else server.device
        self.views: list[list[Any]] = [
            [] if self._remote else views_of(pool, self.agents, self.filled(buffer), where) for buffer in range(buffers)
        ]
        self.states: list[Tree] = rows if self._remote else [None] * len(pool.groups)
        if not self._remote:
            self.set_states(None)

    def filled(self, buffer: int) -> list[SampleBatch]:
        """The batches of one buffer, one for each policy."""
        P = len(self.agents)
        return self.batches[buffer * P : (buffer + 1) * P]

    def forget_slots(self, slots: list[int]) -> None:
        """Sets the recurrent states of these slots, with many agents of all their seats, to those before an episode."""
        rows = self._rows()
        for policy, (mine, seats) in enumerate(zip(rows, self.pool.seats)):
            columns = [b * seats + i for b in slots for i in range(seats)]
            tree_assign(mine, columns, self._fresh(policy, 1), 0)
        self._set_rows(rows)

    def get_states(self) -> Tree:
        """[B, ...] arrays, by policy id."""
        return dict(zip(self._policies, self._rows()))

    def set_states(self, states: Tree) -> None:
        """Inverse of `get_states`; None sets the states before an episode."""
        if states is None:
            self._set_rows([None] * len(self.agents))
        else:
            self._set_rows([states[policy] for policy in self._policies])

    def _rows(self) -> list[Tree]:
        """[B, ...] arrays of each policy."""

        def rows(x: Any, n: int) -> Any:
            return x[:n].cpu().numpy().copy() if isinstance(x, Tensor) else x[:n].copy()

        if self._remote:
            sizes, owners = self._columns, list(range(len(self.agents)))
        else:
            sizes = [slots.stop - slots.start for _, slots in self.pool.groups]
            owners = [policy for policy, _ in self.pool.groups]
        parts = [tree_map(lambda x, n=n: rows(x, n), s) for n, s in zip(sizes, self.states)]
        of = [[part for part, owner in zip(parts, owners) if owner == policy] for policy in range(len(self.agents))]
        return [tree_map(lambda *xs: np.concatenate(xs), *mine) for mine in of]

    def _set_rows(self, rows: Sequence[Tree]) -> None:
        """Inverse of `_rows`; None for a policy sets its states before an episode."""
        if self._remote:  # in shared memory, so in place
            for policy, (target, mine) in enumerate(zip(self.states, rows)):
                fresh = self._fresh(policy, self._columns[policy]) if mine is None else mine
                tree_map(np.copyto, target, fresh)
            return
        for group, ((policy, slots), view) in enumerate(zip(self.pool.groups, self.views[0])):
            state = tree_map(lambda x, v=view: x.to(v.device), self._opening(policy, view.padded))
            mine = rows[policy]
            if mine is not None:
                tree_map(lambda x, y, b=slots, n=view.n: x[:n].copy_(torch.from_numpy(y[b])), state, mine)
            self.states[group] = state

    def _opening(self, policy: int, n: int) -> Tree:
        """The state of n columns before an episode, as the views of the loop keep it."""
        state = self.agents[policy].initial_state(n)
        if state is None or not self.pool.takes_turns:
            return state
        return {"now": state, "before": tree_map(torch.clone, state)}

    def _fresh(self, policy: int, n: int) -> Tree:
        """[n, ...] arrays of the recurrent state before an episode."""
        return tree_map(lambda x: x.cpu().numpy().copy(), self._opening(policy, n))


def last_row(batch: SampleBatch) -> dict[str, Tree]:
    """Copies of the inputs in row T, as arrays by field name; the next batch begins with them."""
    rows = {name: tree_map(lambda x: x[-1], getattr(batch, name)) for name in ROWS_AND_NEXT}
    return tree_map(np.copy, as_arrays(rows))
