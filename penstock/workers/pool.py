"""An EnvPool whose slots are stepped by worker processes, straight into the batch in shared memory.

Each worker owns some columns of every group, so that it steps one group while another is served. Rows are handed over
by counters: the learner writes the actions of a row and then `SENT`, the worker writes its answers and then `DONE`.
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
from penstock.core.slab import share
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_map
from penstock.envs.ids import entry_to_ship
from penstock.envs.make import EnvConfig
from penstock.envs.pools.messages import one_spec
from penstock.envs.pools.pool import EnvPool, Group, OpenEpisode, PoolState, slots_of
from penstock.envs.pools.serial import STEPPING, Reset
from penstock.workers import control
from penstock.workers.messages import Acting, Attach, Call, MakePool, SetState, TakeOver
from penstock.workers.shares import at_work, carry_columns, cut, even_split, part
from penstock.workers.supervisor import Workers

TRAINING, EVALUATION = 0, 1
"""Numbers of a sampler's two pools."""
PARAMETERS = 4
"""The slab of the agent's parameters; a pool has slabs 2 * number (batches) and 2 * number + 1 (ledger)."""


class ProcessPool(EnvPool):
    """B slots of one of a sampler's two pools, spread over its workers; `Supervised` by the workers' supervisor.

    Args:
        number: TRAINING or EVALUATION. first_slot: number of the first slot among those of all samplers of the run.
        exclusive: never have two groups stepping at a time.
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
        *,
        groups: int = 1,
        reset: Reset = "next_step",
        max_decorrelation_steps: int = 0,
        exclusive: bool = False,
        first_slot: int = 0,
    ) -> None:
        self._workers, self._number, self._config, self.seed = workers, number, config, seed
        self.evaluation, self._first_slot = number == EVALUATION, first_slot
        self._reset: Reset = reset
        self._decorrelate, self._exclusive = max_decorrelation_steps, exclusive
        self.info_keys = tuple(dict.fromkeys((*config.info_keys, "is_success")))
        starts = np.cumsum([0, *even_split(B, groups)]).tolist()
        self.groups = tuple(Group(0, slice(a, b)) for a, b in zip(starts, starts[1:]))
        self.shares = [[part(group.slots, workers.count, w) for group in self.groups] for w in range(workers.count)]
        self._owners = [w for w in range(workers.count) if any(self.shares[w])]
        # As before every first episode: a worker may die before it has written its own lines.
        self._ledger_places, self.ledger = share(
            workers.slabs[2 * number + 1], np.tile(np.array([-1, -1, 0]), (B, 1)), "the ledger"
        )
        self._batches: list[SampleBatch] = []
        self._attached: Attach | None = None
        self.parameters: Tree = None
        """Of the agents that act in the workers, in shared memory; to be written only between two batches."""
        self._current = self._previous = -1
        self._members: list[list[tuple[Any, int]]] = [[] for _ in self.groups]
        self._active: set[int] = set()
        self._out: list[tuple[int, int]] = []
        self._queue: deque[tuple[int, int]] = deque()
        self._found = -1
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
        self.spec = one_spec([EnvSpec.from_plain(spec) for spec in made if spec is not None], config.name)
        self.specs = (self.spec,)

    # What the supervisor asks: see `Supervised`.

    def messages(self, w: int, replaces: bool) -> list[Any]:
        out: list[Any] = [self._make(w, replaces)]
        if self._attached is not None:
            out += [self._attached, *([TakeOver(self._number, self._previous_of(w))] if replaces else [])]
        return out

    def whereabouts(self, w: int, block: Any) -> str:
        mark = block[control.MARK : control.MARK + control.MARK_WORDS].tolist()
        if mark[5] != self.evaluation:
            return ""
        if not mark[1]:
            first = self._first_slot
            columns = ", ".join(f"{first + s.start} to {first + s.stop - 1}" for s in self.shares[w] if s)
            return f"between steps of {self._config.name}, slots {columns}"
        slot = mark[3] + mark[0] - self._first_slot
        action = None
        if mark[1] == STEPPING and self._current >= 0:
            batch = self._batches[self._current]
            g = next(g for g, group in enumerate(self.groups) if slot < group.slots.stop)
            row = max(block[control.ROWS] if self._collecting else block[control.DONE + g], 0)
            if row < batch.spec.T:
                action = tree_map(lambda x: x[row, slot].tolist(), batch.action)
        return at_work(self._config.name, self.seed, mark, self.ledger[slot].tolist(), action)

    def lost(self, w: int) -> None:
        if w not in self._active:
            return
        self._active.discard(w)
        block = self._workers.control.blocks[w]
        bound = block[control.ROWS] >= 0 if self._collecting else block[control.COMMAND] == block[control.DONE_COMMAND]
        if self._binding and not bound:
            self._unbound.add(w)
            return
        for g, slots in enumerate(self.shares[w]):
            if slots is not None:
                row = block[control.ROWS] if self._collecting else block[control.DONE + g]
                self._cut(slots, row)
                if not self._collecting:
                    self._members[g] = [m for m in self._members[g] if m[1] != w]

    # The pool.

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        self.seed = seed
        self._current = self._previous = -1

        def args(slots: slice | None) -> tuple[Any, ...] | None:
            return None if slots is None else (seed, None if episodes is None else list(episodes[slots]))

        self._call("restart", args)

    def for_evaluation(self, B: int, first_slot: int = 0) -> ProcessPool:
        return ProcessPool(
            self._workers,
            EVALUATION,
            self._config,
            self.seed,
            B,
            groups=min(len(self.groups), B),
            exclusive=self._exclusive,
            first_slot=first_slot,
        )

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        (out,) = outs
        self._open(out)
        blocks = self._workers.control.blocks
        for block in blocks:  # before the command: a worker steps where SENT is above DONE
            for g in range(control.MAX_GROUPS):
                block[control.SENT + g] = 0
        self._command(control.BIND)
        self._members = [
            [(blocks[w], w) for w in sorted(self._active) if self.shares[w][g]] for g in range(len(self.groups))
        ]
        self._out.clear()
        self._queue.clear()

    def send(self, group: int, row: int) -> None:
        if self._exclusive and self._out:
            self._queue.append((group, row))
            return
        for block, _ in self._members[group]:
            block[control.SENT + group] = row + 1
        control.fence()
        for block, w in self._members[group]:
            if block[control.SLEEPS]:
                self._workers.ring(w)
        self._out.append((group, row + 1))

    def recv(self) -> int:
        started = time.perf_counter()
        self._workers.wait(self._ready)
        self.wait_s += time.perf_counter() - started
        group = self._out.pop(self._found)[0]
        if self._queue:
            self.send(*self._queue.popleft())
        return group

    def collect(self, out: SampleBatch, itr: int, mode: int) -> None:
        """Has every worker run the loop over its own columns of `out`, with its own agent."""
        self._collecting = True
        self._open(out)
        started = time.perf_counter()
        trace.timed(trace.WAIT, self._command)(control.COLLECT, ITR=itr, MODE=mode)
        self.wait_s += time.perf_counter() - started

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        out: list[tuple[list[Tree], list[float]]] = [([], [])] * slots_of(self)
        for w, answer in enumerate(self._call("warmup", lambda slots: None if slots is None else ())):
            for slots, mine in zip(self.shares[w], answer or ()):
                if slots is not None and mine is not None:
                    out[slots] = mine
        return out

    def get_state(self) -> PoolState:
        ledger = self.ledger.tolist()
        whole = PoolState.resetting(  # of slots without a worker
            [n for n, _, _ in ledger],
            left=[None if n < 0 else n for _, n, _ in ledger],
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
        buffer = self._index(outs[0])
        self._current = self._previous = buffer
        self._active.clear()  # nobody owes rows
        self._workers.faults.counts.clear()
        self._workers.faults.counts.update(state.faults)
        # First of all: the replacement of a worker that dies of it goes on from here.
        self.ledger[:, 0], self.ledger[:, 1] = state.episode, [-1 if n is None else n for n in state.left]

        def message(shares: Sequence[slice | None]) -> list[Any]:
            states = tuple(None if s is None else state.of(s) for s in shares)
            return [SetState(self._number, buffer, states, tuple(None if s is None else journal[s] for s in shares))]

        cut: list[int] = []
        for w, answer in enumerate(self._workers.call([message(shares) for shares in self.shares])):
            found: list[Any] = answer[0] if answer else [None] * len(self.groups)
            for slots, lost in zip(self.shares[w], found):
                if slots is not None:  # without an answer it died, and the open episodes with it
                    mine = range(slots.start, slots.stop)
                    cut += [b for b in mine if not state.ended[b]] if lost is None else [mine[b] for b in lost]
        self._workers.settle()
        return sorted(cut)

    def close(self) -> None:
        if self._number == TRAINING:
            self._workers.close()

    def place(
        self, batches: list[SampleBatch], states: Tree, acting: Acting | None = None
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves the buffers into shared memory, and with `acting` also recurrent states and the agent's parameters."""
        n, T = self._number, batches[0].spec.T
        B = slots_of(self)
        where, (self._batches, states) = share(
            self._workers.slabs[2 * n], (batches, states), f"{len(batches)} batch(es) of T={T}, B={B}"
        )
        attach = Attach(n, 2 * n, where[0])
        if acting is not None:
            parameters, self.parameters = share(
                self._workers.slabs[PARAMETERS], acting.parameters, "the agent's parameters"
            )
            attach = Attach(n, 2 * n, where[0], where[1], acting._replace(parameters=parameters), PARAMETERS)
        self._current = self._previous = -1
        self._attached = attach
        self._workers.call([[attach] if any(shares) else None for shares in self.shares])
        return self._batches, states

    def disown(self, slot: int, row: int, message: str) -> list[int]:
        """Called for a row of the batch that broke the contract; its worker counts as failed from that row on.

        Returns:
            the slots that lost their rows from `row` on.
        """
        w = next(w for w in self._owners if any(s is not None and s.start <= slot < s.stop for s in self.shares[w]))
        self._workers.condemn(w, message)
        mine = [s for s in self.shares[w] if s is not None]
        for slots in mine:
            self._cut(slots, row)
        return [b for s in mine for b in range(s.start, s.stop)]

    def metrics(self) -> dict[str, float]:
        return self._workers.faults.metrics()

    def _ready(self) -> bool:
        for i, (group, row) in enumerate(self._out):
            for block, _ in self._members[group]:
                if block[control.DONE + group] != row:
                    break
            else:
                self._found = i
                return True
        return False

    def _open(self, out: SampleBatch) -> None:
        """Makes `out` the batch to write; columns without a worker are carried over and not valid."""
        self._workers.settle()
        self._previous, self._current = self._current, self._index(out)
        self._active = {w for w in self._workers.live if w in self._owners}
        for w in self._owners:
            if w not in self._active:
                self._absent(w)

    def _command(self, code: int, **words: int) -> None:
        """A command to all workers of the batch, once more to the replacements of those that died before row 0."""
        called = sorted(self._active)
        T = self._batches[self._current].spec.T
        self._binding = True
        while called:
            self._unbound = set()
            for w in called:
                block = self._workers.control.blocks[w]
                block[control.ROWS] = -1
                self._workers.command(w, code, POOL=self._number, BUFFER=self._current, T=T, **words)
            self._workers.wait_for_commands(called)
            self._workers.settle()
            called = sorted(self._unbound - self._workers.dropped)
            for w in self._unbound & self._workers.dropped:
                self._absent(w)
            self._active |= set(called)
        self._binding, self._unbound = False, set()

    def _absent(self, w: int) -> None:
        """The columns of a worker that takes no part: the last row of the batch before, and nothing valid."""
        for slots in self.shares[w]:
            if slots is not None:
                if self._previous >= 0:
                    carry_columns(self._batches[self._previous], self._batches[self._current], slots)
                self._cut(slots, 0)

    def _call(self, method: str, args: Callable[[slice | None], tuple[Any, ...] | None]) -> list[Any]:
        """Calls every worker's SerialPools; for each worker the answers by group, None if it died of it."""
        answers = self._workers.call(
            [
                [Call(self._number, method, tuple(args(s) for s in shares))] if any(shares) else None
                for shares in self.shares
            ]
        )
        return [answer and answer[0] for answer in answers]

    def _cut(self, slots: slice, row: int) -> None:
        """Marks these columns of the current batch invalid from this row on."""
        lost = cut(self._batches[self._current], slots, row, self.spec.null_action)
        if lost:
            self._workers.faults.counts["lost_steps"] += lost

    def _index(self, out: SampleBatch) -> int:
        return next(i for i, batch in enumerate(self._batches) if batch is out)

    def _previous_of(self, w: int) -> int:
        """The last buffer of which this worker wrote row 0."""
        return self._previous if w in self._unbound else self._current

    def _make(self, w: int, keep: bool) -> MakePool:
        n = self._number
        return MakePool(
            n,
            self._config,
            self.seed,
            tuple(self.shares[w]),
            self._reset,
            self._decorrelate,
            n == EVALUATION,
            self._ledger_places,
            2 * n + 1,
            self._first_slot,
            keep,
            entry_to_ship(self._config.name),
        )
