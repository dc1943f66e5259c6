"""The live sampler whose agent runs in this process, over any EnvPool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableSequence
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import CheckpointError, ConfigError, EnvContractError
from penstock.core.noise import Purpose
from penstock.core.spec import BatchSpec, allocate
from penstock.core.tree import tree_assign, tree_leaves, tree_map, tree_paths
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import EnvPool
from penstock.envs.pools.serial import SerialPool
from penstock.samplers.collector import Noise
from penstock.samplers.episodes import Episodes, EpisodeStats, Journal, join_episodes
from penstock.samplers.stage import Crew, Stage, examples

_EVAL_T = 64
_EVAL_B = 16
_EVAL_MAX_STEPS = 200_000


class LiveSampler:
    """`initialize(agent)`, then `obtain_samples(itr)` as often as wanted, then `shutdown()`.

    The batch that `obtain_samples` returns is a live buffer: the next call overwrites it.

    Args:
        device: where the acting agent is; None for where its parameters are.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        pool: EnvPool,
        config: EnvConfig,
        seed: int,
        discount: float,
        journal_steps: int,
        crew: Crew | None = None,
        device: str | None = None,
    ) -> None:
        self.batch_spec, self.spec = batch_spec, pool.spec
        self._pool, self._config, self._seed, self._discount = pool, config, seed, discount
        self._crew = crew or Crew(lambda B: SerialPool(config, seed, slice(0, B), evaluation=True))
        self._stats = EpisodeStats(batch_spec.B, discount)
        self._journal = Journal(batch_spec.B, journal_steps)
        self._device = device
        self._agent: Agent | None = None
        self._closed = False
        self._stage: Stage | None = None
        self._eval_stage: Stage | None = None
        self._collected = False
        self.cut_slots: list[int] = []
        """Slots whose open episode could not be restored by the last `load_state_dict`."""

    def initialize(self, agent: Agent, buffers: int = 1) -> dict[str, Any]:
        """Takes the agent that will act and allocates the batch, or several that are filled in turn.

        Returns:
            examples of one step of one slot: obs, action, info and recurrent state, without leading dimensions.
        """
        if agent.spec != self.spec:
            raise ConfigError(f"the agent was built for {agent.spec}; this sampler's environment has {self.spec}")
        self._agent = agent
        agent.set_slots(self.batch_spec.B)
        try:
            self._stage = Stage(self._pool, agent, self.batch_spec, self._crew, buffers, self._acts_on(agent))
        except MemoryError as error:
            T, B = self.batch_spec
            raise ConfigError(
                f"a batch of T={T}, B={B} does not fit into memory: {error}; use a smaller T or B"
            ) from error
        self._batch = self._stage.batches[0]
        info, state = examples(agent, self.spec)
        one = tree_map(lambda x: x[0], allocate(self.spec.obs, 1)), tree_map(lambda leaf: leaf.null(), self.spec.action)
        return {"obs": one[0], "action": one[1], "info": info, "state": state}

    def obtain_samples(self, itr: int, version: int | None = None) -> tuple[SampleBatch, Episodes]:
        """The next T steps of every slot, and the episodes that ended in them.

        Args:
            itr: number of the batch from 0; it addresses the noise.
            version: of the agent's parameters, for the record; `itr` if none is given.

        Raises:
            EnvWorkerError: an environment raised or broke its contract.
        """
        agent, stage = self._agent_or_raise(), self._stage
        assert stage is not None
        buffer = itr % len(stage.batches)
        batch = self._batch = stage.batches[buffer]
        noise = Noise(self._seed, Purpose.ACT, itr)
        self._crew.fill(self._pool, agent, batch, stage.views[buffer], stage.states, noise)
        batch.version[...] = itr if version is None else version
        if self._config.checks != "off":
            while (bad := _not_finite(batch, self._config)) is not None:
                if self._crew.refuse is None:
                    raise EnvContractError(bad[2])
                stage.forget_slots(self._crew.refuse(self._pool, *bad))
        if not self._collected:
            self._begin()
        self._journal.record(batch)
        return batch, self._stats.update(batch)

    def evaluate_agent(
        self, itr: int, episodes: int = 20, deterministic: bool = True, give_up: Callable[[], bool] | None = None
    ) -> Episodes:
        """Exactly `episodes` finished episodes in environments of their own: the first k of each slot.

        Counting whichever end first would favour short episodes. Training environments, noise and state are not
        touched, and every evaluation has episodes of its own.

        Args:
            itr: addresses the episodes' seeds and the noise, so that a resumed run evaluates on the same ones.

            give_up: asked every 64 steps; once it is True, the episodes that have ended are all there are.

        An environment without a time limit may never end an episode: after 200,000 steps of each slot a warning
        says so, and the episodes that did end are all there are.
        """
        if episodes < 1:
            raise ConfigError(f"evaluate_agent(episodes={episodes}); expected at least 1")
        agent = self._agent_or_raise()
        B = self._crew.evaluation_slots or min(episodes, _EVAL_B)
        counts = [episodes // B + (b < episodes % B) for b in range(B)]
        seed = self._seed + ((itr + 1) << 40)
        stage = self._evaluation_stage(agent, B)
        stage.pool.restart(seed, counts)
        stage.forget()
        batch, views = stage.batches[0], stage.views[0]
        stats, found, chunk = EpisodeStats(B, self._discount), Episodes(), 0
        while len(found) < episodes and chunk * _EVAL_T < _EVAL_MAX_STEPS:
            noise = None if deterministic else Noise(seed, Purpose.EVALUATE, (itr << 24) + chunk)
            self._crew.fill(stage.pool, agent, batch, views, stage.states, noise)
            found = join_episodes([found, stats.update(batch)]).first_of_each_slot(counts)
            chunk += 1
            if give_up is not None and give_up():
                return found
        if len(found) < episodes:
            warnings.warn(
                f"evaluation gave up with {len(found)} of {episodes} episodes: some slot has not ended one in "
                f"{_EVAL_MAX_STEPS:,} steps; give {self._config.name} a time limit",
                stacklevel=2,
            )
        return found

    @property
    def last_batch(self) -> SampleBatch:
        """The live buffer, as the last `obtain_samples` left it."""
        return self._batch

    def blank_batch(self) -> SampleBatch:
        """A batch of zeros in which every row is valid, for timing."""
        batch = allocate_batch(self.spec, self.batch_spec, *examples(self._agent_or_raise(), self.spec))
        batch.valid[...] = True
        return batch

    def shutdown(self) -> None:
        """Closes the environments. A second call does nothing."""
        self._agent, self._closed = None, True
        for stage in (self._stage, self._eval_stage):
            if stage is not None:
                stage.pool.close()
        self._pool.close()
        self._crew.close()

    @property
    def info_keys(self) -> tuple[str, ...]:
        """Keys of the env info in every batch."""
        return self._pool.info_keys

    def watched_by(self, mark: MutableSequence[int]) -> None:
        """Has a SerialSampler's environments say in `mark` what they are doing; others watch their workers themselves."""
        if isinstance(self._pool, SerialPool):
            self._pool.mark = mark

    def metrics(self) -> dict[str, float]:
        """Waits and faults since the run began, by the names under which they are logged."""
        return self._crew.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches, as plain data, arrays and tensors."""
        row = self._batch
        assert self._stage is not None
        return {
            "collected": self._collected,
            "pool": self._pool.get_state(),
            "row": {
                "obs": tree_map(lambda x: x[-1].copy(), row.obs),
                "first": row.first[-1].copy(),
                "prev_action": tree_map(lambda x: x[-1].copy(), row.prev_action),
                "prev_reward": row.prev_reward[-1].copy(),
            },
            "agent_states": self._stage.get_states(),
            "faults": dict(self._crew.faults),
            "stats": self._stats.state_dict(),
            "journal": self._journal.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, after `initialize`; `cut_slots` then names what could not be restored."""
        if not state["collected"]:
            return
        row, batch = state["row"], self._batch
        if row["first"].shape != batch.first[-1].shape:
            raise CheckpointError(
                f"the checkpoint holds {len(row['first'])} slots; this sampler has B={self.batch_spec.B}"
            )
        for name in ("obs", "prev_action"):
            tree_assign(getattr(batch, name), -1, row[name])
        batch.first[-1], batch.prev_reward[-1] = row["first"], row["prev_reward"]
        self._collected = True
        self._stats.load_state_dict(state["stats"])
        self._journal.load_state_dict(state["journal"])
        self._agent_or_raise()
        assert self._stage is not None
        self._stage.set_states(state["agent_states"])
        self._crew.faults.clear()
        self._crew.faults.update(state["faults"])
        actions = [self._journal.actions(b) for b in range(self.batch_spec.B)]
        self.cut_slots = self._pool.set_state(state["pool"], batch, actions)

    def _agent_or_raise(self) -> Agent:
        if self._agent is None:
            raise ConfigError(
                "the sampler was shut down; build another"
                if self._closed
                else "the sampler has no agent yet; call sampler.initialize(policy.agent) first"
            )
        return self._agent

    def _evaluation_stage(self, agent: Agent, B: int) -> Stage:
        """Where evaluations of B slots are played; kept, since making environments takes long."""
        if self._eval_stage is None or len(self._eval_stage.batches[0].first[0]) != B:
            if self._eval_stage is not None:
                stale, self._eval_stage = self._eval_stage, None  # making the next one may fail
                stale.pool.close()
            pool = self._crew.evaluation(B)
            self._eval_stage = Stage(pool, agent, BatchSpec(_EVAL_T, B), self._crew, 1, self._acts_on(agent))
        return self._eval_stage

    def _acts_on(self, agent: Agent) -> torch.device:
        return agent_device(agent) if self._device is None else torch.device(self._device)

    def _begin(self) -> None:
        """What happened before the first batch belongs to each slot's first episode."""
        self._collected = True
        for b, (actions, rewards) in enumerate(self._pool.warmup()):
            self._stats.begin(b, rewards)
            self._journal.begin(b, tree_map(lambda *xs: np.stack(xs), *actions) if actions else None)


def _not_finite(batch: SampleBatch, config: EnvConfig) -> tuple[int, int, str] | None:
    """Slot, row and message of a NaN or infinite observation that the sampled checks missed: no learner must see it."""
    for path, x in zip(tree_paths(batch.obs), tree_leaves(batch.obs)):
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            t, b, *element = np.argwhere(~np.isfinite(x))[0].tolist()
            action = tree_map(lambda a, t=t, b=b: a[t, b].tolist(), batch.prev_action)
            message = (
                f"slot {b} of {config.name}, row {t} of the batch: obs{path}{element}: got {x[t, b][tuple(element)]}, "
                f"expected a finite number; last action {action}; env_checks='always' names the episode and step"
            )
            return b, max(t - 1, 0), message
    return None
