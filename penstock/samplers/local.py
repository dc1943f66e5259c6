"""The live sampler whose agent runs in this process, over any EnvPool."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs, SampleBatch, allocate_batch
from penstock.core.errors import CheckpointError, ConfigError, EnvContractError
from penstock.core.layout import ROW_MULTIPLE
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import BatchSpec, EnvSpec, allocate
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths
from penstock.envs.make import EnvConfig
from penstock.envs.pool import EnvPool
from penstock.envs.serial_pool import SerialPool
from penstock.envs.vector_pool import VectorPool
from penstock.samplers.collector import GroupViews, collect
from penstock.samplers.episodes import Episodes, EpisodeStats, Journal, join_episodes

_EVAL_T = 64
_EVAL_B = 16
_EVAL_MAX_STEPS = 200_000


class LocalSampler:
    """`initialize(agent)`, then `obtain_samples(itr)` as often as wanted, then `shutdown()`.

    The batch that `obtain_samples` returns is the live buffer: the next call overwrites it.
    """

    def __init__(
        self, batch_spec: BatchSpec, pool: EnvPool, config: EnvConfig, seed: int, discount: float, journal_steps: int
    ) -> None:
        self.batch_spec, self.spec = batch_spec, pool.spec
        self._pool, self._config, self._seed, self._discount = pool, config, seed, discount
        self._stats = EpisodeStats(batch_spec.B, discount)
        self._journal = Journal(batch_spec.B, journal_steps)
        self._agent: Agent | None = None
        self._closed = False
        self._eval_pool: SerialPool | VectorPool | None = None
        self._collected = False
        self.cut_slots: list[int] = []
        """Slots whose open episode could not be restored by the last `load_state_dict`."""

    def initialize(self, agent: Agent) -> dict[str, Any]:
        """Takes the agent that will act and allocates the batch.

        Returns:
            examples of one step of one slot: obs, action, info and recurrent state, without leading dimensions.
        """
        if agent.spec != self.spec:
            raise ConfigError(f"the agent was built for {agent.spec}; this sampler's environment has {self.spec}")
        self._agent = agent
        info, state = _examples(agent, self.spec)
        keys = getattr(self._pool, "info_keys", ())
        self._batch = allocate_batch(self.spec, self.batch_spec, info, state, keys)
        device = agent_device(agent)
        self._views = [GroupViews(self._batch, slots, self.spec.null_action, device) for slots in self._pool.groups]
        self._states: list[Tree] = [agent.initial_state(view.padded) for view in self._views]
        one = tree_map(lambda x: x[0], allocate(self.spec.obs, 1)), tree_map(lambda leaf: leaf.null(), self.spec.action)
        return {"obs": one[0], "action": one[1], "info": info, "state": state}

    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        """The next T steps of every slot, and the episodes that ended in them.

        Args:
            itr: number of the batch from 0; it addresses the noise and is recorded as `version`.

        Raises:
            EnvWorkerError: an environment raised or broke its contract.
        """
        agent, (T, B) = self._agent_or_raise(), self.batch_spec
        noise = uniform(self._seed, Purpose.ACT, itr, slice(0, B), T, agent.noise_size)
        collect(self._pool, agent, self._batch, self._views, self._states, noise)
        self._batch.version[...] = itr
        if self._config.checks != "off":
            _refuse_not_finite(self._batch, self._config)
        if not self._collected:
            self._begin()
        self._journal.record(self._batch)
        return self._batch, self._stats.update(self._batch)

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
        B = self.batch_spec.B if isinstance(self._pool, VectorPool) else min(episodes, _EVAL_B)
        counts = [episodes // B + (b < episodes % B) for b in range(B)]
        seed = self._seed + ((itr + 1) << 40)
        pool = self._evaluation_pool(seed, counts)
        info, state = _examples(agent, self.spec)
        batch = allocate_batch(self.spec, BatchSpec(_EVAL_T, B), info, state, pool.info_keys)
        views = [GroupViews(batch, slots, self.spec.null_action, agent_device(agent)) for slots in pool.groups]
        states = [agent.initial_state(view.padded) for view in views]
        stats, found, chunk = EpisodeStats(B, self._discount), Episodes(), 0
        while len(found) < episodes and chunk * _EVAL_T < _EVAL_MAX_STEPS:
            noise = None if deterministic else _eval_noise(seed, itr, chunk, B, agent.noise_size)
            collect(pool, agent, batch, views, states, noise)
            found = join_episodes([found, stats.update(batch)]).first_of_each_slot(counts)
            chunk += 1
            if give_up is not None and give_up():
                return found
        if len(found) < episodes:
            warnings.warn(f"evaluation gave up with {len(found)} of {episodes} episodes: some slot has not ended one in "
                          f"{_EVAL_MAX_STEPS:,} steps; give {self._config.name} a time limit", stacklevel=2)  # fmt: skip
        return found

    @property
    def last_batch(self) -> SampleBatch:
        """The live buffer, as the last `obtain_samples` left it."""
        return self._batch

    def blank_batch(self) -> SampleBatch:
        """A batch of zeros in which every row is valid, for timing."""
        batch = allocate_batch(self.spec, self.batch_spec, *_examples(self._agent_or_raise(), self.spec))
        batch.valid[...] = True
        return batch

    def shutdown(self) -> None:
        """Closes the environments. A second call does nothing."""
        self._agent, self._closed = None, True
        self._pool.close()
        if self._eval_pool is not None:
            self._eval_pool.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches, as plain data, arrays and tensors."""
        row = self._batch
        return {
            "collected": self._collected,
            "pool": self._pool.get_state(),
            "row": {"obs": tree_map(lambda x: x[-1].copy(), row.obs), "first": row.first[-1].copy(),
                    "prev_action": tree_map(lambda x: x[-1].copy(), row.prev_action),
                    "prev_reward": row.prev_reward[-1].copy()},
            "agent_states": [tree_map(torch.clone, state) for state in self._states],
            "stats": self._stats.state_dict(),
            "journal": self._journal.state_dict(),
        }  # fmt: skip

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
            tree_map(lambda x, y: x.__setitem__(-1, y), getattr(batch, name), row[name])
        batch.first[-1], batch.prev_reward[-1] = row["first"], row["prev_reward"]
        self._collected = True
        self._stats.load_state_dict(state["stats"])
        self._journal.load_state_dict(state["journal"])
        device = agent_device(self._agent_or_raise())
        self._states = [tree_map(lambda x: x.to(device, copy=True), s) for s in state["agent_states"]]
        actions = [self._journal.actions(b) for b in range(self.batch_spec.B)]
        self.cut_slots = self._pool.set_state(state["pool"], batch, actions)

    def _agent_or_raise(self) -> Agent:
        if self._agent is None:
            raise ConfigError("the sampler was shut down; build another" if self._closed else
                              "the sampler has no agent yet; call sampler.initialize(policy.agent) first")  # fmt: skip
        return self._agent

    def _evaluation_pool(self, seed: int, counts: list[int]) -> SerialPool | VectorPool:
        """Evaluation environments of which slot b plays counts[b] episodes; kept, since making some takes long."""
        pool = self._eval_pool
        if isinstance(self._pool, VectorPool):  # whose slots cannot stop: they play on, uncounted
            if not isinstance(pool, VectorPool):
                pool = self._eval_pool = VectorPool(self._config, seed, len(counts), evaluation=True)
            pool.restart(seed)
            return pool
        if not isinstance(pool, SerialPool) or pool.groups[0].stop != len(counts):
            if pool is not None:
                pool.close()
                self._eval_pool = None  # making the next one may fail
            pool = self._eval_pool = SerialPool(self._config, seed, slice(0, len(counts)), evaluation=True)
        pool.restart(seed, counts)
        return pool

    def _begin(self) -> None:
        """What happened before the first batch belongs to each slot's first episode."""
        self._collected = True
        if isinstance(self._pool, SerialPool):
            for b, (actions, rewards) in enumerate(self._pool.warmup()):
                self._stats.begin(b, rewards)
                self._journal.begin(b, tree_map(lambda *xs: np.stack(xs), *actions) if actions else None)


def agent_device(agent: Agent) -> torch.device:
    """Where the agent's parameters are; the CPU if it has none."""
    return next((p.device for p in agent.parameters()), torch.device("cpu"))


def _examples(agent: Agent, spec: EnvSpec) -> tuple[Tree, Tree]:
    """Examples of what `act` records and of the recurrent state, one row without its leading dimension."""
    device = agent_device(agent)
    n = ROW_MULTIPLE

    def rows(tree: Tree) -> Tree:
        return tree_map(lambda x: torch.as_tensor(x, device=device), tree)

    action = tree_map(lambda leaf: np.broadcast_to(leaf.null(), (n, *leaf.shape)).copy(), spec.action)
    inputs = Inputs(
        rows(allocate(spec.obs, n)),
        rows(action),
        torch.zeros(n, device=device),
        torch.ones(n, dtype=torch.bool, device=device),
    )
    for leaf, x in zip(tree_leaves(spec.obs), tree_leaves(inputs.obs)):
        x += torch.as_tensor(leaf.null(), device=device)
    with torch.inference_mode():
        state = agent.initial_state(n)
        _, info, _ = agent.act(inputs, state, torch.full((n, agent.noise_size), 0.5, device=device))
    if not isinstance(info, dict) or "env" in info:
        raise ConfigError(f"act() recorded {type(info).__name__} {list(info)}; expected a dict without the key 'env'")
    return tree_map(lambda x: x[0].cpu().numpy(), info), tree_map(lambda x: x[0].cpu().numpy(), state)


def _refuse_not_finite(batch: SampleBatch, config: EnvConfig) -> None:
    """Raises for a NaN or infinite observation that the sampled checks did not look at: it must not reach a learner."""
    for path, x in zip(tree_paths(batch.obs), tree_leaves(batch.obs)):
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            t, b, *element = np.argwhere(~np.isfinite(x))[0].tolist()
            action = tree_map(lambda a, t=t, b=b: a[t, b].tolist(), batch.prev_action)
            raise EnvContractError(
                f"slot {b} of {config.name}, row {t} of the batch: obs{path}{element}: got {x[t, b][tuple(element)]}, "
                f"expected a finite number; last action {action}; env_checks='always' names the episode and step"
            )


def _eval_noise(seed: int, itr: int, chunk: int, B: int, n: int) -> Any:
    return uniform(seed, Purpose.EVALUATE, (itr << 24) + chunk, slice(0, B), _EVAL_T, n)
