"""RunnerSource: runners as a Source, and its Server; batch k is fragment k of each of them, side by side.

The owner sends each runner its requests ahead, `depth` rounds of them, and every request carries the weights to act
with; so the work of a runner depends on the requests alone, and not on when they arrive.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.core.batch import SampleBatch
from penstock.core.noise import Noise
from penstock.core.trace import SAMPLE, WAIT, Ring, of_another, timed
from penstock.core.tree import Tree, tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, plain
from penstock.envs.pools.pool import OpenEpisode, PoolState, Source
from penstock.samplers.acting_agents import last_row
from penstock.samplers.runners.agent_bytes import together
from penstock.samplers.runners.columns import after_standing_still, log_of, side_by_side, stand_still
from penstock.samplers.runners.evaluation import EvaluationRunners
from penstock.samplers.runners.runner import unpack_fragment
from penstock.samplers.runners.runners import Runners
from penstock.workers.shares import columns

_SAME_CLOCK_NS = 60 * 10**9
"""A fragment that ended so long ago by its runner's clock ended by another clock."""


class RunnerSource(Source):
    """Some of the runners; their fragments fill the columns of a batch.

    Args:
        numbers: of these runners, consecutive. whole: they are all runners, so their faults are the pool's.
    """

    def __init__(self, runners: Runners, numbers: Sequence[int], config: EnvConfig, whole: bool = True) -> None:
        self._config, T = config, runners.fragment.T
        self._seating = seating = config.seated(runners.spec)
        self.runners, self.numbers, self._whole = runners, list(numbers), whole
        start = runners.slots[self.numbers[0]].start
        self._slots = {i: slice(runners.slots[i].start - start, runners.slots[i].stop - start) for i in self.numbers}
        B = self._slots[self.numbers[-1]].stop
        self.specs, self.seats, self.takes_turns = seating.specs, seating.seats, seating.turns
        self.info_keys, self._most = runners.info_keys, seating.most_episodes(T)
        self.groups, self.log = side_by_side(seating, B), log_of(seating, B, T, self.info_keys)
        self._columns = {i: [columns(slots, n) for n in self.seats] for i, slots in self._slots.items()}
        self.requests: dict[int, dict[int, Any]] = {}
        """Calls in flight: of each batch by runner."""
        self._resuming: dict[int, Any] = {}  # calls of replacements that have not delivered yet
        self._previous: Sequence[SampleBatch] | None = None
        self._states: Tree = None
        self._warmup: list[Any] = [([], [])] * B
        self._opened = np.zeros(B, np.int64)  # number of each slot's episode
        self.calls = [list[CallRecord]() for _ in range(B)]
        self._ticks = 0
        self._runner_metrics: dict[int, dict[str, float]] = {}
        self._gone: Counter[str] = Counter()  # faults inside runners that were lost
        self._restored: Counter[str] = Counter()
        self.times: dict[str, float] = {}
        """Metrics of the last round, `group/..._ms`."""
        rows = {i: of_another(f"runner {i}", i) for i in self.numbers}
        self._rows = {i: row for i, row in rows.items() if row is not None}
        self._collect = timed(WAIT, runners.collect)
        runners.on_failed.append(self._lost)
        runners.on_restored.append(self._resume_runner)

    def fill(self, batches: Sequence[SampleBatch], itr: int) -> None:
        """Waits for fragment `itr` of every runner, and writes it into the runner's columns of the batches."""
        begun, copied, slowest_s = time.perf_counter(), 0.0, 0.0
        arrived: set[int] = set()
        newest = np.full_like(self._opened, -1)

        def take(i: int, reply: dict[str, Any]) -> None:
            nonlocal copied, slowest_s
            start = time.perf_counter()
            if i in self._resuming:
                self.runners.backend.result(self._resuming.pop(i), self.runners.deadline_s)
            unpack_fragment(reply["rows"], batches, self._columns[i], self.log, self._slots[i])
            arrived.add(i)
            newest[self._slots[i]] = reply["newest_episodes"]
            slowest_s = max(slowest_s, reply["sample_s"])
            self._runner_metrics[i] = reply["metrics"]
            if reply["warmup"] is not None:
                self._warmup[self._slots[i]] = reply["warmup"]
            self.runners.warn(i, reply["warnings"])
            if i in self._rows and reply["span"] is not None:
                self._note(self._rows[i], *reply["span"])
            copied += time.perf_counter() - start

        self._collect(self.requests.pop(itr), then=take)
        for i in self._columns:
            if i not in arrived:
                self._absent(i, batches)
        self._opened += batches[0].first[1:].sum(0) if self.log is None else self.log.count
        self._opened = np.maximum(self._opened, newest)  # some were cut as workers died, or are in no row
        self._ticks += batches[0].spec.T
        self._previous = batches
        self.times |= {
            "group/round_ms": (time.perf_counter() - begun) * 1e3,
            "group/copy_ms": copied * 1e3,
            "group/slowest_ms": slowest_s * 1e3,
        }

    def _note(self, row: Ring, started: int, stopped: int) -> None:
        """Notes the span of a fragment; one of another machine's clock is shifted to end at its arrival."""
        now = time.perf_counter_ns()
        shift = 0 if 0 <= now - stopped < _SAME_CLOCK_NS else now - stopped
        row.add(SAMPLE, started + shift, stopped + shift)

    # The rest of a source.

    def get_state(self) -> PoolState:
        """The state after the last fragment that was asked for; slots of runners that are lost reset next."""
        calls = [list(mine) for mine in self.calls] if any(self.calls) else []
        total = PoolState.resetting(self._opened.tolist(), tick=self._ticks, faults=dict(self._faults()), calls=calls)
        alive = [i for i in self.runners.alive if i in self._columns]
        replies = self.runners.collect(
            {i: self.runners.call(i, "pool_state") for i in alive}, self.runners.start_timeout_s
        )
        for i, reply in replies.items():
            part, slots = PoolState.from_plain(reply["pool"]), self._slots[i]
            part.began = [n + total.tick - part.tick for n in part.began]
            if part.episode:  # native batched environments know of none: all of their slots reset next
                total.put(slots, part)
            for policy, states, at in zip(self._seating.policies, self._states, self._columns[i]):
                tree_map(lambda x, y, at=at: np.copyto(x[at], y), states, reply["agent_states"][policy])
            total.restarts = max(total.restarts, part.restarts)
        return total

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        self._opened[:], self._ticks = np.maximum(state.episode, 0), state.tick
        self.calls = [list(mine) for mine in state.calls] or [[] for _ in self._opened]
        self._restored, self._previous = Counter(state.faults), outs
        self._gone.clear()
        self._runner_metrics.clear()
        if self._whole:
            self.runners.faults.counts.clear()
        calls = {}
        for i, slots in self._slots.items():
            if i in self.runners.alive:
                part = state.of(slots)
                part.restarts = state.restarts
                calls[i] = self.runners.call(
                    i,
                    "resume",
                    self._rows_of(outs, i),
                    self._states_of(i),
                    part.to_plain(),
                    [None if x is None else tuple(x) for x in journal[slots]],
                )
        cut_slots = self.runners.collect(calls, self.runners.start_timeout_s)
        lost: list[int] = []
        for i, slots in self._slots.items():  # without an answer it died, and the open episodes with it
            mine = range(slots.start, slots.stop)
            lost += [mine[b] for b in cut_slots[i]] if i in cut_slots else [b for b in mine if not state.ended[b]]
        return sorted(lost)

    def call(self, call: EnvCall, slots: Sequence[int]) -> list[Answer]:
        return self.runners.call_envs(call, slots, self._slots, self.calls)

    def recall(self, calls: Sequence[Sequence[CallRecord]]) -> None:
        self.calls = [list(mine) for mine in calls]
        alive = [i for i in self.runners.alive if i in self._slots]
        sent = {i: self.runners.call(i, "recall", plain(self.calls[self._slots[i]])) for i in alive}
        self.runners.collect(sent, self.runners.start_timeout_s)

    def for_evaluation(self, B: int, first_slot: int = 0) -> EvaluationRunners:
        """Slots of an evaluation, dealt among the runners that are alive."""
        return EvaluationRunners(self.runners, self._config.for_evaluation, B)

    def evaluation_slots(self, wanted: int) -> int:
        fixed = self.runners.evaluation_slots
        return wanted if fixed == 1 else fixed * len(self.runners.alive)

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        return self._warmup

    def metrics(self) -> dict[str, float]:
        """`group/...` times of the last round, runners alive, faults of runners and inside them, and their waits."""
        waits: dict[str, list[float]] = {}
        for of_runner in self._runner_metrics.values():
            for name, value in of_runner.items():
                if not name.startswith(("faults/", "env/out_of_bounds")):
                    waits.setdefault(name, []).append(value)
        lost = waits.pop("env/lost_rewards", [])
        return {
            **{name: sum(values) / len(values) for name, values in waits.items()},
            **({"env/lost_rewards": sum(lost)} if lost else {}),
            **self.times,
            "group/runners": float(sum(i in self._columns for i in self.runners.alive)),
            **{f"faults/{name}": float(n) for name, n in self._faults().items()},
        }

    def close(self) -> None:
        self.runners.close()

    def keep_states(self, states: Tree) -> None:
        """Takes the arrays [B, ...] of each policy in which recurrent states stand for checkpoints."""
        self._states = states

    def _faults(self) -> Counter[str]:
        counts = self._restored + self._gone + (self.runners.faults.counts if self._whole else Counter())
        for values in self._runner_metrics.values():
            counts.update({name[len("faults/") :]: int(n) for name, n in values.items() if name.startswith("faults/")})
        return counts

    def _lost(self, i: int) -> None:
        """Drops the requests to a lost runner; the episodes that it may have begun are not begun again."""
        if i not in self._columns:
            return
        owed = sum(calls.pop(i, None) is not None for calls in self.requests.values())
        self._opened[self._slots[i]] += (owed + 1) * self._most
        metrics = self._runner_metrics.pop(i, {})
        self._gone.update({k[len("faults/") :]: int(n) for k, n in metrics.items() if k.startswith("faults/")})

    def _absent(self, i: int, batches: Sequence[SampleBatch]) -> None:
        """The columns of a runner that takes no part: the last row of the batch before, and nothing valid."""
        for policy, (batch, slots) in enumerate(zip(batches, self._columns[i])):
            row = None if self._previous is None else last_row(self._previous[policy][:, slots])
            lost = stand_still(batch[:, slots], row, self.specs[policy].null_action)
            self.runners.faults.counts["lost_steps"] += lost
        if self.log is not None:
            self.log.count[self._slots[i]] = 0

    def _rows_of(self, batches: Sequence[SampleBatch], i: int) -> dict[str, dict[str, Tree]]:
        """The last row of a runner's slots, by policy id."""
        each = zip(self._seating.policies, batches, self._columns[i])
        return {policy: last_row(batch[:, at]) for policy, batch, at in each}

    def _states_of(self, i: int) -> dict[str, Tree]:
        """The recurrent states of a runner's slots, by policy id."""
        each = zip(self._seating.policies, self._states, self._columns[i])
        return {policy: tree_map(lambda x, at=at: x[at].copy(), states) for policy, states, at in each}

    def _resume_runner(self, i: int) -> None:
        """Has a replacement go on from the last row of its columns: every slot resets into its next episode."""
        if i not in self._columns:
            return
        slots = self._slots[i]
        if self._previous is None:
            if any(self.calls[slots]):
                self._resuming[i] = self.runners.call(i, "recall", plain(self.calls[slots]))
            return
        state = PoolState.resetting(self._opened[slots].tolist(), tick=self._ticks, restarts=self._ticks)
        state.calls = list(self.calls[slots])
        rows, unknown = self._rows_of(self._previous, i), [None] * len(state.episode)
        if self.requests:  # it has no part in batches that are on their way, which leave its columns as `_absent` does
            for row, spec in zip(rows.values(), self.specs):
                after_standing_still(row, spec.null_action)
        self._resuming[i] = self.runners.call(i, "resume", rows, None, state.to_plain(), unknown)


class RunnerServer:
    """Fills batches with the fragments of runners, instead of by the loop."""

    remote = True
    """Recurrent states are on the runners, and asked for by checkpoints."""
    device: torch.device | None = torch.device("cpu")

    def serve(
        self,
        pool: RunnerSource | EvaluationRunners,
        agents: Sequence[Agent],
        batches: Sequence[SampleBatch],
        views: Any,
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """Fills a batch; arguments as in `collect`."""
        if isinstance(pool, RunnerSource):
            assert noise is not None
            pool.fill(batches, noise.batch)
        else:
            pool.fill(agents, batches, noise)

    def place(
        self, pool: Any, batches: list[SampleBatch], states: Tree, agents: Sequence[Agent]
    ) -> tuple[list[SampleBatch], Tree]:
        """Gives the runners the agent; buffers stay where they are, in this process."""
        if isinstance(pool, RunnerSource):
            pool.keep_states(states)
            pool.runners.install(together(agents), pool.numbers)
        return batches, states

    def metrics(self) -> dict[str, float]:
        """Returns none: the pool has all metrics of its runners."""
        return {}

    def close(self) -> None:
        """Does nothing: runners end with their pool."""
