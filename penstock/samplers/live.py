"""The live sampler over any EnvPool, with agents in this process or in its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.agents.agent import Agent, Agents
from penstock.core.batch import AnyBatch, SampleBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.core.protocols import require_members
from penstock.core.spec import WHOLE, BatchSpec, EnvSpec, Share
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map, tree_paths
from penstock.envs.make import EnvConfig
from penstock.envs.pools.bounds import OutOfBounds
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, from_plain, remembered
from penstock.envs.pools.pool import BatchColumns, EnvPool, EvaluationSource, OpenEpisode, PoolState, Source
from penstock.samplers.acting_agents import ActingAgents, Buffers, last_row
from penstock.samplers.collector import Server
from penstock.samplers.episodes import DISCOUNT, Episodes, join_episodes
from penstock.samplers.tensors.bounds import TensorBounds
from penstock.samplers.tensors.tracker import TensorEpisodeTracker, TensorStats
from penstock.samplers.traced_loop import loop
from penstock.samplers.trackers.evaluation import EVAL_SLOTS, Evaluates, Evaluation
from penstock.samplers.trackers.evaluation_episodes import EvaluationEpisodes, LoggedEvaluationEpisodes
from penstock.samplers.trackers.slots import EpisodeStats, SlotEpisodeTracker
from penstock.samplers.trackers.states import LiveState
from penstock.samplers.trackers.tracker import EpisodeTracker, LogEpisodeTracker

EVAL_T = 64
"""Rows of a batch of an evaluation."""


class LiveSampler(Evaluates):
    """A `Sampler` over a pool of environments.

    The batch that `obtain_samples` returns is a live buffer: the next call overwrites it.

    Args:
        discount: for the logged episode returns; None means 0.99. journal_steps: actions kept to resume an episode.
        server: runs the loop; None: this thread does. memory_fd: descriptor of shared memory for the batches. share:
            this sampler's slots, if several samplers share a run's.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        pool: Source,
        config: EnvConfig,
        seed: int,
        discount: float | None,
        journal_steps: int,
        *,
        server: Server | None = None,
        memory_fd: int | None = None,
        share: Share = WHOLE,
    ) -> None:
        require_members(pool, EnvPool if server is None else Source, "docs/writing-a-sampler.md")
        self.batch_spec, self.spec = batch_spec, pool.specs[0]
        self.info_keys = pool.info_keys
        """Keys of the env info in every batch."""
        self.pool, self._config, self._seed = pool, config, seed
        self._device = pool.device
        self._discount = DISCOUNT if discount is None else discount
        self._server, self._memory_fd, self._first_slot = server, memory_fd, share.first_slot
        if config.eval_in_training and pool.device is None:
            pool.close()
            raise ConfigError(
                f"run.eval_in='training' with {config.name}, whose evaluations have own environments; expected "
                "a simulator that answers with tensors: leave it out"
            )
        self._collect = loop() if server is None else server.serve
        seating = config.seated(self.spec)
        self.specs: Mapping[str, EnvSpec] = seating.by_id
        """The EnvSpec of each policy, by id; an environment of one agent has one, under `shared`."""
        try:
            self._installed = ActingAgents(seating, batch_spec, pool.info_keys, share)
        except ConfigError:
            pool.close()
            raise
        self._bounds: list[OutOfBounds] | list[TensorBounds] = [
            OutOfBounds(config, spec, share.first_slot, seats, policy if seating.many else "")
            for (policy, spec), seats in zip(self.specs.items(), pool.seats)
        ]
        B = batch_spec.B
        self._tracker: EpisodeTracker
        if pool.device is not None:
            self._bounds = [TensorBounds(config, self.spec, share.first_slot, pool.device)]
            self._tracker = TensorEpisodeTracker(B, self._discount, pool.device)
        elif seating.many:
            self._tracker = LogEpisodeTracker(seating, B)
        else:
            self._tracker = SlotEpisodeTracker(B, self._discount, journal_steps)
        self._training: Buffers[Source] | None = None
        self._evaluation: Buffers[EvaluationSource] | None = None
        self._evaluation_slots = 0, 0
        self._evaluation_calls: list[CallRecord] = []
        """The calls that every evaluation environment has had."""
        self._collected = False
        self.cut_slots: list[int] = []
        """Slots with an open episode that the last `load_state_dict` could not restore."""

    def initialize(self, agents: Agents, buffers: int = 1) -> dict[str, Any]:
        """Takes the agent that will act, or one per policy id, and allocates one or more batches.

        Args:
            buffers: number of batches filled in turn.

        Returns:
            examples of one step of one slot: obs, action, info and recurrent state, without leading dimensions; with
            many agents a dict of these by policy id.
        """
        installed = self._installed
        examples = installed.take(agents)
        try:
            acting = installed.by_id(installed.agents)
            self._training = Buffers(self.pool, acting, self.batch_spec, self._server, buffers, self._memory_fd)
        except MemoryError as error:
            T, B = self.batch_spec
            raise ConfigError(
                f"a batch of T={T}, B={B} does not fit into memory: {error}; use a smaller T or B"
            ) from error
        if self._evaluation is not None:  # its environments stay, and play these agents from now on
            self._evaluation = self._buffers_of(self._evaluation.pool)
        self._buffers = [self._training.filled(k) for k in range(buffers)]
        self._filled = self._buffers[0]
        self._tracker.attach(self._training.batches)
        self._limits = [
            [
                [] if isinstance(bounds, TensorBounds) else bounds.limits(batch)
                for bounds, batch in zip(self._bounds, batches)
            ]
            for batches in self._buffers
        ]
        return examples

    @property
    def agents(self) -> Sequence[Agent]:
        """The acting agents, one per policy in the order of `specs`. Raises ConfigError before `initialize`."""
        return self._installed.agents

    def obtain_samples(self, itr: int, version: int | None = None) -> tuple[AnyBatch, Episodes]:
        """The next T steps of every slot, and the episodes that ended in them.

        Args:
            itr: number of the batch from 0; it addresses the noise.
            version: number of the agents' parameters, which the batch records; None means `itr`.

        Raises:
            EnvWorkerError: an environment raised or broke its contract.
        """
        version = itr if version is None else version
        self._collect(*self._begun(itr, version))
        self._complete(version)
        batches, buffer = self._filled, itr % len(self._buffers)
        for bounds, limits, batch in zip(self._bounds, self._limits[buffer], batches):
            if isinstance(bounds, TensorBounds):
                bounds.look(batch)
                continue
            bad = [x for wrong, obs, bound in limits if np.count_nonzero(x := wrong(obs, bound))]
            if bad:
                bounds.found(batch, bad)
        if not self._collected:
            self._collected = True
            self._tracker.begin(self.pool, buffer)
        episodes = self._tracker.record(self.pool, buffer)
        return self._installed.together(batches) if self._installed.many else batches[0], episodes

    def fill(self, itr: int, version: int | None = None) -> AnyBatch:
        """Fills batch `itr` without tracking episodes; for a runner, whose driver tracks them."""
        version = itr if version is None else version
        self._collect(*self._begun(itr, version))
        self._complete(version)
        return self._installed.together(self._filled) if self._installed.many else self._filled[0]

    def _begun(self, itr: int, version: int) -> tuple[Any, ...]:
        """The arguments of the loop that fills the buffers of batch `itr`."""
        training = self._started()
        buffer = itr % len(self._buffers)
        self._filled = self._buffers[buffer]
        if self.pool.takes_turns:  # before the loop: turns left open by the last batch bring their own
            for batch in self._filled:
                batch.version[...] = version
        noise = Noise(self._seed, Purpose.ACT, itr, self._first_slot)
        return self.pool, training.agents, self._filled, training.views[buffer], training.states, noise

    def _complete(self, version: int) -> None:
        """Writes the version, and invalidates slots with non-finite observations."""
        for policy, batch in enumerate(self._filled):
            if not self.pool.takes_turns:
                batch.version[...] = version
            if self._config.checks != "off" and self._device is None:  # a pool of tensors checks this itself
                while (bad := self._not_finite(policy, batch)) is not None:
                    self._started().forget_slots(self.pool.invalidate(*bad))

    def evaluate(self, asked: Evaluation) -> Episodes:
        """Plays an evaluation; restarts it if a worker or runner is lost, to play the same episodes."""
        while (episodes := self._evaluated(asked)) is None:
            pass  # repeated losses use up the budget of replacements
        if self._config.eval_in_training:  # whose episodes the evaluation has cut
            self.pool.set_state(self.pool.get_state(), self._filled, [])
        return episodes

    def _evaluated(self, asked: Evaluation) -> Episodes | None:
        """The episodes of an evaluation; None if it broke."""
        agents, itr = self._installed.agents, asked.itr
        B = self.pool.evaluation_slots(min(asked.episodes, asked.slots))
        buffers = self.evaluation_buffers(B)
        batches, seating = buffers.filled(0), self._config.for_evaluation.seated(self.spec)
        seed = evaluation_seed(self._seed, itr)
        left = [asked.episodes // B + (b < asked.episodes % B) for b in range(B)]
        purpose = Purpose.EVALUATE_GREEDILY if asked.deterministic else Purpose.EVALUATE
        noisy = not asked.deterministic or any(agent.evaluates_with_noise for agent in agents)
        episodes, chunk, again = Episodes(), 0, 0
        while sum(left):
            if seating.many:
                play = LoggedEvaluationEpisodes(buffers.pool, left, seating)
                buffers.pool.limit(asked.max_steps)
            else:
                play = EvaluationEpisodes(left, self._sums(buffers.pool, B), asked.max_steps)
            buffers.pool.restart(seed + (again << 20), left)
            buffers.set_states(None)
            while not play.over:
                self.fill_evaluation(Noise(seed, purpose, (itr << 24) + chunk) if noisy else None)
                if buffers.pool.broken:
                    return None
                for bounds, batch in zip(self._bounds, batches):
                    bounds.look(batch, training=False)
                play.add(batches)
                chunk += 1
                if asked.given_up:
                    return join_episodes([episodes, play.found])
            episodes, left, again = join_episodes([episodes, play.found]), play.left, again + 1
        return episodes

    def evaluation_buffers(self, B: int, first_slot: int = 0) -> Buffers[EvaluationSource]:
        """The buffers of evaluations with B slots; kept until their pool breaks, as environments are slow to make.

        Args:
            first_slot: number of their first slot, if several samplers evaluate together.
        """
        kept = self._evaluation
        if kept is not None and not kept.pool.broken and self._evaluation_slots == (B, first_slot):
            return kept
        self._forget_evaluation()  # making the next one may fail
        pool = self.pool.for_evaluation(B, first_slot) if first_slot else self.pool.for_evaluation(B)
        self._evaluation_slots = B, first_slot
        self._evaluation = made = self._buffers_of(pool)
        if self._evaluation_calls:
            pool.recall([self._evaluation_calls] * B)
        return made

    def _buffers_of(self, pool: EvaluationSource) -> Buffers[EvaluationSource]:
        acting = self._installed.by_id(self._installed.agents)
        return Buffers(pool, acting, BatchSpec(EVAL_T, self._evaluation_slots[0]), self._server)

    @property
    def evaluation_calls(self) -> Sequence[CallRecord]:
        return self._evaluation_calls

    @property
    def calls_of_envs(self) -> Sequence[Sequence[CallRecord]]:
        return self.pool.calls or [[] for _ in range(self.batch_spec.B)]

    def call_envs(self, call: EnvCall, slots: Sequence[int], evaluation: bool = False) -> dict[int, Answer]:
        self._started()
        if not evaluation:
            return dict(zip(slots, self.pool.call(call, slots)))
        known, first = self._evaluation_slots
        B = known or self.pool.evaluation_slots(EVAL_SLOTS)
        while True:
            pool = self.evaluation_buffers(B, first).pool
            answers = pool.call(call, range(B))
            if not pool.broken:
                break
        if all(x.counts and x.status != "raised" for x in answers):
            if call.kind != "get":
                self._evaluation_calls = remembered(self._evaluation_calls, call.record(Answer("done")))
        elif any(x.counts for x in answers) and call.kind != "get":
            self._forget_evaluation()
        return dict(enumerate(answers))

    def take_evaluation_calls(self, calls: Sequence[CallRecord]) -> None:
        """Sets the calls that every evaluation environment has had."""
        if list(calls) != self._evaluation_calls:
            self._evaluation_calls = list(calls)
            self._forget_evaluation()

    def _forget_evaluation(self) -> None:
        """Makes the next evaluation create new environments."""
        kept, self._evaluation = self._evaluation, None
        if kept is not None:
            kept.pool.close()

    @property
    def evaluation_pool(self) -> EvaluationSource:
        """The pool of the last `evaluation_buffers`."""
        assert self._evaluation is not None
        return self._evaluation.pool

    def fill_evaluation(self, noise: Noise | None) -> AnyBatch:
        """The next EVAL_T rows, in the last buffers of `evaluation_buffers`; None: agents act without noise."""
        buffers = self._evaluation
        assert buffers is not None
        batches = buffers.filled(0)
        self._collect(buffers.pool, buffers.agents, batches, buffers.views[0], buffers.states, noise)
        return self._installed.together(batches, buffers.pool.seats)

    def buffer(self, itr: int) -> AnyBatch:
        """The memory of batch `itr`."""
        return self._installed.together(self._buffers[itr % len(self._buffers)])

    def agent_states(self) -> Tree:
        """[B, ...] recurrent states after the last batch, as arrays, by policy id."""
        return self._started().get_states()

    @property
    def last_batch(self) -> AnyBatch:
        """The live buffer, as the last `obtain_samples` left it."""
        return self._installed.together(self._filled)

    def blank_batch(self) -> AnyBatch:
        """A batch of zeros in which every row is valid, for timing."""
        return self._installed.blank_batch()

    def shutdown(self) -> None:
        """Closes the environments. A second call does nothing."""
        self._installed.close()
        self._training = None
        if self._evaluation is not None:
            self._evaluation.pool.close()
        self.pool.close()
        if self._server is not None:
            self._server.close()

    def metrics(self) -> dict[str, float]:
        """Waits, faults and steps out of bounds since the run began, by logged name."""
        served = {} if self._server is None else self._server.metrics()
        count = sum(bounds.count for bounds in self._bounds)
        outside = {"env/out_of_bounds": float(count)} if count else {}
        return {**self.pool.metrics(), **served, **outside}

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the sampler between two batches, as plain data, arrays and tensors."""
        training = self._started()
        by_id = self._installed.by_id
        return LiveState(
            collected=self._collected,
            pool=self.pool.get_state(),
            row=by_id([last_row(batch) for batch in self._filled]),
            agent_states=training.get_states(),
            **self._tracker.state_dict(),
            out_of_bounds=by_id([bounds.count for bounds in self._bounds]),
            evaluation_calls=self._evaluation_calls,
        ).to_plain()

    def load_state_dict(self, state: dict[str, Any], itr: int = 0) -> None:
        """Inverse of `state_dict`, after `initialize`; `cut_slots` then lists the slots that it could not restore.

        Args:
            itr: number of the last batch; its buffer gets the last row, as others may hold waiting batches.
        """
        self.take_evaluation_calls(from_plain([state.get("evaluation_calls", ())])[0])
        if not state["collected"]:
            if any(calls := from_plain(state["pool"].get("calls", ()))):
                self.pool.recall(calls)
            return
        self._filled = self._buffers[itr % len(self._buffers)]
        rows = state["row"]
        if rows.keys() != self.specs.keys():
            raise CheckpointError(
                f"the checkpoint holds rows of {sorted(rows)}; this sampler's policies are {list(self.specs)}"
            )
        for row, batch, seats in zip((rows[policy] for policy in self.specs), self._filled, self.pool.seats):
            if row["first"].shape != batch.first[-1].shape:
                raise CheckpointError(
                    f"the checkpoint holds {len(row['first']) // seats} slots; this sampler has B={self.batch_spec.B}"
                )
        self._collected = True
        self._tracker.load_state_dict(state)
        kept = LiveState.from_plain(state)
        for policy, bounds in zip(self.specs, self._bounds):
            bounds.count = kept.out_of_bounds[policy]
        self.cut_slots = self.resume(kept.row, kept.agent_states, kept.pool, self._tracker.open_episodes())

    join_states, split_state = staticmethod(LiveState.join_states), staticmethod(LiveState.split_state)

    def resume(
        self,
        rows: Mapping[str, dict[str, Tree]],
        agent_states: Mapping[str, Tree] | None,
        pool: PoolState,
        episodes: Sequence[OpenEpisode | None],
    ) -> list[int]:
        """Makes the next batch continue from these rows and states; returns the slots not restored.

        Args:
            rows: by policy id, as `last_row` returns them. agent_states: [B, ...] by policy id; None: the states
                before an episode. episodes: the open episode of each slot, if known.
        """
        training = self._started()
        for policy, batch in zip(self.specs, self._filled) if self._device is None else ():
            for name, leaves in rows[policy].items():
                tree_assign(getattr(batch, name), -1, leaves)
        training.set_states(agent_states)
        return self.pool.set_state(pool, self._filled, episodes)

    def _sums(self, pool: BatchColumns, B: int) -> EpisodeStats | TensorStats:
        """Running sums of B slots, in the memory (arrays or tensors) of the pool's batches."""
        if pool.device is not None:
            return TensorStats(B, self._discount, pool.device)
        return EpisodeStats(B, self._discount)

    def _started(self) -> Buffers[Source]:
        """Raises ConfigError before `initialize` and after `shutdown`."""
        if self._training is None:
            _ = self._installed.agents
            raise ConfigError("initialize() has failed; build another sampler")
        return self._training

    def _not_finite(self, policy: int, batch: SampleBatch) -> tuple[int, int, str] | None:
        """Slot, row and message of the first non-finite observation missed by sampled checks, or None."""
        if all(x.dtype.kind != "f" or b"\0" not in np.isfinite(x).tobytes() for x in tree_leaves(batch.obs)):
            return None
        seats, seating = self.pool.seats[policy], self._installed.seating
        for path, x in zip(tree_paths(batch.obs), tree_leaves(batch.obs)):
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                t, b, *element = np.argwhere(~np.isfinite(x))[0].tolist()
                action = tree_map(lambda a, t=t, b=b: a[t, b].tolist(), batch.prev_action)
                whose = f", policy {seating.policies[policy]!r}, seat {b % seats}" if seating.many else ""
                message = (
                    f"slot {self._first_slot + b // seats} of {self._config.name}{whose}, row {t} of the batch: "
                    f"obs{path}{element}: got {x[t, b][tuple(element)]}, expected a finite number; last action "
                    f"{action}; env_checks='always' names the episode and step"
                )
                return b // seats, max(t - 1, 0), message
        return None


def evaluation_seed(seed: int, itr: int) -> int:
    """Seed of the evaluation after batch `itr` of a run with this seed."""
    return seed + ((itr + 1) << 40)
