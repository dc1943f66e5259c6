"""The live sampler whose agent runs in this process or is run by workers, over any EnvPool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.agents.agent import Agent
from penstock.core.batch import SampleBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.core.protocols import require_members
from penstock.core.spec import BatchSpec
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map, tree_paths
from penstock.envs.bounds import OutOfBounds
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import EnvPool, OpenEpisode, PoolState, slots_of
from penstock.samplers.collector import Server
from penstock.samplers.episodes import DISCOUNT, Episodes, EpisodeStats, Journal, JournalViews, join_episodes
from penstock.samplers.installed import Buffers, Installed, last_row
from penstock.samplers.traced import loop

EVAL_T = 64
"""Rows of a batch of an evaluation."""
EVAL_SLOTS, EVAL_MAX_STEPS = 16, 27_000
"""Defaults of an evaluation. 27,000 steps are the 108,000 frames after which Atari's protocol ends an episode."""


class LiveSampler:
    """A `Sampler` over a pool of environments.

    The batch that `obtain_samples` returns is a live buffer: the next call overwrites it.

    Args:
        discount: of the logged episode returns, None for 0.99. journal_steps: rows of actions kept for replays.
        server: runs the loop; None for this thread. slab: descriptor of the shared memory to hold the batches.
        first_slot: number of the first slot among `total_slots` of several samplers.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        pool: EnvPool,
        config: EnvConfig,
        seed: int,
        discount: float | None,
        journal_steps: int,
        *,
        server: Server | None = None,
        slab: int | None = None,
        first_slot: int = 0,
        total_slots: int | None = None,
    ) -> None:
        require_members(pool, EnvPool, "docs/writing-a-sampler.md")
        self.batch_spec, self.spec = batch_spec, pool.specs[0]
        self.info_keys = pool.info_keys
        """Keys of the env info in every batch."""
        self.pool, self._config, self._seed = pool, config, seed
        self._discount = DISCOUNT if discount is None else discount
        self._server, self._slab, self._first_slot = server, slab, first_slot
        self._collect = loop() if server is None else server.serve
        try:
            self._installed = Installed(self.spec, batch_spec, pool.info_keys, first_slot, total_slots)
        except ConfigError:
            pool.close()
            raise
        self._bounds = OutOfBounds(config, self.spec, first_slot)
        self._stats = EpisodeStats(batch_spec.B, self._discount)
        self._journal = Journal(batch_spec.B, journal_steps)
        self._training: Buffers | None = None
        self._evaluation: Buffers | None = None
        self._evaluation_first = 0
        self._collected = False
        self.cut_slots: list[int] = []
        """Slots whose open episode could not be restored by the last `load_state_dict`."""

    def initialize(self, agent: Agent, buffers: int = 1) -> dict[str, Any]:
        """Takes the agent that will act and allocates the batch, or several that are filled in turn.

        Returns:
            examples of one step of one slot: obs, action, info and recurrent state, without leading dimensions.
        """
        shown = self._installed.take(agent)
        try:
            self._training = Buffers(self.pool, agent, self.batch_spec, self._server, buffers, self._slab)
        except MemoryError as error:
            T, B = self.batch_spec
            raise ConfigError(
                f"a batch of T={T}, B={B} does not fit into memory: {error}; use a smaller T or B"
            ) from error
        self._batch = self._training.batches[0]
        self._journal_views = [JournalViews(batch) for batch in self._training.batches]
        self._limits = [self._bounds.limits(batch) for batch in self._training.batches]
        return shown

    def obtain_samples(self, itr: int, version: int | None = None) -> tuple[SampleBatch, Episodes]:
        """The next T steps of every slot, and the episodes that ended in them.

        Args:
            itr: number of the batch from 0; it addresses the noise.
            version: of the agent's parameters, for the record; `itr` if none is given.

        Raises:
            EnvWorkerError: an environment raised or broke its contract.
        """
        batch, loop_over = self._next(itr)
        self._collect(*loop_over)
        self._complete(batch, itr if version is None else version)
        buffer = itr % len(self._journal_views)
        bad = [x for wrong, obs, bound in self._limits[buffer] if np.count_nonzero(x := wrong(obs, bound))]
        if bad:
            self._bounds.found(batch, bad)
        if not self._collected:
            self._begin(self._journal_views[buffer])
        self._journal.record(self._journal_views[buffer])
        return batch, self._stats.update(batch)

    def fill(self, itr: int, version: int | None = None) -> SampleBatch:
        """The same batch, and no account of it: for a runner of a group, whose driver keeps that."""
        batch, loop_over = self._next(itr)
        self._collect(*loop_over)
        self._complete(batch, itr if version is None else version)
        return batch

    def evaluate_agent(
        self,
        itr: int,
        episodes: int = 20,
        deterministic: bool = True,
        give_up: Callable[[], bool] | None = None,
        slots: int = EVAL_SLOTS,
        max_steps: int = EVAL_MAX_STEPS,
    ) -> Episodes:
        """Exactly `episodes` finished episodes in environments of their own: the first k of each slot.

        Counting whichever end first would favour short episodes. Training environments, noise and state are not
        touched, and every evaluation has episodes of its own.

        Args:
            itr: addresses the episodes' seeds and the noise, so that a resumed run evaluates on the same ones.
            give_up: asked every 64 steps; once it is True, the episodes that have ended are all there are.
            slots: environments side by side, at most. Native batched environments have as many as in training.
            max_steps: an episode is cut there, neither terminated nor longer, and counts with its return so far.
        """
        if episodes < 1 or slots < 1 or max_steps < 1:
            raise ConfigError(
                f"evaluate_agent(episodes={episodes}, slots={slots}, max_steps={max_steps}); expected 1 or more of each"
            )
        agent = self._installed.agent
        B = self.pool.evaluation_slots(min(episodes, slots))
        own = self.evaluation_buffers(B)
        batch = own.batches[0]
        seed, left = evaluation_seed(self._seed, itr), [episodes // B + (b < episodes % B) for b in range(B)]
        purpose = Purpose.EVALUATE_GREEDILY if deterministic else Purpose.EVALUATE
        noisy = not deterministic or agent.evaluates_with_noise
        found, chunk, again = Episodes(), 0, 0
        while sum(left):
            own.pool.restart(seed + (again << 20), left)
            own.set_states(None)
            play = _Play(left, self._discount, max_steps)
            while not play.over:
                self.fill_evaluation(Noise(seed, purpose, (itr << 24) + chunk) if noisy else None)
                self._bounds.look(batch, training=False)
                play.add(batch)
                chunk += 1
                if give_up is not None and give_up():
                    return join_episodes([found, play.found])
            found, left, again = join_episodes([found, play.found]), play.left, again + 1
        return found

    def evaluation_buffers(self, B: int, first_slot: int = 0) -> Buffers:
        """The buffers of evaluations with B slots; kept between them, since making environments takes long.

        Args:
            first_slot: number of their first slot among those of several samplers that evaluate together.
        """
        agent = self._installed.agent
        if self._evaluation is None or (slots_of(self._evaluation.pool), self._evaluation_first) != (B, first_slot):
            if self._evaluation is not None:
                stale, self._evaluation = self._evaluation, None  # making the next one may fail
                stale.pool.close()
            pool = self.pool.for_evaluation(B, first_slot) if first_slot else self.pool.for_evaluation(B)
            self._evaluation = Buffers(pool, agent, BatchSpec(EVAL_T, B), self._server)
            self._evaluation_first = first_slot
        return self._evaluation

    def fill_evaluation(self, noise: Noise | None) -> SampleBatch:
        """The next EVAL_T rows of the evaluation whose buffers were asked for last; None acts without noise."""
        own = self._evaluation
        assert own is not None
        self._collect(own.pool, [own.agent], own.batches, own.views[0], own.states, noise)
        return own.batches[0]

    def buffer(self, itr: int) -> SampleBatch:
        """The memory of batch `itr`."""
        batches = self._started().batches
        return batches[itr % len(batches)]

    def agent_states(self) -> Tree:
        """[B, ...] recurrent states after the last batch, as arrays."""
        return self._started().get_states()

    @property
    def last_batch(self) -> SampleBatch:
        """The live buffer, as the last `obtain_samples` left it."""
        return self._batch

    def blank_batch(self) -> SampleBatch:
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
        """Waits, faults and steps out of bounds since the run began, by the names under which they are logged."""
        served = {} if self._server is None else self._server.metrics()
        outside = {"env/out_of_bounds": float(self._bounds.count)} if self._bounds.count else {}
        return {**self.pool.metrics(), **served, **outside}

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches, as plain data, arrays and tensors."""
        training = self._started()
        return {
            "collected": self._collected,
            "pool": self.pool.get_state().to_plain(),
            "row": last_row(self._batch),
            "agent_states": training.get_states(),
            "stats": self._stats.state_dict(),
            "journal": self._journal.state_dict(),
            "out_of_bounds": self._bounds.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, after `initialize`; `cut_slots` then names what could not be restored."""
        if not state["collected"]:
            return
        row = state["row"]
        if row["first"].shape != self._batch.first[-1].shape:
            raise CheckpointError(
                f"the checkpoint holds {len(row['first'])} slots; this sampler has B={self.batch_spec.B}"
            )
        self._collected = True
        self._stats.load_state_dict(state["stats"])
        self._journal.load_state_dict(state["journal"])
        self._bounds.count = state.get("out_of_bounds", 0)  # which 0.1.0 did not count
        faults = state.get("faults", {})  # where 0.1.0 put them
        pool = PoolState.from_plain({"faults": faults, **state["pool"]})
        episodes = [self._journal.episode(b) for b in range(self.batch_spec.B)]
        self.cut_slots = self.go_on(row, state["agent_states"], pool, episodes)

    def go_on(
        self, row: dict[str, Tree], agent_states: Tree, pool: PoolState, episodes: Sequence[OpenEpisode | None]
    ) -> list[int]:
        """Makes the next batch follow this last row and these states; returns the slots that could not be restored.

        Args:
            row: as `last_row` returns it. agent_states: [B, ...]. episodes: for each slot its open one, if known.
        """
        training, batch = self._started(), self._batch
        for name, leaves in row.items():
            tree_assign(getattr(batch, name), -1, leaves)
        training.set_states(agent_states)
        return self.pool.set_state(pool, [batch], episodes)

    def _next(self, itr: int) -> tuple[SampleBatch, tuple[Any, ...]]:
        """The buffer of batch `itr`, and the arguments of the loop that fills it."""
        training = self._started()
        buffer = itr % len(training.batches)
        batch = self._batch = training.batches[buffer]
        noise = Noise(self._seed, Purpose.ACT, itr, self._first_slot)
        return batch, (self.pool, [training.agent], [batch], training.views[buffer], training.states, noise)

    def _complete(self, batch: SampleBatch, version: int) -> None:
        """Writes the version, and cuts slots whose observations are not finite."""
        batch.version[...] = version
        if self._config.checks != "off":
            while (bad := self._not_finite(batch)) is not None:
                self._started().forget_slots(self.pool.disown(*bad))

    def _started(self) -> Buffers:
        """Raises ConfigError before `initialize` and after `shutdown`."""
        if self._training is None:
            _ = self._installed.agent
            raise ConfigError("initialize() has failed; build another sampler")
        return self._training

    def _begin(self, views: JournalViews) -> None:
        """Counts the random steps from before the first batch to each slot's first episode."""
        self._collected = True
        warmup = self.pool.warmup()
        for b, (_, rewards) in enumerate(warmup):
            self._stats.begin(b, rewards)
        self._journal.begin(
            views, [tree_map(lambda *xs: np.stack(xs), *taken) if taken else None for taken, _ in warmup]
        )

    def _not_finite(self, batch: SampleBatch) -> tuple[int, int, str] | None:
        """Slot, row and message of the first observation that is not finite, which sampled checks missed; or None."""
        if all(x.dtype.kind != "f" or b"\0" not in np.isfinite(x).tobytes() for x in tree_leaves(batch.obs)):
            return None
        for path, x in zip(tree_paths(batch.obs), tree_leaves(batch.obs)):
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                t, b, *element = np.argwhere(~np.isfinite(x))[0].tolist()
                action = tree_map(lambda a, t=t, b=b: a[t, b].tolist(), batch.prev_action)
                message = (
                    f"slot {self._first_slot + b} of {self._config.name}, row {t} of the batch: obs{path}{element}: "
                    f"got {x[t, b][tuple(element)]}, expected a finite number; last action {action}; "
                    "env_checks='always' names the episode and step"
                )
                return b, max(t - 1, 0), message
        return None


def evaluation_seed(seed: int, itr: int) -> int:
    """Seed of the evaluation after batch `itr` of a run with this seed."""
    return seed + ((itr + 1) << 40)


class _Play:
    """The first `counts[b]` episodes of each slot b, cut after `max_steps`, out of batches that follow each other."""

    def __init__(self, counts: list[int], discount: float, max_steps: int) -> None:
        self._counts, self._max_steps = counts, max_steps
        self._stats = EpisodeStats(len(counts), discount)
        self.found = Episodes()
        self.left = list(counts)
        """Episodes that each slot has yet to play."""

    @property
    def over(self) -> bool:
        """No slot gets on: each has played its episodes, or its open one was cut and might never end."""
        cut = self._stats.length >= self._max_steps
        return all(stuck or not n for stuck, n in zip(cut.tolist(), self.left))

    def add(self, batch: SampleBatch) -> None:
        """Takes the rows of a batch; writes into its `truncated` where it cuts an episode."""
        time = np.arange(batch.spec.T)[:, None]
        opened = np.maximum.accumulate(np.where(batch.first[:-1], time, -1), 0)
        age = np.where(opened >= 0, time - opened, time + self._stats.length)
        cut = batch.valid & (age == self._max_steps - 1) & ~np.logical_or(batch.terminated, batch.truncated)
        np.logical_or(batch.truncated, cut, out=batch.truncated)
        ended = self._stats.update(batch)
        self._stats.length[cut[-1]] = self._max_steps  # the episode goes on, and its own end counts no more
        ended = ended.no_longer_than(self._max_steps)
        self.found = join_episodes([self.found, ended]).first_of_each_slot(self._counts)
        self.left = (np.asarray(self._counts) - np.bincount(self.found.slot, minlength=len(self._counts))).tolist()
