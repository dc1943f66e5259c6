"""The live sampler whose agent runs in this process or is run by workers, over any EnvPool."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.core.protocols import require_members
from penstock.core.slab import share
from penstock.core.spec import BatchSpec
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map, tree_paths
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import EnvPool, PoolState, slots_of
from penstock.samplers.collector import Collect, GroupViews
from penstock.samplers.episodes import Episodes, EpisodeStats, Journal, join_episodes
from penstock.samplers.installed import Installed, examples
from penstock.samplers.traced import loop

_EVAL_T = 64
_EVAL_B = 16
_EVAL_MAX_STEPS = 200_000


class Server(Protocol):
    """Runs the loop in the place of this thread: with a copy of the agent, or in the pool's workers."""

    @property
    def serve(self) -> Collect:
        """Fills the batches; arguments as of `collect`."""
        ...

    @property
    def remote(self) -> bool:
        """Agents act in the pool's workers, their recurrent states in shared memory; else states are the loop's own."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where the acting agent is; None for where its parameters are."""
        ...

    def place(
        self, pool: Any, batches: list[SampleBatch], states: Tree, agent: Agent
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves a pool's buffers, and recurrent states [B, ...] of remote agents, to where all sides see them."""
        ...

    def metrics(self) -> dict[str, float]:
        """Further `sampler/...` metrics."""
        ...

    def close(self) -> None:
        """Called once after the pools are closed."""


class LiveSampler:
    """A `Sampler` over a pool of environments.

    The batch that `obtain_samples` returns is a live buffer: the next call overwrites it.

    Args:
        discount: of the logged episode returns. journal_steps: rows of actions kept to replay open episodes.
        server: runs the loop; None for this thread. slab: descriptor of the shared memory to hold the batches.
        first_slot: number of the first slot among `total_slots` of several samplers.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        pool: EnvPool,
        config: EnvConfig,
        seed: int,
        discount: float,
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
        self._pool, self._config, self._seed, self._discount = pool, config, seed, discount
        self._server, self._slab, self._first_slot = server, slab, first_slot
        self._collect = loop() if server is None else server.serve
        try:
            self._installed = Installed(self.spec, batch_spec, pool.info_keys, first_slot, total_slots)
        except ConfigError:
            pool.close()
            raise
        self._stats = EpisodeStats(batch_spec.B, discount)
        self._journal = Journal(batch_spec.B, journal_steps)
        self._training: Buffers | None = None
        self._evaluation: Buffers | None = None
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
            self._training = Buffers(self._pool, agent, self.batch_spec, self._server, buffers, self._slab)
        except MemoryError as error:
            T, B = self.batch_spec
            raise ConfigError(
                f"a batch of T={T}, B={B} does not fit into memory: {error}; use a smaller T or B"
            ) from error
        self._batch = self._training.batches[0]
        return shown

    def obtain_samples(self, itr: int, version: int | None = None) -> tuple[SampleBatch, Episodes]:
        """The next T steps of every slot, and the episodes that ended in them.

        Args:
            itr: number of the batch from 0; it addresses the noise.
            version: of the agent's parameters, for the record; `itr` if none is given.

        Raises:
            EnvWorkerError: an environment raised or broke its contract.
        """
        training = self._started()
        buffer = itr % len(training.batches)
        batch = self._batch = training.batches[buffer]
        noise = Noise(self._seed, Purpose.ACT, itr, self._first_slot)
        self._collect(self._pool, [training.agent], [batch], training.views[buffer], training.states, noise)
        batch.version[...] = itr if version is None else version
        if self._config.checks != "off":
            while (bad := self._not_finite(batch)) is not None:
                training.forget_slots(self._pool.disown(*bad))
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
        agent = self._installed.agent
        B = self._pool.evaluation_slots(min(episodes, _EVAL_B))
        own = self._evaluation_buffers(agent, B)
        counts = [episodes // B + (b < episodes % B) for b in range(B)]
        seed = evaluation_seed(self._seed, itr)
        own.pool.restart(seed, counts)
        own.set_states(None)
        batch, views = own.batches[0], own.views[0]
        stats, found, chunk = EpisodeStats(B, self._discount), Episodes(), 0
        while len(found) < episodes and chunk * _EVAL_T < _EVAL_MAX_STEPS:
            noise = None if deterministic else Noise(seed, Purpose.EVALUATE, (itr << 24) + chunk)
            self._collect(own.pool, [agent], [batch], views, own.states, noise)
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
        return self._installed.blank_batch()

    def shutdown(self) -> None:
        """Closes the environments. A second call does nothing."""
        self._installed.close()
        self._training = None
        if self._evaluation is not None:
            self._evaluation.pool.close()
        self._pool.close()
        if self._server is not None:
            self._server.close()

    def metrics(self) -> dict[str, float]:
        """Waits and faults since the run began, by the names under which they are logged."""
        return {**self._pool.metrics(), **(self._server.metrics() if self._server is not None else {})}

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches, as plain data, arrays and tensors."""
        training = self._started()
        return {
            "collected": self._collected,
            "pool": self._pool.get_state().to_plain(),
            "row": last_row(self._batch),
            "agent_states": training.get_states(),
            "stats": self._stats.state_dict(),
            "journal": self._journal.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, after `initialize`; `cut_slots` then names what could not be restored."""
        if not state["collected"]:
            return
        training = self._started()
        row, batch = state["row"], self._batch
        if row["first"].shape != batch.first[-1].shape:
            raise CheckpointError(
                f"the checkpoint holds {len(row['first'])} slots; this sampler has B={self.batch_spec.B}"
            )
        for name, leaves in row.items():
            tree_assign(getattr(batch, name), -1, leaves)
        self._collected = True
        self._stats.load_state_dict(state["stats"])
        self._journal.load_state_dict(state["journal"])
        training.set_states(state["agent_states"])
        actions = [self._journal.actions(b) for b in range(self.batch_spec.B)]
        faults = state.get("faults", {})  # where 0.1.0 put them
        pool = PoolState.from_plain({"faults": faults, **state["pool"]})
        self.cut_slots = self._pool.set_state(pool, [batch], actions)

    def _started(self) -> Buffers:
        """Raises ConfigError before `initialize` and after `shutdown`."""
        if self._training is None:
            _ = self._installed.agent
            raise ConfigError("initialize() has failed; build another sampler")
        return self._training

    def _evaluation_buffers(self, agent: Agent, B: int) -> Buffers:
        """The buffers of evaluations with B slots; kept between them, since making environments takes long."""
        if self._evaluation is None or slots_of(self._evaluation.pool) != B:
            if self._evaluation is not None:
                stale, self._evaluation = self._evaluation, None  # making the next one may fail
                stale.pool.close()
            pool = self._pool.for_evaluation(B)
            self._evaluation = Buffers(pool, agent, BatchSpec(_EVAL_T, B), self._server)
        return self._evaluation

    def _begin(self) -> None:
        """Counts the random steps from before the first batch to each slot's first episode."""
        self._collected = True
        for b, (actions, rewards) in enumerate(self._pool.warmup()):
            self._stats.begin(b, rewards)
            self._journal.begin(b, tree_map(lambda *xs: np.stack(xs), *actions) if actions else None)

    def _not_finite(self, batch: SampleBatch) -> tuple[int, int, str] | None:
        """Slot, row and message of the first observation that is not finite, which sampled checks missed; or None."""
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
            [] if self._remote else [GroupViews(batch, slots, env_spec.null_action, device) for _, slots in pool.groups]
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
