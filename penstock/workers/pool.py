"""An EnvPool whose slots are stepped by worker processes, straight into the batch in shared memory.

Each worker owns some columns of every group, so that it steps one group while another is served. Rows are handed over
by counters: the learner writes the actions of a row and then `SENT`, the worker writes its answers and then `DONE`.
A worker that dies leaves the rows that it had finished; the rest of its columns is not valid in that batch, and its
replacement goes on with the next episodes in the next one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.agents.agent import Agent
from penstock.core import trace
from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree
from penstock.samplers.collector import Noise
from penstock.workers import control
from penstock.workers.messages import Call, SetState
from penstock.workers.shares import carry_columns
from penstock.workers.slots import EVALUATION as EVALUATION
from penstock.workers.slots import TRAINING as TRAINING
from penstock.workers.slots import ProcessSlots


class ProcessPool(ProcessSlots):
    """An `EnvPool` over worker processes."""

    remote = True
    """Steps are taken in other processes."""

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        self.seed = seed
        self._current = self._previous = -1

        def args(slots: slice | None) -> tuple[Any, ...] | None:
            return None if slots is None else (seed, None if episodes is None else list(episodes[slots]))

        self._call("restart", args)

    def bind(self, out: SampleBatch) -> None:
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
        return self._gather("warmup", [([], [])] * self.groups[-1].stop)

    def get_state(self) -> dict[str, Any]:
        B = self.groups[-1].stop
        ledger = self.ledger.tolist()
        # Of slots without a worker: they go on with their next episode.
        gone: dict[str, Any] = {
            "episode": [n for n, _, _ in ledger],
            "ended": [True] * B,
            "idle": [False] * B,
            "left": [None if n < 0 else n for _, n, _ in ledger],
            "began": [0] * B,
            "snapshot": [None] * B,
        }
        parts: list[tuple[slice, Any]] = []
        for w, answer in enumerate(self._call("get_state", lambda slots: None if slots is None else ())):
            parts += [(s, mine) for s, mine in zip(self.shares[w], answer or ()) if s is not None and mine is not None]
        tick = max((mine["tick"] for _, mine in parts), default=0)
        for slots, mine in parts:
            mine["began"] = [n + tick - mine["tick"] for n in mine["began"]]
            for name in gone:
                gone[name][slots] = mine[name]
        return {**gone, "tick": tick}

    def set_state(self, state: dict[str, Any], row: SampleBatch, journal: list[Tree | None]) -> list[int]:
        buffer = self._index(row)
        self._current = self._previous = buffer
        per_slot = ("episode", "ended", "idle", "left", "began", "snapshot")

        def message(w: int) -> list[Any]:
            shares = self.shares[w]
            states = tuple(
                None if s is None else {**{k: state[k][s] for k in per_slot}, "tick": state["tick"]} for s in shares
            )
            return [SetState(self._number, buffer, states, tuple(None if s is None else journal[s] for s in shares))]

        cut: list[int] = []
        for w, answer in enumerate(self._workers.call([message(w) for w in range(self._workers.count)])):
            found: list[Any] = answer[0] if answer else []
            for slots, lost in zip(self.shares[w], found):
                cut += [slots.start + b for b in lost] if slots is not None and lost else []
        return sorted(cut)

    def close(self) -> None:
        if self._number == TRAINING:
            self._workers.close()

    def publish(self, agent: Agent) -> None:
        """Writes the agent's parameters where its copies in the workers read them; only between two batches."""
        from penstock.agents.parameters import copy_parameters

        copy_parameters(agent, self._parameters)

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

    def _call(self, method: str, args: Any) -> list[Any]:
        """Calls every worker's SerialPools; for each worker the answers by group, None if it died of it."""
        answers = self._workers.call(
            [
                [Call(self._number, method, tuple(args(s) for s in shares))] if any(shares) else None
                for shares in self.shares
            ]
        )
        return [answer and answer[0] for answer in answers]

    def _gather(self, method: str, out: list[Any]) -> list[Any]:
        for w, answer in enumerate(self._call(method, lambda slots: None if slots is None else ())):
            for slots, mine in zip(self.shares[w], answer or ()):
                if slots is not None and mine is not None:
                    out[slots] = mine
        return out


def collect_in_workers(
    pool: ProcessPool, agent: Agent, batch: SampleBatch, views: Any, states: list[Tree], noise: Noise | None
) -> None:
    """`collect`, run by each worker with its own copy of the agent; `states` are in shared memory and updated there."""
    from penstock.samplers.actor import DETERMINISTIC

    pool.publish(agent)
    pool.collect(batch, 0 if noise is None else noise.batch, DETERMINISTIC if noise is None else int(noise.purpose))
