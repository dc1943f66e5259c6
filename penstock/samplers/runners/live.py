"""Runners as a live sampler: what its modes have in common, and rounds of all runners.

The record of the run is kept here: statistics, journal, episode numbers and checkpoints are the owner's, so that
runners may be lost, replaced, or be others when the run is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.agents.agent import Agent, Agents
from penstock.core.batch import AnyBatch, SampleBatch, batches_of
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, Share
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall
from penstock.samplers.episodes import Episodes
from penstock.samplers.live import LiveSampler
from penstock.samplers.runners.agent_bytes import together
from penstock.samplers.runners.pool import RunnerServer, RunnerSource
from penstock.samplers.runners.runners import Runners
from penstock.samplers.runners.share import SamplerShare
from penstock.samplers.trackers.batch_queue import BatchQueue
from penstock.samplers.trackers.evaluation import Evaluates, Evaluation
from penstock.samplers.trackers.states import State

if TYPE_CHECKING:
    from penstock.samplers.runners.settings import RunnerSampler


class RunnersLive(Evaluates):
    """Runners, and the LiveSampler that accounts for all of them, or one for each.

    Args:
        parts: the runners of each LiveSampler. ahead: how many batches each of them may be ahead.
    """

    _whole = True
    """One LiveSampler accounts for all runners."""

    def __init__(
        self,
        settings: RunnerSampler,
        config: EnvConfig,
        seed: int,
        share: Share,
        parts: list[range],
        ahead: int,
    ) -> None:
        inner, n = settings.inner, settings.runners
        T, B = inner.spec
        self.runners = Runners(
            [SamplerShare(inner, config, seed, share.part(i * B, n * B)) for i in range(n)],
            settings.made_backend(config, seed),
            deadline_s=settings.deadline_s,
            start_timeout_s=settings.start_timeout_s,
            fault_policy=settings.fault_policy,
            restarts=settings.restarts,
            min_runners=settings.min_runners,
        )
        """The actors, for `foreach` and the like."""
        self.batch_spec, self._depth = settings.spec, settings.depth
        self._queues = [BatchQueue(ahead) for _ in parts]
        try:
            self._pools = [RunnerSource(self.runners, part, config, self._whole) for part in parts]
            self._lives = [
                LiveSampler(
                    BatchSpec(T, len(part) * B),
                    pool,
                    config,
                    seed,
                    inner.discount,
                    inner.journal_steps,
                    server=RunnerServer(),
                    share=share.part(part.start * B, n * B),
                )
                for part, pool in zip(parts, self._pools)
            ]
        except BaseException:
            self.runners.close()
            raise
        self.spec, self.info_keys = self.runners.spec, self.runners.info_keys
        self.specs = self._lives[0].specs
        """By policy id; of environments of one agent one, under `shared`."""
        self._agent: Agent | None = None
        self._last: SampleBatch | None = None
        self.cut_slots: list[int] = []
        """Slots with an open episode that the last `load_state_dict` could not restore."""

    def initialize(self, agents: Agents) -> dict[str, Any]:
        """Takes the agents that will act, and sends each runner copies; returns examples of one step of one slot."""
        n = self._buffers
        shown = [live.initialize(agents, n) for live in self._lives]
        for live, queue in zip(self._lives, self._queues):
            queue.attach([[*batches_of(live.buffer(k)).values()] for k in range(n)])
        self._agent = together(self._lives[-1].agents)
        return shown[-1]

    def evaluate(self, asked: Evaluation) -> Episodes:
        """Has the runners play it."""
        return self._lives[0].evaluate(asked)

    @property
    def evaluation_calls(self) -> Sequence[CallRecord]:
        return self._lives[0].evaluation_calls

    @property
    def calls_of_envs(self) -> Sequence[Sequence[CallRecord]]:
        return [mine for live in self._lives for mine in live.calls_of_envs]

    def call_envs(self, call: EnvCall, slots: Sequence[int], evaluation: bool = False) -> dict[int, Answer]:
        self._acting()
        if evaluation:
            return self._lives[0].call_envs(call, [], True)
        found, start = dict[int, Answer](), 0
        for live in self._lives:
            B = live.batch_spec.B
            if mine := [b - start for b in slots if start <= b < start + B]:
                found |= {start + b: x for b, x in live.call_envs(call, mine).items()}
            start += B
        return {b: found[b] for b in slots}

    @property
    def last_batch(self) -> AnyBatch:
        """The buffer that the last `obtain_samples` returned."""
        assert self._last is not None
        return self._last

    def blank_batch(self) -> AnyBatch:
        """A batch of zeros in which every row is valid, for timing."""
        return self._lives[0].blank_batch()

    def shutdown(self) -> None:
        """Ends the runners. A second call does nothing."""
        self._agent = None
        for live in self._lives:
            live.shutdown()
        self.runners.close()

    @property
    def _buffers(self) -> int:
        """Batches that are in use at a time."""
        return self._depth + 2 if self._depth else 1

    def _acting(self) -> Agent:
        """Raises ConfigError before `initialize` and after `shutdown`."""
        if self._agent is None:
            raise ConfigError("the sampler has no agent, or was shut down; call sampler.initialize(policy.agent) first")
        return self._agent


class SyncRunners(RunnersLive):
    """Batch k is fragment k of every runner, side by side; it starts when training on batch k - 1 - depth is finished.

    It acts with the parameters of version k - depth (0 at first), like an AsyncSampler with `weights="exact"`.
    """

    def __init__(self, settings: RunnerSampler, config: EnvConfig, seed: int, share: Share) -> None:
        parts = [range(settings.runners)]
        super().__init__(settings, config, seed, share, parts, settings.depth)
        self._live, self._pool, self._queue = self._lives[0], self._pools[0], self._queues[0]

    def obtain_samples(self, itr: int) -> tuple[AnyBatch, Episodes]:
        """Batch `itr`, valid until the next call, and the episodes that ended in it.

        Raises:
            EnvWorkerError: an environment raised or broke its contract, or runners were lost too often.
        """
        agent, ahead = self._acting(), self._queue
        if not self._depth:
            ahead.next = ahead.released = itr  # batches of any number
        self.runners.restore()
        weights, begun = self.runners.publish(agent), time.perf_counter()
        for k in ahead.release(itr, itr):
            calls = self._pool.requests[k] = {}
            for i in self.runners.alive:  # in process the runner collects here, some hops above `env.step`
                calls[i] = self.runners.backend.call(self.runners.handles[i], "fill", k, itr, weights)
        self._pool.times["group/send_ms"] = (time.perf_counter() - begun) * 1e3
        self._last = self._live.buffer(itr) if itr in ahead.waiting else self._collect(itr)
        episodes = ahead.take()
        if self._depth:
            ahead.measure(itr)
        return self._last, episodes

    def metrics(self) -> dict[str, float]:
        """`group/...` times, `sampler/lag` in training steps, faults, and the metrics of the runners' samplers."""
        return {**self._live.metrics(), **self._queue.lag}

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches; with depth the batches ahead too, in the form of an AsyncSampler."""
        self._acting()
        if not self._depth:
            return self._live.state_dict()
        if not self._queue.released:
            called = any(self.calls_of_envs) or bool(self._live.evaluation_calls)
            return {"released": 0, "inner": self._live.state_dict()} if called else {"released": 0}
        for itr in range(self._queue.next, self._queue.released):
            if itr not in self._queue.waiting:
                self._collect(itr)
        inner = self._live.state_dict()
        return self._queue.state_dict(inner, np.array(inner["pool"]["episode"], np.int64))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, and of that of other samplers with as many slots and the same depth."""
        self._acting()
        if state.get("released") == 0:
            if "inner" in state:
                self._live.load_state_dict(state["inner"])
            return
        self._queue.check(state)
        self._live.load_state_dict(state.get("inner", state), state.get("released", 1) - 1)
        self.cut_slots = self._live.cut_slots
        if self._depth:
            self._queue.load_state_dict(state)

    def join_states(self, states: Sequence[State]) -> State:
        """The state of one sampler of all slots, as `Divisible.join_states`."""
        return (self._queue if self._depth else self._live).join_states(states)

    def split_state(self, state: State, slots: Sequence[slice]) -> list[State]:
        """Inverse of `join_states`."""
        return (self._queue if self._depth else self._live).split_state(state, slots)

    def _collect(self, itr: int) -> AnyBatch:
        """Waits for a batch that was released, and returns it."""
        batch, self._queue.waiting[itr] = self._live.obtain_samples(itr, self._queue.versions.pop(itr))
        return batch
