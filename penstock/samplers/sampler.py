"""Sampler: the Protocol between collecting batches and learning from them, and the Protocol of its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from penstock.agents.agent import Agents
from penstock.core.batch import AnyBatch
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.samplers.episodes import Episodes


class Sampler(Protocol):
    """A live sampler: `initialize(agent)`, then `obtain_samples(itr)` as often as wanted, then `shutdown()`.

    `Trainer` refuses one that lacks a member.
    """

    spec: EnvSpec
    """In environments of many agents that of the first policy; all are in `specs`, by policy id."""
    batch_spec: BatchSpec
    """T, and B environments: a policy's batch has B times its seats columns."""
    cut_slots: list[int]
    """Slots whose open episode could not be restored by the last `load_state_dict`."""

    def initialize(self, agents: Agents, /) -> dict[str, Any]:
        """Takes the agent that will act, or one for each policy id, and allocates the batch.

        Returns:
            examples of one step of one slot: obs, action, info and recurrent state, without leading dimensions; in
            environments of many agents by policy id.
        """
        ...

    def obtain_samples(self, itr: int) -> tuple[AnyBatch, Episodes]:
        """Returns the next T steps of every slot, valid until the next call, and the episodes that ended in them.

        Args:
            itr: number of the batch from 0; it addresses the noise.
        """
        ...

    def evaluate_agent(
        self,
        itr: int,
        episodes: int = 20,
        deterministic: bool = True,
        give_up: Callable[[], bool] | None = None,
        slots: int = ...,
        max_steps: int = ...,
    ) -> Episodes:
        """Returns exactly `episodes` finished episodes, the first k of each slot, and leaves training as it was.

        Args:
            itr: addresses the episodes' seeds and the noise. give_up: asked now and then; once it is True, the
                episodes that have ended are all there are.
            slots: environments side by side, at most. max_steps: an episode is cut there and counts as it stands.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Further `sampler/...` and `faults/...` metrics since the run began."""
        ...

    def blank_batch(self) -> AnyBatch:
        """A batch of zeros in which every row is valid, for timing."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches, as plain data, arrays and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """The inverse of `state_dict`, after `initialize`; `cut_slots` then names what could not be restored."""

    def shutdown(self) -> None:
        """Closes environments and processes. A second call does nothing."""


class SamplerSettings(Protocol):
    """Frozen settings of a sampler: any frozen dataclass with these two members, which `Experiment` asks for."""

    @property
    def spec(self) -> BatchSpec:
        """T and B."""
        ...

    def build(self, env: Any, seed: int = 0, *, first_slot: int = 0, total_slots: int | None = None) -> Sampler:
        """The live sampler. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            first_slot: number of its first slot among those of several samplers, which addresses noise and seeds.
            total_slots: of all of them, over which ladders of epsilon are spread; None for B.
        """
        ...
