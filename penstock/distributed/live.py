"""The live samplers of a RunnerSampler: whole rounds of all runners, or the fragments that are ready first.

Both keep the record of the run here: statistics, journal, episode numbers and checkpoints are the driver's, so that
runners may be lost, replaced, or be others when the run is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.agents.agent import Agent, Agents
from penstock.core.batch import AnyBatch, MultiAgentBatch, SampleBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import BatchSpec
from penstock.core.trace import WAIT, timed
from penstock.core.tree import tree_leaves
from penstock.distributed.env_runner import Recipe
from penstock.distributed.group import EnvRunnerGroup, late
from penstock.distributed.packing import together
from penstock.distributed.rounds import EvaluationBroken, Rounds, RunnerPool
from penstock.envs.make import EnvConfig
from penstock.samplers.accounts.lag import lags
from penstock.samplers.episodes import Episodes
from penstock.samplers.live import EVAL_MAX_STEPS, EVAL_SLOTS, LiveSampler

if TYPE_CHECKING:
    from penstock.distributed.sampler import RunnerSampler


class RunnersLive:
    """What both have in common: the group, and one LiveSampler for all runners or one for each.

    Args:
        parts: the runners of each LiveSampler.
    """

    _whole = True
    """One LiveSampler accounts for all runners."""

    def __init__(
        self,
        settings: RunnerSampler,
        config: EnvConfig,
        seed: int,
        first_slot: int,
        total_slots: int | None,
        parts: list[range],
    ) -> None:
        inner = settings.inner
        self.workers = EnvRunnerGroup(
            Recipe(inner, config, seed, None, first_slot, total_slots),
            settings.runners,
            settings.made_backend(config, seed),
            deadline_s=settings.deadline_s,
            start_timeout_s=settings.start_timeout_s,
            fault_policy=settings.fault_policy,
            restarts=settings.restarts,
            min_runners=settings.min_runners,
        )
        """The group, for `foreach` and the like."""
        self.batch_spec, self._depth = settings.spec, settings.depth
        T, B = inner.spec
        total = max(total_slots or 0, first_slot + settings.runners * B)
        try:
            self._pools = [RunnerPool(self.workers, part, self._whole, config.seating) for part in parts]
            self._lives = [
                LiveSampler(
                    BatchSpec(T, len(part) * B),
                    pool,
                    config,
                    seed,
                    inner.discount,
                    inner.journal_steps,
                    server=Rounds(),
                    first_slot=first_slot + part.start * B,
                    total_slots=total,
                )
                for part, pool in zip(parts, self._pools)
            ]
        except BaseException:
            self.workers.close()
            raise
        self.spec, self.info_keys = self.workers.spec, self.workers.info_keys
        self.specs = self._lives[0].specs
        """By policy id; of environments of one agent one, under `shared`."""
        self._agent: Agent | None = None
        self._last: SampleBatch | None = None
        self._lag: dict[str, float] = {}
        self.cut_slots: list[int] = []
        """Slots whose open episode could not be restored by the last `load_state_dict`."""

    def initialize(self, agents: Agents) -> dict[str, Any]:
        """Takes the agents that will act, and sends each runner copies; returns examples of one step of one slot."""
        shown = [live.initialize(agents, self._buffers) for live in self._lives]
        given: Any = agents
        if not isinstance(given, Mapping):
            self._agent = together([given])
        elif len(given) == 1:
            self._agent = together([*given.values()])
        else:
            self._agent = together([given[policy] for policy in self.specs])
        return shown[-1]

    def evaluate_agent(
        self,
        itr: int,
        episodes: int = 20,
        deterministic: bool = True,
        give_up: Callable[[], bool] | None = None,
        slots: int = EVAL_SLOTS,
        max_steps: int = EVAL_MAX_STEPS,
    ) -> Episodes:
        """As `LiveSampler.evaluate_agent`, played by the runners; one that loses a runner is played anew."""
        while True:
            try:
                return self._lives[0].evaluate_agent(itr, episodes, deterministic, give_up, slots, max_steps)
            except EvaluationBroken:  # whoever breaks it again and again uses up the budget of replacements
                continue

    @property
    def last_batch(self) -> AnyBatch:
        """The buffer that the last `obtain_samples` returned."""
        assert self._last is not None
        return self._last

    def blank_batch(self) -> AnyBatch:
        """A batch of zeros in which every row is valid, for timing."""
        return self._lives[0].blank_batch()

    def metrics(self) -> dict[str, float]:
        """`group/...` times, `sampler/lag` in training steps, faults, and the metrics of the runners' samplers."""
        return {**self._lives[0].metrics(), **self._lag}

    def shutdown(self) -> None:
        """Ends the runners. A second call does nothing."""
        self._agent = None
        for live in self._lives:
            live.shutdown()
        self.workers.close()

    @property
    def _buffers(self) -> int:
        """Batches that are in use at a time."""
        return self._depth + 2 if self._depth else 1

    def _acting(self) -> Agent:
        """Raises ConfigError before `initialize` and after `shutdown`."""
        if self._agent is None:
            raise ConfigError("the sampler has no agent, or was shut down; call sampler.initialize(policy.agent) first")
        return self._agent

    def _measure(self, batch: SampleBatch, itr: int) -> None:
        """Notes the lag of a batch; one without a valid row has none."""
        self._lag |= lags([*batch.values()] if isinstance(batch, MultiAgentBatch) else [batch], itr)


class RoundsLive(RunnersLive):
    """Batch k is fragment k of every runner, side by side; it starts when training on batch k - 1 - depth is finished.

    It acts with the parameters of version k - depth (0 at first), as of an AsyncSampler with `weights="exact"`.
    """

    def __init__(
        self, settings: RunnerSampler, config: EnvConfig, seed: int, first_slot: int, total_slots: int | None
    ) -> None:
        super().__init__(settings, config, seed, first_slot, total_slots, [range(settings.runners)])
        self._live, self._pool = self._lives[0], self._pools[0]
        self._first = self._next = self._released = 0
        self._ahead: dict[int, tuple[AnyBatch, Episodes]] = {}  # batches that a checkpoint had to wait for

    def obtain_samples(self, itr: int) -> tuple[AnyBatch, Episodes]:
        """Batch `itr`, valid until the next call, and the episodes that ended in it.

        Raises:
            EnvWorkerError: an environment raised or broke its contract, or runners were lost too often.
        """
        agent = self._acting()
        if not self._released:
            self._first = self._next = self._released = itr
        if itr != self._next:
            if self._depth:
                raise ConfigError(
                    f"obtain_samples({itr}) where batch {self._next} is next: runners work ahead, so batches are "
                    "numbered one after the other"
                )
            self._released = itr
        self.workers.welcome()
        self._pool.request(self.workers.publish(agent), range(self._released, itr + self._depth + 1), itr)
        self._released = itr + self._depth + 1
        batch, episodes = self._ahead.pop(itr) if itr in self._ahead else self._collected(itr)
        self._next, self._last = itr + 1, batch
        if self._depth:
            self._measure(batch, itr)
        return batch, episodes

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches; with depth the batches ahead too, in the form of an AsyncSampler."""
        self._acting()
        if not self._depth:
            return self._live.state_dict()
        if not self._released:
            return {"released": 0}
        for itr in range(self._next, self._released):
            if itr not in self._ahead:
                self._ahead[itr] = self._collected(itr)
        waiting = {
            str(itr): {"rows": [x.copy() for x in _leaves(batch)], "episodes": episodes.to_plain()}
            for itr, (batch, episodes) in sorted(self._ahead.items())
        }
        inner = self._live.state_dict()
        return {
            "released": self._released,
            "next": self._next,
            "inner": inner,
            "waiting": waiting,
            "opened": np.array(inner["pool"]["episode"], np.int64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, and of other samplers' of as many slots and the same depth."""
        self._acting()
        ahead = state["released"] - state["next"] if state.get("released") else 0
        if state.get("released") == 0:
            return
        if ahead != self._depth:
            raise CheckpointError(f"the checkpoint holds {ahead} batches ahead; this sampler has depth={self._depth}")
        self._live.load_state_dict(state.get("inner", state))
        self.cut_slots = self._live.cut_slots
        if not self._depth:
            return
        self._next, self._released = state["next"], state["released"]
        for name, kept in state["waiting"].items():
            batch = self._live.buffer(int(name))
            for x, y in zip(_leaves(batch), kept["rows"]):
                x[...] = y
            self._ahead[int(name)] = batch, Episodes(**kept["episodes"])
        if self._ahead:
            last = self._ahead[max(self._ahead)][0]
            self._pool.follow([*last.values()] if isinstance(last, MultiAgentBatch) else [last])

    def _collected(self, itr: int) -> tuple[AnyBatch, Episodes]:
        return self._live.obtain_samples(itr, max(itr - self._depth, self._first))


class ReadyLive(RunnersLive):
    """The batch is one runner's fragment, of those that are ready the one whose runner was served longest ago.

    Each runner has `max(depth, 1)` requests; one that has delivered is asked again at once, with the newest weights.
    The order is that of arrival, so two runs are equal only where fragments come in an equal order, as in process.
    """

    _whole = False

    def __init__(
        self, settings: RunnerSampler, config: EnvConfig, seed: int, first_slot: int, total_slots: int | None
    ) -> None:
        parts = [range(i, i + 1) for i in range(settings.runners)]
        super().__init__(settings, config, seed, first_slot, total_slots, parts)
        n = settings.runners
        self._numbers = [0] * n  # of each runner's next fragment
        self._sent: list[list[int]] = [[] for _ in range(n)]  # versions of the requests that it has
        self._served = [0] * n
        self._since = [0.0] * n  # when each runner got its oldest request, or delivered last
        self._ready: list[int] = []  # runners whose fragment was seen to have come, in the order of serving them
        self._waiting: list[tuple[int, SampleBatch, Episodes]] = []
        self._count = 0
        self._round: dict[str, float] = {}
        self.workers.losses.append(self._lost)

    @property
    def _buffers(self) -> int:
        return max(self._depth, 1) + 2

    def obtain_samples(self, itr: int) -> tuple[AnyBatch, Episodes]:
        """A fragment [T, B] of one runner, valid until the next call, and the episodes that ended in it.

        Raises:
            EnvWorkerError: an environment raised or broke its contract, or runners were lost too often.
        """
        agent = self._acting()
        if self._waiting:
            i, batch, episodes = self._waiting.pop(0)
        else:
            weights = self.workers.publish(agent)
            while True:
                self.workers.welcome()
                for i in self.workers.alive:
                    if not self._sent[i]:  # it has just come up
                        self._request(i, weights, itr)
                begun = time.perf_counter()
                i = self._next_ready()
                batch, episodes = self._collected(i) if i >= 0 else (self.blank_batch(), Episodes())
                if i in self.workers.alive:
                    break
            self._round = {"group/round_ms": (time.perf_counter() - begun) * 1e3}
            self._request(i, weights, itr)
        self._count += 1
        self._served[i], self._last = self._count, batch
        self._measure(batch, itr)
        return batch, episodes

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches: each runner's, and the fragments that it still owes."""
        self._acting()
        for i, sent in enumerate(self._sent):
            while sent:
                batch, episodes = self._collected(i)
                if i in self.workers.alive:  # else nothing of it came
                    self._waiting.append((i, batch, episodes))
        self._ready.clear()
        return {
            "runners": [live.state_dict() for live in self._lives],
            "numbers": list(self._numbers),
            "faults": dict(self.workers.faults.counts),
            "waiting": [
                {"runner": i, "rows": [x.copy() for x in _leaves(batch)], "episodes": episodes.to_plain()}
                for i, batch, episodes in self._waiting
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, with as many runners of as many slots."""
        self._acting()
        if len(state.get("runners", ())) != len(self._lives):
            raise CheckpointError(
                f"the checkpoint is of {len(state.get('runners', ())) or 'no'} runners in ready mode; this sampler has "
                f"runners={len(self._lives)}, and mode='ready' goes on with as many"
            )
        self._numbers = list(state["numbers"])
        self.workers.faults.counts.clear()
        self.workers.faults.counts.update(state["faults"])
        self.cut_slots = []
        self._waiting.clear()
        self._ready.clear()
        for i, (live, kept) in enumerate(zip(self._lives, state["runners"])):
            live.load_state_dict(kept)
            self.cut_slots += [b + i * self.batch_spec.B for b in live.cut_slots]
        for kept in state["waiting"]:
            i = kept["runner"]
            batch = self._lives[i].blank_batch()
            for x, y in zip(_leaves(batch), kept["rows"]):
                x[...] = y
            self._waiting.append((i, batch, Episodes(**kept["episodes"])))

    def metrics(self) -> dict[str, float]:
        """Those of the group, waits of the runners' samplers averaged over runners."""
        found = [live.metrics() for live in self._lives]
        out = self.workers.faults.metrics()
        for name in dict.fromkeys(name for one in found for name in one):
            values = [one[name] for one in found if name in one]
            counted = name.startswith("faults/") or name in ("group/runners", "env/out_of_bounds", "env/lost_rewards")
            out[name] = out.get(name, 0.0) + sum(values) if counted else sum(values) / len(values)
        return {**out, **self._round, **self._lag}

    def _request(self, i: int, weights: Any, itr: int) -> None:
        """Asks a runner for fragments until it has as many requests as it may."""
        short = max(self._depth, 1) - len(self._sent[i])
        if short:
            first = self._numbers[i] + len(self._sent[i])
            if not self._sent[i]:
                self._since[i] = time.monotonic()
            self._pools[i].request(weights, range(first, first + short), itr)
            self._sent[i] += [itr] * short

    def _next_ready(self) -> int:
        """The runner to take the next fragment from; -1 where there was none in time, and runners were lost.

        Whoever is ready is asked for once all have been served that were ready the last time: to ask costs more the
        more runners there are.
        """
        if not self._ready:
            heads = {i: self._pools[i].requested(self._numbers[i])[i] for i, sent in enumerate(self._sent) if sent}
            limit_s = self.workers.deadline_s
            late_at = min((self._since[i] for i in heads), default=0.0) + limit_s
            come = timed(WAIT, self.workers.backend.wait)(list(heads.values()), max(late_at - time.monotonic(), 0.0))
            ready = set(map(id, come))
            now = time.monotonic()
            self._ready = sorted((i for i in heads if id(heads[i]) in ready), key=lambda i: self._served[i])
            for i in heads:
                if i not in self._ready and now - self._since[i] > limit_s:
                    self.workers.lost(i, late(limit_s))
        return self._ready.pop(0) if self._ready else -1

    def _lost(self, i: int) -> None:
        """Forgets what a lost runner was asked for."""
        self._sent[i].clear()
        self._ready = [j for j in self._ready if j != i]

    def _collected(self, i: int) -> tuple[AnyBatch, Episodes]:
        version = self._sent[i].pop(0)
        batch, episodes = self._lives[i].obtain_samples(self._numbers[i], version)
        self._numbers[i] += 1
        self._since[i] = time.monotonic()
        return batch, replace(episodes, slot=episodes.slot + i * self.batch_spec.B)


def _leaves(batch: AnyBatch) -> list[Any]:
    """The arrays of a batch, of many agents of one policy's after the other."""
    return tree_leaves([*batch.values()] if isinstance(batch, MultiAgentBatch) else batch)
