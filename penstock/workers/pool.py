"""An EnvPool with worker processes that step its slots, straight into the batch in shared memory.

Each worker owns some slots of every part, so that it steps one part while another is served. A part has a group for
each policy, and steps once all of them are served. Rows are handed over by counters: the learner writes the actions of
a row and then `SENT`, the worker writes its answers and then `DONE`. Where agents take turns the worker also writes
which turns wait, and a sweep is handed over as a row is.
A worker that dies leaves the rows that it had finished; the rest of its columns is not valid in that batch, and its
replacement goes on with the next episodes in the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core import trace
from penstock.core.batch import SampleBatch
from penstock.core.shared_memory import share
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_map
from penstock.envs.ids import entries_to_ship
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, recorded
from penstock.envs.pools.messages import one_spec
from penstock.envs.pools.pool import EnvPool, Group, Ints, OpenEpisode, PoolState, lost_rewards
from penstock.envs.pools.settings import DEFAULTS, STEPPING, PoolSettings
from penstock.envs.seats import Seating
from penstock.workers import control
from penstock.workers.batches import SharedBatches
from penstock.workers.messages import Attach, Call, MakePool, Resume, SetState, WorkerAgents
from penstock.workers.shares import LogAndTurns, at_work, columns, even_split, part_of
from penstock.workers.supervisor import Workers

TRAINING, EVALUATION = 0, 1
"""Numbers of a sampler's two pools."""
PARAMETERS = 4
"""The shared file of the agent's parameters; a pool has 2 * number (batches) and 2 * number + 1 (episode table)."""


class ProcessPool(EnvPool):
    """B slots of one of a sampler's two pools, spread over its workers; `Supervised` by the workers' supervisor.

    Args:
        number: TRAINING or EVALUATION. B: slots; of many agents a slot is an environment, with columns for all seats.
        groups: parts that step by themselves. exclusive: never have two of them stepping at a time.
        settings: without `activity` and `episode_table`, which workers add.
        first_slot: number of the first slot among those of all samplers of the run.
    """

    remote = True
    """Steps are taken in other processes."""

    def __init__(
        self,
        workers: Workers,
        number: int,
        config: EnvConfig,
        seed: int,
        B: int,
        settings: PoolSettings = DEFAULTS,
        groups: int = 1,
        exclusive: bool = False,
        first_slot: int = 0,
    ) -> None:
        self._workers, self._number, self._config, self.seed = workers, number, config, seed
        self.settings, self.evaluation = settings, settings.evaluation
        self._first_slot, self._exclusive = first_slot, exclusive
        self.info_keys = config.all_info_keys
        self._B, starts = B, np.cumsum([0, *even_split(B, groups)]).tolist()
        self._parts = [slice(a, b) for a, b in zip(starts, starts[1:])]
        self.seats, self.takes_turns = config.seats, config.takes_turns
        self.groups = tuple(
            Group(policy, columns(slots, n)) for slots in self._parts for policy, n in enumerate(self.seats)
        )
        """Columns of one part after the other; in each part, of one policy after the other."""
        there = workers.live if self.evaluation else list(range(workers.count))
        self.shares = [
            [part_of(slots, len(there), there.index(w)) if w in there else None for slots in self._parts]
            for w in range(workers.count)
        ]
        """Slots of each worker in each part; evaluations have none where a worker was dropped."""
        self._owners = [w for w in range(workers.count) if any(self.shares[w])]
        # As before every first episode: a worker may die before it has written its own lines.
        self._table_places, self.episode_table = share(
            workers.memory_fds[2 * number + 1], np.tile(np.array([-1, -1, 0, 0, 0]), (B, 1)), "the episode table"
        )
        self._batches: SharedBatches | None = None
        self._shared: LogAndTurns | None = None
        self._attached: Attach | None = None
        self.parameters: list[Tree] = []
        """Parameters of each agent that acts in the workers, in shared memory; to be written only between two
        batches."""
        self._members: list[list[tuple[Any, int]]] = [[] for _ in self._parts]
        self._active: set[int] = set()
        self._served = [0] * len(self._parts)  # policies whose actions of the next row are there
        self._out: list[tuple[int, int]] = []
        self._queue: deque[tuple[int, int]] = deque()
        self._back: deque[int] = deque()  # groups of a part that has stepped
        self._found = -1
        self.calls = [list[CallRecord]() for _ in range(B)]
        self.wait_s = 0.0
        """Seconds that the loop has waited for environments."""
        self._collecting = self._binding = False
        self._unbound: set[int] = set()
        if number == TRAINING:
            plain = workers.start(self)
            made = [answer[0] for answer in plain]
        else:
            workers.supervised[1:] = [self]  # in place of one with another number of slots
            made = [a and a[0] for a in workers.call([[self._make(w, False)] for w in range(workers.count)])]
        specs = [EnvSpec.from_plain(spec) for spec in made if spec is not None]
        self._seating = config.seating or Seating.alone(one_spec(specs, config.name))
        self.specs, self.spec = self._seating.specs, self._seating.specs[0]

    # Called by the supervisor: see `Supervised`.

    def messages(self, w: int, replaces: bool) -> list[Any]:
        out: list[Any] = [self._make(w, replaces)]
        if self._attached is not None:
            out += [self._attached, *([Resume(self._number, self._previous_of(w))] if replaces else [])]
        return out

    def whereabouts(self, w: int, block: Any) -> str:
        activity = block[control.ACTIVITY : control.ACTIVITY + control.ACTIVITY_WORDS].tolist()
        if activity[5] != self.evaluation:
            return ""
        if not activity[1]:
            first = self._first_slot
            columns = ", ".join(f"{first + s.start} to {first + s.stop - 1}" for s in self.shares[w] if s)
            return f"between steps of {self._config.name}, slots {columns}"
        slot = activity[3] + activity[0] - self._first_slot
        action, batches = None, self._batches
        if activity[1] == STEPPING and batches is not None and batches.current >= 0 and not self._seating.many:
            (batch,) = batches.buffers[batches.current]
            g = next(g for g, slots in enumerate(self._parts) if slot < slots.stop)
            row = max(block[control.ROWS] if self._collecting else block[control.DONE + g], 0)
            if row < batch.spec.T:
                action = tree_map(lambda x: x[row, slot].tolist(), batch.action)
        return at_work(self._config.name, self.seed, activity, self.episode_table[slot].tolist(), action)

    def lost(self, w: int) -> None:
        self.broken = self.broken or self.evaluation
        if w not in self._active:
            return
        self._active.discard(w)
        block = self._workers.control.blocks[w]
        done = block[control.COMMAND] == block[control.DONE_COMMAND]
        bound = block[control.ROWS] >= 0 if self._collecting else done
        assert self._batches is not None
        if self._binding and not bound:
            self._unbound.add(w)
        for g, slots in enumerate(self.shares[w]):
            if slots is None:
                continue
            if w in self._unbound:
                self._batches.restore(slots)
            else:
                row = block[control.ROWS] if self._collecting else block[control.DONE + g]
                whole = done if self._collecting else not self._batches.room(slots)
                self._count(self._batches.lose(g, slots, row, whole))
                self._members[g] = [m for m in self._members[g] if m[1] != w]

    # The pool.

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        self.seed = seed
        if self._batches is not None:
            self._batches.go_on_from(-1)

        def args(slots: slice | None) -> tuple[Any, ...] | None:
            return None if slots is None else (seed, None if episodes is None else list(episodes[slots]))

        while None in map(self._call("restart", args).__getitem__, self._taking_part()):
            pass  # a worker died of it, and the one in its place has the old episodes

    def limit(self, max_steps: int) -> None:
        self.episode_table[:, 3] = max_steps

    def for_evaluation(self, B: int, first_slot: int = 0) -> ProcessPool:
        settings, parts = self.settings.for_evaluation(B), min(len(self._parts), B)
        return ProcessPool(
            self._workers,
            EVALUATION,
            self._config.for_evaluation,
            self.seed,
            B,
            settings,
            parts,
            self._exclusive,
            first_slot,
        )

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        self._open(outs)
        blocks = self._workers.control.blocks
        for block in blocks:  # before the command: a worker steps where SENT is above DONE
            for g in range(control.MAX_GROUPS):
                block[control.SENT + g] = 0
        self._command(control.BIND)
        self._members = [
            [(blocks[w], w) for w in sorted(self._active) if self.shares[w][g]] for g in range(len(self._parts))
        ]
        self._served = [0] * len(self._parts)
        self._out.clear()
        self._queue.clear()
        self._back.clear()

    def send(self, group: int, row: int) -> None:
        part, P = group // len(self.seats), len(self.seats)
        self._served[part] += 1
        if self._served[part] == P:
            self._served[part] = 0
            if self._exclusive and self._out:
                self._queue.append((part, row))
            else:
                self._step(part, row)

    def _step(self, part: int, row: int) -> None:
        """Has the workers step a part."""
        for block, _ in self._members[part]:
            block[control.SENT + part] = row + 1
        control.fence()
        for block, w in self._members[part]:
            if block[control.SLEEPS]:
                self._workers.wake(w)
        self._out.append((part, row + 1))

    def recv(self) -> int:
        if self._back:
            return self._back.popleft()
        started = time.perf_counter()
        self._workers.wait(self._ready)
        self.wait_s += time.perf_counter() - started
        (part, row), P = self._out.pop(self._found), len(self.seats)
        assert self._batches is not None
        if self.finished(part * P) if self.takes_turns else row == self._batches.rows:
            self._batches.owed.discard(part)
        if self._queue:
            self._step(*self._queue.popleft())
        self._back.extend(range(part * P + 1, part * P + P))
        return part * P

    def pending(self, group: int) -> tuple[Ints, Ints]:
        assert self._shared is not None
        part, policy = divmod(group, len(self.seats))
        turns = self._shared.turns[self._parts[part]]
        mine = turns[turns[:, 0] == policy]
        return mine[:, 1], mine[:, 2]

    def finished(self, group: int) -> bool:
        assert self._shared is not None
        return bool((self._shared.turns[self._parts[group // len(self.seats)], 0] < 0).all())

    def collect(self, outs: Sequence[SampleBatch], itr: int, mode: int) -> None:
        """Has every worker run the loop over its own columns of `outs`, with its own agents."""
        self._collecting = True
        self._open(outs)
        started = time.perf_counter()
        trace.timed(trace.WAIT, self._command)(control.COLLECT, ITR=itr, MODE=mode)
        assert self._batches is not None
        self._batches.owed.clear()
        self.wait_s += time.perf_counter() - started

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        out: list[tuple[list[Tree], list[float]]] = [([], [])] * self._B
        for w, answer in enumerate(self._call("warmup", lambda slots: None if slots is None else ())):
            for slots, mine in zip(self.shares[w], answer or ()):
                if slots is not None and mine is not None:
                    out[slots] = mine
        return out

    def newest_episodes(self) -> Ints:
        return self.episode_table[:, 0].copy()

    def get_state(self) -> PoolState:
        episode_table = self.episode_table.tolist()
        whole = PoolState.resetting(  # of slots without a worker
            [n for n, *_ in episode_table],
            calls=[list(mine) for mine in self.calls] if any(self.calls) else [],
            left=[None if n < 0 else n for _, n, *_ in episode_table],
            faults=dict(self._workers.faults.counts),
        )
        parts = [
            (slots, PoolState.from_plain(mine))
            for w, answer in enumerate(self._call("get_state", lambda slots: None if slots is None else ()))
            for slots, mine in zip(self.shares[w], answer or ())
            if slots is not None and mine is not None
        ]
        whole.tick = max((mine.tick for _, mine in parts), default=0)
        for slots, mine in parts:
            mine.began = [n + whole.tick - mine.tick for n in mine.began]
            whole.put(slots, mine)
        return whole

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        assert self._batches is not None
        buffer = self._batches.index(outs)
        self._batches.go_on_from(buffer)
        self._active.clear()  # nobody owes rows
        self._workers.faults.counts.clear()
        self._workers.faults.counts.update(state.faults)
        # First of all: the replacement of a worker that dies of it goes on from here.
        self.calls = [list(mine) for mine in state.calls] or [[] for _ in range(self._B)]
        self.episode_table[:, 0], self.episode_table[:, 1] = state.episode, [-1 if n is None else n for n in state.left]

        def message(shares: Sequence[slice | None]) -> list[Any]:
            states = tuple(None if s is None else state.of(s) for s in shares)
            return [SetState(self._number, buffer, states, tuple(None if s is None else journal[s] for s in shares))]

        cut: list[int] = []
        for w, answer in enumerate(self._workers.call([message(shares) for shares in self.shares])):
            found: list[Any] = answer[0] if answer else [None] * len(self._parts)
            for slots, lost in zip(self.shares[w], found):
                if slots is not None:  # without an answer it died, and the open episodes with it
                    mine = range(slots.start, slots.stop)
                    cut += [b for b in mine if not state.ended[b]] if lost is None else [mine[b] for b in lost]
        self._workers.settle()
        return sorted(cut)

    def call(self, call: EnvCall, slots: Sequence[int]) -> list[Answer]:
        answers: dict[int, Answer] = dict.fromkeys(slots, Answer("absent"))
        waiting = set(slots)

        def args(part: slice | None) -> tuple[Any, ...] | None:
            mine = [] if part is None else sorted(waiting & {*range(part.start, part.stop)})
            return (call, [b - part.start for b in mine]) if part is not None and mine else None

        while waiting:
            for shares, found in zip(self.shares, self._call("call", args)):
                for slots_of, mine in zip(shares, found or ()):
                    if slots_of is not None and mine is not None:
                        own = sorted(waiting & {*range(slots_of.start, slots_of.stop)})
                        answers |= {b: Answer(*x) for b, x in zip(own, mine)}
            there = {b for w in self._taking_part() for s in self.shares[w] if s for b in range(s.start, s.stop)}
            waiting = {b for b in waiting & there if answers[b].status == "absent"}  # once more where a worker died
            if self.broken:
                break
        if not self.evaluation:
            recorded(self.calls, call, slots, list(answers.values()))
        return list(answers.values())

    def recall(self, calls: Sequence[Sequence[CallRecord]]) -> None:
        if not self.evaluation:
            self.calls = [list(mine) for mine in calls]
        self._call("recall", lambda slots: None if slots is None else (calls[slots],))

    def close(self) -> None:
        if self._number == TRAINING:
            self._workers.close()

    def place(
        self, batches: list[SampleBatch], states: Tree, acting: WorkerAgents | None = None
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves the buffers into shared memory, and with `acting` also recurrent states and the agents' parameters."""
        n, T, P, seating = self._number, batches[0].spec.T, len(self.seats), self._seating
        log_and_turns = LogAndTurns.allocate(seating, self._B, T, self.info_keys) if seating.many else None
        where, (batches, states, self._shared) = share(
            self._workers.memory_fds[2 * n],
            (batches, states, log_and_turns),
            f"{len(batches) // P} batch(es) of T={T}, B={self._B}",
        )
        nulls = [spec.null_action for spec in self.specs]
        self._batches = SharedBatches(batches, self.seats, nulls, self._shared, self.takes_turns, self.episode_table)
        self.log = None if self._shared is None else self._shared.log
        attach = Attach(n, 2 * n, where[0], log_and_turns=where[2])
        if acting is not None:
            parameters, self.parameters = share(
                self._workers.memory_fds[PARAMETERS], acting.parameters, "the agents' parameters"
            )
            acting = acting._replace(parameters=parameters)
            attach = Attach(n, 2 * n, where[0], where[1], acting, where[2], PARAMETERS)
        self._attached = attach
        self._workers.call([[attach] if any(shares) else None for shares in self.shares])
        return batches, states

    def invalidate(self, slot: int, row: int, message: str) -> list[int]:
        """The worker of a slot failed in a row that broke the contract; returns the slots that lost rows from it on."""
        w = next(w for w in self._owners if any(s is not None and s.start <= slot < s.stop for s in self.shares[w]))
        self._workers.replace_faulty(w, message)
        assert self._batches is not None
        mine = [s for s in self.shares[w] if s is not None]
        for slots in mine:
            # Turns of others are not in step with that row.
            self._count(self._batches.cut(slots, 0 if self.takes_turns else row))
        return [b for s in mine for b in range(s.start, s.stop)]

    def metrics(self) -> dict[str, float]:
        return self._workers.faults.metrics() | lost_rewards(self.episode_table)

    def _ready(self) -> bool:
        for i, (part, row) in enumerate(self._out):
            for block, _ in self._members[part]:
                if block[control.DONE + part] != row:
                    break
            else:
                self._found = i
                return True
        return False

    def _open(self, outs: Sequence[SampleBatch]) -> None:
        """Makes `outs` the batches to write; columns without a worker are carried over and not valid."""
        self._workers.settle()
        assert self._batches is not None
        self._batches.open(outs, len(self._parts))
        self._active = self._taking_part()
        for w in self._owners:
            if w not in self._active:
                self._absent(w)

    def _command(self, code: int, **words: int) -> None:
        """A command to all workers of the batch, once more to the replacements of those that died before row 0."""
        called = sorted(self._active)
        batches = self._batches
        assert batches is not None
        self._binding = True
        while called:
            self._unbound = set()
            for w in called:
                block = self._workers.control.blocks[w]
                block[control.ROWS] = -1
                self._workers.command(w, code, POOL=self._number, BUFFER=batches.current, T=batches.rows, **words)
            self._workers.wait_for_commands(called)
            self._workers.settle()
            called = sorted(self._unbound - self._workers.dropped)
            for w in self._unbound & self._workers.dropped:
                self._absent(w)
            self._active |= set(called)
        self._binding, self._unbound = False, set()

    def _taking_part(self) -> set[int]:
        return {w for w in self._workers.live if w in self._owners}

    def _absent(self, w: int) -> None:
        """A worker takes no part in the batch."""
        assert self._batches is not None
        for slots in self.shares[w]:
            if slots is not None:
                self._count(self._batches.leave_out(slots))

    def _call(self, method: str, args: Callable[[slice | None], tuple[Any, ...] | None]) -> list[Any]:
        """Calls every worker's local pools; for each worker the answers by part, None if it died of it."""
        answers = self._workers.call(
            [
                [Call(self._number, method, tuple(args(s) for s in shares))] if any(shares) else None
                for shares in self.shares
            ]
        )
        return [answer and answer[0] for answer in answers]

    def _count(self, lost: int) -> None:
        if lost:
            self._workers.faults.counts["lost_steps"] += lost

    def _previous_of(self, w: int) -> int:
        """The last buffer of which this worker wrote row 0."""
        assert self._batches is not None
        return self._batches.previous if w in self._unbound else self._batches.current

    def _make(self, w: int, keep: bool) -> MakePool:
        n, entries, shares = self._number, entries_to_ship(self._config.name), tuple(self.shares[w])
        episode_table, first = (self._table_places, 2 * n + 1), self._first_slot
        calls = tuple([] if s is None else self.calls[s] for s in shares) if keep and any(self.calls) else ()
        return MakePool(n, self._config, self.seed, shares, self.settings, *episode_table, first, keep, entries, calls)
