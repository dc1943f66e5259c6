"""Runner: a sampler and a copy of the agent in an actor, which collects the fragments that its owner asks for."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from penstock.agents.agent import Agent
from penstock.agents.parameters import unpack_parameters
from penstock.core import trace
from penstock.core.batch import SampleBatch, batches_of
from penstock.core.errors import ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.core.tree import Tree, pack_leaves, tree_map, unpack_leaves
from penstock.envs.pools.calls import CallRecord, EnvCall, from_plain
from penstock.envs.pools.pool import BatchColumns, EpisodeLog, OpenEpisode, PoolState
from penstock.processes.serialization import versions
from penstock.samplers.runners.activity import note_evaluation
from penstock.samplers.runners.agent_bytes import unpack_agent
from penstock.samplers.runners.share import Maker, received

PACKAGES = ("torch", "numpy", "gymnasium")
"""Their versions must be the same on owner and runners for equal batches."""


class Runner:
    """The sampler of some slots, with agents that receive their weights; the owner accounts for its rows.

    Args:
        maker: makes the sampler; bytes of `shipped` if it comes from another process.

    Raises:
        ConfigError, EnvWorkerError: the environment cannot be made, or does not fit the settings.
    """

    def __init__(self, maker: Maker | bytes) -> None:
        found: Maker = received(maker) if isinstance(maker, bytes) else maker
        self.live = found.make()
        self.version = -1
        """Version of the weights that it acts with."""
        self._agent: Agent | None = None
        self._warned: dict[tuple[str, str, int], tuple[int, str]] = {}  # count and last text of each line of code
        self._fresh = True

    def describe(self) -> dict[str, Any]:
        """Returns the spaces, and what must be equal on owner and runners."""
        return {
            "spec": self.live.spec.to_plain(),
            "info_keys": list(self.live.info_keys),
            "evaluation_slots": self.live.pool.evaluation_slots(1),
            "versions": versions(PACKAGES),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def initialize(self, agent: Agent) -> dict[str, Any]:
        """Takes the agent that will act, or a module list of all policies'; returns what `Sampler.initialize` does."""
        self._agent = agent
        given: Any = dict(zip(self.live.specs, agent)) if isinstance(agent, nn.ModuleList) else agent
        return self.live.initialize(given)

    @property
    def acts(self) -> bool:
        """An agent has come."""
        return self._agent is not None

    def install(self, agent: Any) -> None:
        """Takes a copy of the owner's agent as `pack_agent` returned it."""
        self.initialize(unpack_agent(agent))

    def take_weights(self, weights: Any, version: int) -> None:
        """Takes weights as `pack_parameters` returned them, by way of `Backend.put`."""
        if self._agent is None:
            raise ConfigError("the runner has no agent yet; install one first")
        unpack_parameters(weights, self._agent)
        self.version = version

    def fill(self, itr: int, version: int, weights: Any) -> dict[str, Any]:
        """Collects fragment `itr` with the weights of a version, which it loads unless it has them already.

        Returns:
            rows: the leaves of the batch. warmup: for the first fragment, the random steps before it. metrics,
            sample_s: of the sampler, and seconds of work. warnings: of the environment's, as `_new` chooses them. span:
            begin and end in ns of this machine's clock, or None if this process notes what it does in a trace.
            newest_episodes: of the pool.
        """
        begun = time.perf_counter_ns()
        if version != self.version:
            self.take_weights(weights, version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            batch = self.live.fill(itr, version)
        warmup, self._fresh = self.live.pool.warmup() if self._fresh else None, False
        rows, now = _packed(batch, self.live.pool), time.perf_counter_ns()
        return {
            "rows": rows,
            "warmup": warmup,
            "newest_episodes": self.live.pool.newest_episodes(),
            "metrics": self.live.metrics(),
            "warnings": self._new(caught) if caught else [],
            "sample_s": (now - begun) / 1e9,
            "span": [begun, now] if trace.ring is None else None,
        }

    def pool_state(self) -> dict[str, Any]:
        """Returns the state of every slot between two fragments, and the recurrent states [B, ...] by policy id."""
        return {"pool": self.live.pool.get_state().to_plain(), "agent_states": self.live.agent_states()}

    def resume(
        self,
        rows: Mapping[str, dict[str, Tree]],
        agent_states: Mapping[str, Tree] | None,
        pool: dict[str, Any],
        episodes: Sequence[Sequence[Any] | None],
    ) -> list[int]:
        """Makes the next fragment follow these last rows; returns the slots, counted from the runner's, that were cut.

        Args:
            agent_states: [B, ...] by policy id, None for those before an episode. pool: `PoolState.to_plain()`.
        """
        self._fresh, self.version = False, -1  # weights of an equal version may be others in what goes on
        known = [None if x is None else OpenEpisode(*x) for x in episodes]
        return self.live.resume(rows, agent_states, PoolState.from_plain(pool), known)

    def call_envs(self, call: tuple[Any, ...], slots: list[int]) -> list[tuple[Any, ...]]:
        """Executes a call in these of its slots, counted from its first; returns the answers."""
        found = self.live.call_envs(EnvCall(*call), slots)
        return [tuple(found[b]) for b in slots]

    def call_evaluation(
        self, call: tuple[Any, ...], B: int, first_slot: int, calls: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, ...]]:
        """Executes a call in B environments for evaluation, after `calls`; returns the answers."""
        self._evaluates_after(calls)
        self.live.evaluation_buffers(B, first_slot)
        return [tuple(x) for x in self.live.call_envs(EnvCall(*call), [], True).values()]

    def recall(self, calls: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Repeats the calls of each slot in environments that have had none yet."""
        self.live.pool.recall(from_plain(calls))

    def _evaluates_after(self, calls: Sequence[Sequence[Any]]) -> None:
        self.live.take_evaluation_calls([CallRecord(*x) for x in calls])

    def open_evaluation(
        self,
        B: int,
        first_slot: int,
        seed: int,
        episodes: list[int],
        max_steps: int | None = None,
        calls: Sequence[Sequence[Any]] = (),
    ) -> None:
        """Begins an evaluation with B of its slots: each plays this many episodes.

        Args:
            max_steps: after which an episode of many agents is cut; those of one agent the owner cuts. calls: those
                that every environment for evaluation has had.
        """
        note_evaluation(seed)
        self._evaluates_after(calls)
        buffers = self.live.evaluation_buffers(B, first_slot)
        if max_steps is not None:
            buffers.pool.limit(max_steps)
        buffers.pool.restart(seed, episodes)
        buffers.set_states(None)
        self._evaluated = first_slot

    def fill_evaluation(self, noise: Sequence[int] | None, weights: Any) -> bytes | list[np.ndarray[Any, Any]] | None:
        """Collects the next rows of the evaluation that was opened; returns the leaves of the batch, None if it broke.

        Args:
            noise: seed, purpose and batch; None acts without. weights: of the agent to evaluate, None: as before.
        """
        if weights is not None:
            self.take_weights(weights, -1)  # the next fragment brings its own
        address = None if noise is None else Noise(noise[0], Purpose(noise[1]), noise[2], self._evaluated)
        batch, pool = self.live.fill_evaluation(address), self.live.evaluation_pool
        return None if pool.broken else _packed(batch, pool)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(self, *args)`."""
        return function(self, *args)

    def ping(self) -> int:
        """Returns the process number."""
        return os.getpid()

    def close(self) -> None:
        """Closes the environments. A second call does nothing."""
        self.live.shutdown()

    def _new(self, caught: list[warnings.WarningMessage]) -> list[str]:
        """The warnings to show: of each line of code the first, and of other texts of it the 10th, 100th and so on."""
        shown: list[str] = []
        for w in caught:
            place, text = (w.category.__name__, w.filename, w.lineno), str(w.message)
            count, before = self._warned.get(place, (0, ""))
            if count and text == before:
                continue
            count += 1
            self._warned[place] = count, text
            if count == 1:
                shown.append(text)
            elif str(count).rstrip("0") == "1":
                shown.append(f"{text} (number {count:,} of {w.category.__name__}s from {w.filename}:{w.lineno})")
        return shown


def _packed(batch: Any, pool: BatchColumns) -> bytes | list[np.ndarray[Any, Any]]:
    """The leaves of every policy's batch, and then of the log of many agents."""
    return pack_leaves([*batches_of(batch).values(), *([] if pool.log is None else [pool.log])])


def unpack_fragment(
    packed: Any, batches: Sequence[SampleBatch], columns: Sequence[slice], log: EpisodeLog | None, slots: slice
) -> None:
    """Copies the leaves that `fill` or `fill_evaluation` returned into a runner's columns of each policy's batch.

    Args:
        columns: one for each policy. log: of many agents the episode log, of which the runner's `slots` are written.
    """
    own: list[Any] = [batch[:, at] for batch, at in zip(batches, columns)]
    unpack_leaves(packed, own if log is None else [*own, tree_map(lambda x: x[slots], log)])
