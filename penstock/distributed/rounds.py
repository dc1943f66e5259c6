"""The runners of a group as an EnvPool: batch k is fragment k of every runner, side by side.

The driver sends each runner its requests ahead, `depth` rounds of them, and every request carries the weights to act
with; so what a runner does depends on the requests alone, and not on when they arrive.
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
from penstock.core.errors import EnvWorkerError
from penstock.core.noise import Noise
from penstock.core.spec import EnvSpec
from penstock.core.trace import SAMPLE, WAIT, Ring, of_another, timed
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map
from penstock.distributed.group import EnvRunnerGroup
from penstock.distributed.packing import together, unpack_rows
from penstock.envs.pools.many.hosting import most_episodes
from penstock.envs.pools.pool import EnvPool, EpisodeLog, Group, OpenEpisode, PoolState
from penstock.envs.seats import Seating
from penstock.samplers.installed import last_row
from penstock.samplers.live import EVAL_T
from penstock.workers.shares import carry_columns, columns, cut, even_split

_SAME_CLOCK_NS = 60 * 10**9
"""A fragment that ended so long ago by its runner's clock ended by another clock."""


class EvaluationBroken(EnvWorkerError):
    """A runner was lost in an evaluation; played anew it has the same episodes."""


class RunnerPool(EnvPool):
    """Some runners of a group, whose fragments fill the columns of a batch.

    Args:
        runners: their numbers, which follow each other. whole: the group's own faults are counted as the pool's.
    """

    def __init__(
        self, workers: EnvRunnerGroup, runners: Sequence[int], whole: bool = True, seating: Seating | None = None
    ) -> None:
        self.seating, T = seating, workers.fragment.T
        self.workers, self.runners, self._whole = workers, list(runners), whole
        start = workers.slots[self.runners[0]].start
        self._columns = {i: slice(workers.slots[i].start - start, workers.slots[i].stop - start) for i in self.runners}
        B = self._columns[self.runners[-1]].stop
        self.specs, self.groups, self.log = _seated(workers, B, seating, T)
        self.info_keys, self.seats = workers.info_keys, (1,) if seating is None else seating.seats
        self.takes_turns = seating is not None and seating.turns
        self._most = T + 1 if seating is None else most_episodes(seating, T)
        self._calls: dict[int, dict[int, Any]] = {}  # requests in flight: batch -> runner -> call
        self._taking_over: dict[int, Any] = {}  # calls of replacements that have not delivered yet
        self._previous: Sequence[SampleBatch] | None = None
        self._states: Tree = None
        self._warmup: list[Any] = [([], [])] * B
        self._opened = np.zeros(B, np.int64)  # number of each slot's episode
        self._ticks = 0
        self._runner_metrics: dict[int, dict[str, float]] = {}
        self._gone: Counter[str] = Counter()  # faults inside runners that were lost
        self._restored: Counter[str] = Counter()
        self._times: dict[str, float] = {}
        rows = {i: of_another(f"runner {i}", i) for i in self.runners}
        self._rows = {i: row for i, row in rows.items() if row is not None}
        workers.losses.append(self._lost)
        workers.arrivals.append(self._take_over)

    # What a RunnerSampler asks.

    def request(self, weights: Any, batches: Sequence[int], version: int) -> None:
        """Asks every runner for these fragments, to be collected with weights as `publish` returned them."""
        begun = time.perf_counter()
        alive = [i for i in self.workers.alive if i in self._columns]
        for itr in batches:
            self._calls[itr] = {i: self.workers.call(i, "fill", itr, version, weights) for i in alive}
        self._times["group/send_ms"] = (time.perf_counter() - begun) * 1e3

    def requested(self, itr: int) -> dict[int, Any]:
        """The calls for batch `itr` that are in flight, by runner."""
        return self._calls[itr]

    def follow(self, batches: Sequence[SampleBatch]) -> None:
        """Makes these the batches whose last row comes before the next one."""
        self._previous = batches

    def fill(self, batches: Sequence[SampleBatch], itr: int) -> None:
        """Waits for fragment `itr` of every runner, and writes it into the runner's columns of the batches."""
        begun, copied, slowest_s = time.perf_counter(), 0.0, 0.0
        arrived: set[int] = set()

        def take(i: int, reply: dict[str, Any]) -> None:
            nonlocal copied, slowest_s
            start = time.perf_counter()
            if i in self._taking_over:
                self.workers.backend.result(self._taking_over.pop(i), self.workers.deadline_s)
            unpack_rows(reply["rows"], _part(self, batches, self._columns[i]))
            arrived.add(i)
            slowest_s = max(slowest_s, reply["sample_s"])
            self._runner_metrics[i] = reply["metrics"]
            if reply["warmup"] is not None:
                self._warmup[self._columns[i]] = reply["warmup"]
            self.workers.warn(i, reply["warnings"])
            if i in self._rows and reply["span"] is not None:
                self._note(self._rows[i], *reply["span"])
            copied += time.perf_counter() - start

        timed(WAIT, self.workers.collect)(self._calls.pop(itr), then=take)
        for i in self._columns:
            if i not in arrived:
                self._absent(i, batches)
        self._opened += batches[0].first[1:].sum(0) if self.log is None else self.log.count
        self._ticks += batches[0].spec.T
        self._previous = batches
        self._times |= {
            "group/round_ms": (time.perf_counter() - begun) * 1e3,
            "group/copy_ms": copied * 1e3,
            "group/slowest_ms": slowest_s * 1e3,
        }

    def _note(self, row: Ring, started: int, stopped: int) -> None:
        """Notes the span of a fragment; by a clock other than ours it ended when it came."""
        now = time.perf_counter_ns()
        shift = 0 if 0 <= now - stopped < _SAME_CLOCK_NS else now - stopped
        row.add(SAMPLE, started + shift, stopped + shift)

    # The rest of a pool.

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        raise NotImplementedError  # a LiveSampler restarts pools of evaluations only

    def bind(self, outs: Sequence[SampleBatch]) -> None: ...
    def send(self, group: int, row: int) -> None: ...
    def recv(self) -> int:
        return 0

    def get_state(self) -> PoolState:
        """The state after the last fragment that was asked for; slots of runners that are lost reset next."""
        whole = PoolState.resetting(self._opened.tolist(), tick=self._ticks, faults=dict(self._faults()))
        alive = [i for i in self.workers.alive if i in self._columns]
        found = self.workers.collect(
            {i: self.workers.call(i, "pool_state") for i in alive}, self.workers.start_timeout_s
        )
        for i, reply in found.items():
            part, slots = PoolState.from_plain(reply["pool"]), self._columns[i]
            part.began = [n + whole.tick - part.tick for n in part.began]
            if part.episode:  # native batched environments know of none: all of their slots reset next
                whole.put(slots, part)
            found_states = reply["agent_states"]
            ids = None if self.seating is None else self.seating.policies
            for policy, (there, n) in enumerate(zip(self._states, self.seats)):
                mine = found_states if ids is None else found_states[ids[policy]]
                at = columns(slots, n)
                tree_map(lambda x, y, at=at: np.copyto(x[at], y), there, mine)
            whole.restarts = max(whole.restarts, part.restarts)
        return whole

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        self._opened[:], self._ticks = np.maximum(state.episode, 0), state.tick
        self._restored, self._previous = Counter(state.faults), outs
        self._gone.clear()
        self._runner_metrics.clear()
        if self._whole:
            self.workers.faults.counts.clear()
        calls = {}
        for i, slots in self._columns.items():
            if i in self.workers.alive:
                part = state.of(slots)
                part.restarts = state.restarts
                calls[i] = self.workers.call(
                    i,
                    "go_on",
                    self._rows_of(outs, slots),
                    self._states_of(slots),
                    part.to_plain(),
                    [None if x is None else tuple(x) for x in journal[slots]],
                )
        found = self.workers.collect(calls, self.workers.start_timeout_s)
        lost: list[int] = []
        for i, slots in self._columns.items():  # without an answer it died, and the open episodes with it
            mine = range(slots.start, slots.stop)
            lost += [mine[b] for b in found[i]] if i in found else [b for b in mine if not state.ended[b]]
        return sorted(lost)

    def for_evaluation(self, B: int, first_slot: int = 0) -> EvaluationRunners:
        """Slots of an evaluation, dealt among the runners that are alive."""
        return EvaluationRunners(self, B)

    def evaluation_slots(self, wanted: int) -> int:
        fixed = self.workers.evaluation_slots
        return wanted if fixed == 1 else fixed * len(self.workers.alive)

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        return self._warmup

    def metrics(self) -> dict[str, float]:
        """`group/...` times of the last round, runners alive, faults of runners and inside them, and their waits."""
        waits: dict[str, list[float]] = {}
        for found in self._runner_metrics.values():
            for name, value in found.items():
                if not name.startswith(("faults/", "env/out_of_bounds")):
                    waits.setdefault(name, []).append(value)
        lost = waits.pop("env/lost_rewards", [])
        return {
            **{name: sum(values) / len(values) for name, values in waits.items()},
            **({"env/lost_rewards": sum(lost)} if lost else {}),
            **self._times,
            "group/runners": float(sum(i in self._columns for i in self.workers.alive)),
            **{f"faults/{name}": float(n) for name, n in self._faults().items()},
        }

    def close(self) -> None:
        self.workers.close()

    def keep_states(self, states: Tree) -> None:
        """Takes the arrays [B, ...] of each policy in which recurrent states stand for checkpoints."""
        self._states = states

    def _faults(self) -> Counter[str]:
        counts = self._restored + self._gone + (self.workers.faults.counts if self._whole else Counter())
        for found in self._runner_metrics.values():
            counts.update({name[len("faults/") :]: int(n) for name, n in found.items() if name.startswith("faults/")})
        return counts

    def _lost(self, i: int) -> None:
        """Forgets what a lost runner owed; the episodes that it may have begun are not begun again."""
        if i not in self._columns:
            return
        owed = sum(calls.pop(i, None) is not None for calls in self._calls.values())
        self._opened[self._columns[i]] += (owed + 1) * self._most
        metrics = self._runner_metrics.pop(i, {})
        self._gone.update({k[len("faults/") :]: int(n) for k, n in metrics.items() if k.startswith("faults/")})

    def _absent(self, i: int, batches: Sequence[SampleBatch]) -> None:
        """The columns of a runner that takes no part: the last row of the batch before, and nothing valid."""
        for policy, (batch, n) in enumerate(zip(batches, self.seats)):
            slots = columns(self._columns[i], n)
            if self._previous is not None:
                carry_columns(self._previous[policy], batch, slots)
            for x in tree_leaves(batch.state):
                x[slots] = 0
            agents = {key: column for key, column in batch.info.items() if key != "env"}
            for x in tree_leaves(agents):
                x[:, slots] = 0
            self.workers.faults.counts["lost_steps"] += cut(batch, slots, 0, self.specs[policy].null_action)
        if self.log is not None:
            self.log.count[self._columns[i]] = 0

    def _rows_of(self, batches: Sequence[SampleBatch], slots: slice) -> Any:
        """The last rows of some slots, as `LiveSampler.go_on` takes them."""
        return self._by_policy([last_row(batch[:, columns(slots, n)]) for batch, n in zip(batches, self.seats)])

    def _states_of(self, slots: slice) -> Any:
        """The recurrent states of some slots, in the same form."""
        parts = [columns(slots, n) for n in self.seats]
        return self._by_policy([tree_map(lambda x, at=at: x[at].copy(), s) for at, s in zip(parts, self._states)])

    def _by_policy(self, found: list[Any]) -> Any:
        """The only one, or of environments of many agents one for each policy id."""
        return found[0] if self.seating is None else dict(zip(self.seating.policies, found))

    def _take_over(self, i: int) -> None:
        """Has a replacement go on from the last row of its columns: every slot resets into its next episode."""
        if i not in self._columns or self._previous is None:
            return
        slots = self._columns[i]
        state = PoolState.resetting(self._opened[slots].tolist(), tick=self._ticks, restarts=self._ticks)
        row, unknown = self._rows_of(self._previous, slots), [None] * len(state.episode)
        if self._calls:  # it has no part in batches that are on their way, which leave its columns as `_absent` does
            for policy, mine in enumerate([row] if self.seating is None else row.values()):
                mine["first"][:], mine["prev_reward"][:] = False, 0
                tree_assign(mine["prev_action"], slice(None), self.specs[policy].null_action)
        self._taking_over[i] = self.workers.call(i, "go_on", row, None, state.to_plain(), unknown)


class EvaluationRunners(EnvPool):
    """B evaluation slots, dealt among the runners that are alive when an evaluation begins."""

    evaluation = True

    def __init__(self, pool: RunnerPool, B: int) -> None:
        self._workers = pool.workers
        self.specs, self.groups, self.log = _seated(pool.workers, B, pool.seating, EVAL_T)
        self.info_keys, self.seats, self.takes_turns = pool.info_keys, pool.seats, pool.takes_turns
        self._B = B
        self._columns: dict[int, slice] = {}
        self._limit: int | None = None
        self._synced = False

    def limit(self, max_steps: int) -> None:
        self._limit = max_steps

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        self._workers.welcome()
        alive, start, fixed = self._workers.alive, 0, self._workers.evaluation_slots
        if fixed > 1:  # natively batched environments have so many each, and one more runner may have come up
            alive = alive[: self._B // fixed]
            if len(alive) * fixed < self._B:
                raise EvaluationBroken(f"{self._B // fixed - len(alive)} runners were lost before an evaluation")
        self._columns.clear()
        for i, n in zip(alive, even_split(self._B, len(alive))):
            if n:
                self._columns[i] = slice(start, start + n)
                start += n
        left = [1] * self._B if episodes is None else list(episodes)
        self._synced = False
        self._all(
            {
                i: self._workers.call(i, "open_evaluation", s.stop - s.start, s.start, seed, left[s], self._limit)
                for i, s in self._columns.items()
            }
        )

    def fill(self, agents: Sequence[Agent], batches: Sequence[SampleBatch], noise: Noise | None) -> None:
        """The next rows of every slot."""
        weights = None if self._synced else self._workers.publish(together(agents))
        self._synced = True
        address = None if noise is None else (noise.seed, int(noise.purpose), noise.batch)
        calls = {i: self._workers.call(i, "fill_evaluation", address, weights) for i in self._columns}
        for i, rows in self._all(calls).items():
            unpack_rows(rows, _part(self, batches, self._columns[i]))

    def _all(self, calls: dict[int, Any]) -> dict[int, Any]:
        found = self._workers.collect(calls, self._workers.start_timeout_s)
        if len(found) < len(calls):
            raise EvaluationBroken(f"{len(calls) - len(found)} of {len(calls)} runners were lost in an evaluation")
        return found

    def bind(self, outs: Sequence[SampleBatch]) -> None: ...
    def send(self, group: int, row: int) -> None: ...
    def recv(self) -> int:
        return 0

    # Nothing of an evaluation is stored, and no evaluation has another; a Protocol wants them all the same.

    def get_state(self) -> PoolState:
        raise NotImplementedError

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        raise NotImplementedError

    def for_evaluation(self, B: int, first_slot: int = 0) -> EnvPool:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing: the runners close their environments with themselves."""


def _seated(
    workers: EnvRunnerGroup, B: int, seating: Seating | None, T: int
) -> tuple[tuple[EnvSpec, ...], tuple[Group, ...], EpisodeLog | None]:
    """Specs and groups of the policies of B slots, and of many agents the log of batches of T rows."""
    if seating is None:
        return (workers.spec,), (Group(0, slice(0, B)),), None
    groups = tuple(Group(policy, slice(0, B * n)) for policy, n in enumerate(seating.seats))
    log = EpisodeLog.allocate(B, most_episodes(seating, T), len(seating.agents), workers.info_keys)
    return seating.specs, groups, log


def _part(pool: EnvPool, batches: Sequence[SampleBatch], slots: slice) -> list[Any]:
    """What a runner returns of its slots: the columns of each policy, and of many agents the log."""
    log = [] if pool.log is None else [tree_map(lambda x: x[slots], pool.log)]
    return [*(batch[:, columns(slots, n)] for batch, n in zip(batches, pool.seats)), *log]


class Rounds:
    """The `Server` of a LiveSampler over runners: their agents act, and whole batches come from them."""

    remote = True
    """Recurrent states are on the runners, and asked for by checkpoints."""
    device: torch.device | None = torch.device("cpu")

    def serve(
        self,
        pool: RunnerPool | EvaluationRunners,
        agents: Sequence[Agent],
        batches: Sequence[SampleBatch],
        views: Any,
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """Fills a batch; arguments as of `collect`."""
        if isinstance(pool, RunnerPool):
            assert noise is not None
            pool.fill(batches, noise.batch)
        else:
            pool.fill(agents, batches, noise)

    def place(
        self, pool: Any, batches: list[SampleBatch], states: Tree, agents: Sequence[Agent]
    ) -> tuple[list[SampleBatch], Tree]:
        """Gives the runners the agent; buffers stay where they are, in this process."""
        if isinstance(pool, RunnerPool):
            pool.keep_states(states)
            pool.workers.install(together(agents), pool.runners)
        return batches, states

    def metrics(self) -> dict[str, float]:
        """Nothing besides the pool's."""
        return {}

    def close(self) -> None:
        """Nothing: runners end with their pool."""
