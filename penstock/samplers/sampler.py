"""Sampler: the Protocol between collecting batches and learning from them, and the Protocol of its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from penstock.agents.agent import Agents
from penstock.core.batch import AnyBatch
from penstock.core.config import known_names
from penstock.core.errors import ConfigError
from penstock.core.protocols import required
from penstock.core.spec import WHOLE, BatchSpec, EnvSpec, Share
from penstock.samplers import SAMPLERS
from penstock.samplers.episodes import Episodes
from penstock.workers.shares import even_split


class Sampler(Protocol):
    """A live sampler: `initialize(agent)`, then `obtain_samples(itr)` as often as wanted, then `shutdown()`.

    `Trainer` refuses one that lacks a member.
    """

    spec: EnvSpec
    """EnvSpec of the only, or first, policy; `specs` has all of them, by policy id."""
    batch_spec: BatchSpec
    """T, and B environments: a policy's batch has B times its seats columns."""
    cut_slots: list[int]
    """Slots with an open episode that the last `load_state_dict` could not restore."""

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
            itr: addresses the episodes' seeds and the noise. give_up: polled now and then; once it returns True, the
                evaluation ends with the episodes finished so far.
            slots: largest number of environments side by side. max_steps: steps after which an episode is cut; it
                counts with its return so far.
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
        """Inverse of `state_dict`, after `initialize`; `cut_slots` then lists the slots that it could not restore."""

    def shutdown(self) -> None:
        """Closes environments and processes. A second call does nothing."""


@runtime_checkable
class Divisible(Protocol):
    """A live sampler with a state that can be split among samplers of parts of its slots, as learners have them.

    Without this, a run resumes only with the same number of learners.
    """

    def join_states(self, states: Sequence[dict[str, Any]], /) -> dict[str, Any]:
        """Returns the state of one sampler of all slots, from those of samplers of consecutive ones, in order."""
        ...

    def split_state(self, state: dict[str, Any], slots: Sequence[slice], /) -> list[dict[str, Any]]:
        """Splits the state of one sampler of all slots into those of samplers of these slots.

        Args:
            slots: consecutive, from 0. Counts since the run began, such as faults, go to the first.

        Raises:
            CheckpointError: the state is of another number of slots.
        """
        ...


@runtime_checkable
class SamplerSettings(Protocol):
    """Settings of a sampler: a frozen dataclass that inherits this class, writes `build`, and answers what differs.

    Other members are asked where a run needs to know its sampler; they suit one that plays T steps of B slots here.
    """

    __new__ = known_names

    kept: ClassVar[tuple[str, ...]] = ()
    """Fields, besides T and B, that determine the contents of batches; the rest affect only placement and speed."""
    inner: Any | None = None
    """Settings of the sampler inside this one; None: there is none."""
    runners: int = 0
    """Actors that have an `inner` sampler each; 0: there are none."""
    workers: int = 0
    """Processes that step environments."""
    groups: int = 0
    """Groups of slots that alternate; 0: all step at once."""
    depth: int = 0
    """Batches that it may be ahead of the learner."""
    mode: Literal["rounds", "ready"] = "rounds"
    """`ready`: a batch has the slots that are ready first; `rounds`: it has all slots."""
    object_store_mb: int = 0
    """Shared memory in MB that it needs besides its batches."""
    hosts_eval_env: ClassVar[bool] = False
    """True: its evaluations play in `EnvConfig.evaluation`. False: the run itself plays an `eval_env`. Read from the
    innermost sampler."""

    @property
    def spec(self) -> BatchSpec:
        """T and B, by default the fields of these names."""
        own: Any = self
        return BatchSpec(own.T, own.B)

    @required
    def build(self, env: Any, seed: int = 0, *, share: Share = WHOLE) -> Sampler:
        """The live sampler. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            share: its slots among those of several samplers; by default they are all there are.
        """
        ...

    def start_ahead(self) -> None:
        """Called before the environment is checked: starts what `build` will need in any case."""

    @property
    def name(self) -> str:
        """The name that the command line knows, as in `cpu` or `module:NAME`."""
        path = f"{type(self).__module__}:{type(self).__qualname__}"
        return next((known for known, at in SAMPLERS.items() if at == path), path)

    @property
    def described(self) -> str:
        """In words, as in `cpu with 2 workers` or `runners: 4 on processes, 16 slots each, serial`."""
        return self.name.rpartition(":")[2]

    @property
    def cores(self) -> int:
        """Cores that it and the learner keep busy."""
        return 1

    def sized(self, spec: BatchSpec) -> Any:
        """The settings with this T and B, inner sampler included; fewer workers and groups where B demands it.

        Raises:
            ConfigError: B cannot be divided among runners.
        """
        own: Any = self
        return replace(own, **spec._asdict()) if self.inner is None else replace(own, inner=self.inner.sized(spec))

    def shares(self, learners: int) -> list[Any]:
        """The settings of each learner's sampler: its slots, and of worker processes or runners as even a share.

        Raises:
            ConfigError: there are fewer slots or runners than learners, or batches are of any runner.
        """
        own: Any = self
        if self.inner is not None:
            return [replace(own, inner=inner) for inner in self.inner.shares(learners)]
        T, B = self.spec
        if learners > B:
            raise ConfigError(
                f"run.learners={learners} with sampler.B={B}; each learner needs a slot of its own: use "
                f"run.learners<={B}, or sampler.B>={learners}"
            )
        return [self.sized(BatchSpec(T, n)) for n in even_split(B, learners)]

    def with_discount(self, discount: float | None) -> Any:
        """The settings, its own or those inside it, with this discount where they have None."""
        own: Any = self
        if self.inner is not None:
            return replace(own, inner=self.inner.with_discount(discount))
        follows = discount is not None and "discount" in self.kept and own.discount is None
        return replace(own, discount=discount) if follows else self

    def content(self) -> dict[str, Any]:
        """Settings that determine the contents of batches; a sampler with equal content can continue the run."""
        kept = {key: getattr(x, key) for x in (self.inner or self, self) for key in x.kept}
        usual = {"mode": self.mode, "depth": 0, "weights": "exact", "asynchronous": False}
        return {**self.spec._asdict(), **usual, **kept}

    def in_place_of(self, other: SamplerSettings) -> Any:
        """The settings with what decides the content of a batch as in `other`; one of the same class is itself."""
        if type(other) is type(self):
            return other
        own: Any = self
        source = (other.inner or other) if self.inner is None else other
        changes = {key: getattr(source, key) for key in self.kept if key in source.kept}
        if self.inner is not None:
            changes["inner"] = self.inner.in_place_of(other.inner or other)
        return replace(own, **changes)
