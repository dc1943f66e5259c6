"""The agent of a live sampler from `initialize` to `shutdown`."""

from __future__ import annotations

from typing import Any

from penstock.agents.acting import check_acting, examples
from penstock.agents.agent import Agent
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, allocate
from penstock.core.tree import Tree, tree_map


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
