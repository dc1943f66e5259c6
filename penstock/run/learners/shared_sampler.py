"""One rank's share of a run's sampler; it reports and stores the joint results of the samplers of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.agents.agent import Agents
from penstock.core.batch import AnyBatch, MultiAgentBatch, SampleBatch
from penstock.core.errors import CheckpointError
from penstock.core.spec import Share
from penstock.learn.algorithm import TrainingStep, TrainingStepFn
from penstock.learn.comm import Comm, gathered
from penstock.learn.policy_set import AnyPolicy
from penstock.samplers.episodes import Episodes, join_episodes
from penstock.samplers.sampler import Divisible, Sampler
from penstock.samplers.trackers.evaluation import Evaluates, Evaluation

_A_BATCH = 1 << 32
"""More than the ends of a batch."""
_BY_RANK = "by_rank"
"""Key of the states of all ranks' samplers where they cannot be joined."""
_SUMMED = ("faults/", "env/", "sampler/passes", "group/runners")
"""Openings of the names of metrics that count; of others the mean over ranks is shown."""


def order_of_ends(batch: AnyBatch, episodes: Episodes) -> np.ndarray[Any, Any]:
    """Sort keys [E] that order episodes as a single learner would: with many agents the first of each environment, then
    the second, and so on; else the rows of their ends."""
    if isinstance(batch, MultiAgentBatch):
        slots = episodes.slot.tolist()
        return np.array([slots[:i].count(b) for i, b in enumerate(slots)], np.int64)
    ended = np.nonzero(np.asarray(batch.terminated) | np.asarray(batch.truncated))[0]
    return ended if len(ended) == len(episodes) else np.zeros(len(episodes), np.int64)


class SharedSampler(Evaluates):
    """A `Sampler` of one rank's slots: batches are its own; episodes, metrics and state are those of all ranks.

    `state_dict` and `load_state_dict` are called on all ranks at once.
    """

    def __init__(self, inner: Sampler, comm: Comm, slots: Sequence[slice]) -> None:
        self.inner, self._comm, self._slots = inner, comm, slots
        self.spec, self.batch_spec = inner.spec, inner.batch_spec
        self.cut_slots: list[int] = []
        self._metrics: dict[str, float] = {}
        self._batches, self._ended = 0, list[np.ndarray[Any, Any]]()

    @property
    def last_batch(self) -> SampleBatch | None:
        """The own batch collected last."""
        return getattr(self.inner, "last_batch", None)

    @property
    def dataset(self) -> Any:
        """Sampler that plays this rank's slots of a dataset once; None for a sampler of environments."""
        return getattr(self.inner, "dataset", None)

    def initialize(self, agents: Agents) -> dict[str, Any]:
        return self.inner.initialize(agents)

    def obtain_samples(self, itr: int) -> tuple[AnyBatch, Episodes]:
        """The own batch and the episodes that ended in it, by the own slots; `shared_step` numbers them over all."""
        batch, episodes = self.inner.obtain_samples(itr)
        self._ended.append(self._batches * _A_BATCH + order_of_ends(batch, episodes))
        self._batches += 1
        return batch, episodes

    @property
    def share(self) -> Share:
        """The own slots among those of all ranks."""
        return Share(self.first_slot, self._slots[-1].stop)

    @property
    def first_slot(self) -> int:
        """Number of the first own slot over all ranks."""
        return self._slots[self._comm.rank].start

    def evaluate(self, asked: Evaluation) -> Episodes:
        """Plays it on this rank."""
        return asked.by(self.inner)

    def ended(self, count: int) -> np.ndarray[Any, Any]:
        """[count] the rows in which the episodes of the batches since the last call ended; 0 where unknown."""
        found = np.concatenate([np.zeros(0, np.int64), *self._ended])
        self._batches, self._ended = 0, []
        return found if len(found) == count else np.zeros(count, np.int64)

    def metrics(self) -> dict[str, float]:
        """Metrics of all ranks after the last batch."""
        return self._metrics

    def blank_batch(self) -> SampleBatch:
        return self.inner.blank_batch()

    def state_dict(self) -> dict[str, Any]:
        """The state of one sampler of all slots, the same on every rank."""
        states = gathered(self._comm, self.inner.state_dict())
        return self.inner.join_states(states) if isinstance(self.inner, Divisible) else {_BY_RANK: states}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Inverse of `state_dict`, and of the state of one sampler of all slots.

        Raises:
            CheckpointError: it is of another number of slots, or of learners where it cannot be divided.
        """
        state_of_rank = state
        if _BY_RANK in state:
            states = state[_BY_RANK]
            if len(states) != len(self._slots):
                raise CheckpointError(
                    f"the checkpoint holds the samplers of {len(states)} learners, whose states cannot be divided "
                    f"anew; this run has run.learners={len(self._slots)}: go on with as many"
                )
            state_of_rank = states[self._comm.rank]
        elif isinstance(self.inner, Divisible):
            state_of_rank = self.inner.split_state(state, self._slots)[self._comm.rank]
        self.inner.load_state_dict(state_of_rank)
        cut = gathered(self._comm, list(self.inner.cut_slots))
        self.cut_slots = [b + at.start for found, at in zip(cut, self._slots) for b in found]

    def shutdown(self) -> None:
        self.inner.shutdown()

    def told(self, metrics: Sequence[dict[str, float]]) -> None:
        """Takes the metrics of every rank's sampler."""
        names = dict.fromkeys(name for one in metrics for name in one)
        for name in names:
            values = [one[name] for one in metrics if name in one]
            self._metrics[name] = sum(values) / (1 if name.startswith(_SUMMED) else len(values))


def shared_step(step: TrainingStepFn) -> TrainingStepFn:
    """An iteration of every rank at once: environment steps and episodes are those of all."""

    def of_all(policy: AnyPolicy, sampler: Any, itr: int) -> TrainingStep:
        local = step(policy, sampler, itr)
        played = local.episodes.numbered(sampler.first_slot)
        mine = {"steps": local.env_steps, "episodes": played.to_plain(), "metrics": sampler.inner.metrics()}
        told = gathered(policy.comm, {**mine, "ended": sampler.ended(len(local.episodes))})
        sampler.told([x["metrics"] for x in told])
        episodes = join_episodes([Episodes(**x["episodes"]) for x in told])
        episodes = episodes.sorted_by(np.concatenate([x["ended"] for x in told]))
        return local._replace(env_steps=sum(x["steps"] for x in told), episodes=episodes)

    return of_all
