"""An EnvPool whose slots are stepped by worker processes, straight into the batch in shared memory.

Each worker owns some columns of every group, so that it steps one group while another is served. Rows are handed over
by counters: the learner writes the actions of a row and then `SENT`, the worker writes its answers and then `DONE`.
A worker that dies leaves the rows that it had finished; the rest of its columns is not valid in that batch, and its
replacement goes on with the next episodes in the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.agents.agent import Agent
from penstock.core import trace
from penstock.core.batch import SampleBatch
from penstock.core.slab import share
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.serial_pool import STEPPING, Reset
from penstock.samplers import control
from penstock.samplers.collector import Noise
from penstock.samplers.columns import at_work, carry_columns, cut, even_split, one_spec, part
from penstock.samplers.messages import Attach, Call, MakePool, SetState, TakeOver
from penstock.samplers.workers import Workers

TRAINING, EVALUATION = 0, 1
"""Numbers of a sampler's two pools."""
_PARAMETERS = 4
"""The slab of the agent's parameters; a pool has slabs 2 * number (batches) and 2 * number + 1 (ledger)."""


class ProcessPool:
    """B slots of one of a sampler's two pools, spread over its workers.

    Args:
        exclusive: never have two groups stepping at a time.
    """

    remote = True
    """Steps are taken in other processes."""

    def __init__(
        self, workers: Workers, number: int, config: EnvConfig, seed: int, B: int, *, groups: int = 1, reset: Reset = "next_step",
        max_decorrelation_steps: int = 0, exclusive: bool = False,
    ) -> None:  # fmt: skip
        self._workers, self._number, self._config, self.seed = workers, number, config, seed
        self.evaluation = number == EVALUATION
        self._reset: Reset = reset
        self._decorrelate, self._exclusive = max_decorrelation_steps, exclusive
        self.info_keys = tuple(dict.fromkeys((*config.info_keys, "is_success")))
        starts = np.cumsum([0, *even_split(B, groups)]).tolist()
        self.groups = tuple(slice(a, b) for a, b in zip(starts, starts[1:]))
        self.shares = [[part(group, workers.count, w) for group in self.groups] for w in range(workers.count)]
        self._owners = [w for w in range(workers.count) if any(self.shares[w])]
        self._ledger_places, self.ledger = share(
            workers.slabs[2 * number + 1], np.zeros((B, 3), np.int64), "the ledger"
        )
        self._batches: list[SampleBatch] = []
        self._batch_places: list[Tree] = []
        self._attached: list[Attach] | None = None
        self._current = self._previous = -1
        self._members: list[list[tuple[Any, int]]] = []
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
            workers.owners.append(self)
            made = [a and a[0] for a in workers.call([[self._make(w, False)] for w in range(workers.count)])]
        self.spec = one_spec([EnvSpec.from_plain(spec) for spec in made if spec is not None], config)

    # What the workers' supervisor asks: see `Owner`.

    def messages(self, w: int, replaces: bool) -> list[Any]:
        out: list[Any] = [self._make(w, replaces)]
        if self._attached is not None:
            out += [self._attached[w], *([TakeOver(self._number, self._previous_of(w))] if replaces else [])]
        return out

    def whereabouts(self, w: int, block: Any) -> str:
        mark = block[control.MARK : control.MARK + control.MARK_WORDS].tolist()
        if mark[5] != self.evaluation:
            return ""
        if not mark[1]:
            columns = ", ".join(f"{s.start} to {s.stop - 1}" for s in self.shares[w] if s)
            return f"between steps of {self._config.name}, slots {columns}"
        slot = mark[3] + mark[0]
        action = None
        if mark[1] == STEPPING and self._current >= 0:
            batch = self._batches[self._current]
            g = next(g for g, group in enumerate(self.groups) if slot < group.stop)
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

    # The pool: see `EnvPool`.

    def attach(
        self, batches: list[SampleBatch], states: Tree = None, agent: Agent | None = None
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves the buffers, and the recurrent states [B, ...] of agents that live in the workers, into shared memory."""
        n, T = self._number, batches[0].spec.T
        where, (self._batches, states) = share(
            self._workers.slabs[2 * n],
            (batches, states),
            f"{len(batches)} batch(es) of T={T}, B={self.groups[-1].stop}",
        )
        parameters = None
        if agent is not None:
            parameters, agent = self._share_parameters(agent)
        self._current = self._previous = -1
        self._attached = [
            Attach(n, 2 * n, where[0], where[1] if agent is not None else None, agent, parameters, _PARAMETERS)
            for _ in range(self._workers.count)
        ]
        self._workers.call([[message] if any(self.shares[w]) else None for w, message in enumerate(self._attached)])
        return self._batches, states

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

    def disown(self, slot: int, row: int, message: str) -> list[int]:
        """A row that is in the batch already broke the contract: its worker counts as failed there.

        Returns:
            the slots that lost their rows from `row` on.
        """
        w = next(w for w in self._owners if any(s is not None and s.start <= slot < s.stop for s in self.shares[w]))
        self._workers.condemn(w, message)
        mine = [s for s in self.shares[w] if s is not None]
        for slots in mine:
            self._cut(slots, row)
        return [b for s in mine for b in range(s.start, s.stop)]

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        return self._gather("warmup", [([], [])] * self.groups[-1].stop)

    def get_state(self) -> dict[str, Any]:
        B = self.groups[-1].stop
        ledger = self.ledger.tolist()
        # Of slots without a worker: they go on with their next episode.
        gone: dict[str, Any] = {"episode": [n for n, _, _ in ledger], "ended": [True] * B, "idle": [False] * B,
                "left": [None if n < 0 else n for _, n, _ in ledger], "began": [0] * B, "snapshot": [None] * B}  # fmt: skip
        parts: list[tuple[slice, Any]] = [(slots, mine) for w, answer in enumerate(self._call("get_state", lambda slots: None if slots is None else ()))
                 for slots, mine in zip(self.shares[w], answer or ()) if slots is not None and mine is not None]  # fmt: skip
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

        answers = self._workers.call([message(w) for w in range(self._workers.count)])
        return sorted(
            slots.start + b
            for w, answer in enumerate(answers)
            for slots, lost in zip(self.shares[w], (answer or [None])[0] or ())
            for b in (lost if slots is not None and lost else ())
        )

    def close(self) -> None:
        if self._number == TRAINING:
            self._workers.close()

    def publish(self, agent: Agent) -> None:
        """Writes the agent's parameters where its copies in the workers read them; only between two batches."""
        from penstock.samplers.actor import copy_parameters

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

    def _cut(self, slots: slice, row: int) -> None:
        """From this row on nothing in these columns of the current batch is valid."""
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
        return MakePool(n, self._config, self.seed, tuple(self.shares[w]), self._reset, self._decorrelate, n == EVALUATION,
                        self._ledger_places, 2 * n + 1, keep)  # fmt: skip

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

    def _share_parameters(self, agent: Agent) -> tuple[Tree, Agent]:
        """Puts copies of the parameters into their slab; gives their places and an agent to send."""
        import copy

        import torch

        from penstock.samplers.actor import parameters_of

        arrays = {name: np.ascontiguousarray(x.detach().cpu().numpy()) for name, x in parameters_of(agent).items()}
        where, there = share(self._workers.slabs[_PARAMETERS], arrays, "the agent's parameters")
        self._parameters = {name: torch.from_numpy(x).reshape(arrays[name].shape) for name, x in there.items()}
        return where, copy.deepcopy(agent).cpu()


def collect_in_workers(
    pool: ProcessPool, agent: Agent, batch: SampleBatch, views: Any, states: list[Tree], noise: Noise | None
) -> None:
    """`collect`, run by each worker with its own copy of the agent; `states` are in shared memory and updated there."""
    from penstock.samplers.actor import DETERMINISTIC

    pool.publish(agent)
    pool.collect(batch, 0 if noise is None else noise.batch, DETERMINISTIC if noise is None else int(noise.purpose))
