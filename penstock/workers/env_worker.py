"""A worker process that steps its slots; no other worker waits for it.

It imports torch only if it is given an agent.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.core import trace
from penstock.core.batch import SampleBatch
from penstock.core.config import import_object
from penstock.core.shared_memory import view
from penstock.core.tree import tree_map
from penstock.envs.ids import take_shipped
from penstock.envs.pools.factory import LocalPool, pool_for
from penstock.envs.pools.many.base import AgentsPool
from penstock.envs.pools.pool import PoolState
from penstock.workers import control
from penstock.workers.control import fence
from penstock.workers.host import Host, run_process
from penstock.workers.messages import Attach, Call, MakePool, Resume, SetState, SpawnArgs, WorkerSettings
from penstock.workers.shares import LogAndTurns, columns


class SamplingProcess(Host):
    """Steps its slots in lockstep with the learner, or runs the whole loop over them."""

    title = "worker"

    def __init__(self, spawn_args: SpawnArgs, start: WorkerSettings) -> None:
        super().__init__(spawn_args, start)
        self.pools: dict[int, dict[int, LocalPool]] = {}
        """By pool and part, where it has slots of that."""
        self.shares: dict[int, tuple[slice | None, ...]] = {}
        self.batches: dict[int, list[list[list[SampleBatch]]]] = {}
        """By pool, buffer and part the columns of each policy."""
        self.turns: dict[int, list[Any]] = {}
        """By pool and part the lines [e, 3] of `shares.LogAndTurns`; None where agents take none."""
        self.actors: dict[int, Any] = {}
        self.active: dict[int, LocalPool] = {}

    def serve(self) -> None:
        block = self.block
        step, sleep_until = trace.timed(trace.STEP, self.step), trace.timed(trace.WAIT, self.sleep_until)

        def called() -> bool:
            if block[control.COMMAND] != block[control.DONE_COMMAND]:
                return True
            for g in self.active:  # noqa: SIM110 (twice as fast as any())
                if block[control.SENT + g] > block[control.DONE + g]:
                    return True
            return False

        while True:
            sleep_until(called)
            if block[control.COMMAND] != block[control.DONE_COMMAND]:
                if not self.obey(self.taken()):
                    return
                continue
            for g in self.active:
                if block[control.SENT + g] > block[control.DONE + g]:
                    step(g)

    def step(self, g: int) -> None:
        """One row of a part's slots; the last worker of the part to finish wakes the learner."""
        block, pool = self.block, self.active[g]
        sent = block[control.SENT + g]
        started = time.perf_counter_ns()
        if pool.takes_turns:
            self.sweep(g, pool, sent - 1)
        else:
            for group in range(len(pool.groups)):
                pool.send(group, sent - 1)
        block[control.BUSY_NS] += time.perf_counter_ns() - started
        block[control.DONE + g] = sent
        fence()
        if self.learner[0] and all(b[control.DONE + g] >= b[control.SENT + g] for b in self.blocks):
            self.learner_event.set()
        if sent == block[control.T]:
            pool.host.prepare()

    def obey(self, code: int) -> bool:
        block = self.block
        if code == control.QUIT:
            with warnings.catch_warnings(record=True) as caught:
                self.close()
            self.answer([], caught)
            return False
        if code == control.MAIL:
            self.respond(self.mailbox())
        elif code == control.BIND:
            self.bind()
            self.done()
        elif code == control.COLLECT:
            pool = block[control.POOL]
            started = time.perf_counter_ns()
            self.actors[pool].collect(block, block[control.ITR], block[control.MODE])
            block[control.BUSY_NS] += time.perf_counter_ns() - started
            self.done()
            for each in self.pools[pool].values():
                each.host.prepare()
        return True

    def sweep(self, g: int, pool: LocalPool, sweep: int) -> None:
        """One turn of every environment of a part that has room, and the turns that wait then."""
        if not pool.finished(0):
            for group in range(len(pool.groups)):
                pool.send(group, sweep)
            self.publish(g, pool)

    def publish(self, g: int, pool: LocalPool) -> None:
        """Writes which turns wait, for the learner, who acts for them."""
        number = self.block[control.POOL]
        turns, slots = self.turns[number][g], self.shares[number][g]
        assert slots is not None
        lines = np.full(turns.shape, -1, np.int64)
        for policy, seats in enumerate(pool.seats):
            mine, rows = pool.pending(policy)
            if len(mine):
                line = np.empty((len(mine), 3), np.int64)
                line[:, 0], line[:, 1], line[:, 2] = policy, mine + slots.start * seats, rows
                lines[mine // seats] = line
        turns[...] = lines  # at once: of a worker that dies, no turn means that its rows are whole

    def bind(self) -> None:
        block = self.block
        number, buffer = block[control.POOL], block[control.BUFFER]
        self.active = self.pools[number]
        for g, pool in self.active.items():
            pool.bind(self.batches[number][buffer][g])
            if pool.takes_turns:
                self.publish(g, pool)
            block[control.DONE + g] = 0

    def read(self, message: Any) -> Any:
        if isinstance(message, MakePool):
            return self.make(message)
        if isinstance(message, Attach):
            return self.attach(message)
        pools = self.pools[message.pool]
        if isinstance(message, Resume):
            return self.resume(message.pool, message.buffer)
        if isinstance(message, SetState):
            parts = list(zip(message.states, self.batches[message.pool][message.buffer], message.journals))
            return [pools[g].set_state(*part) if g in pools else None for g, part in enumerate(parts)]
        assert isinstance(message, Call)
        answers = [
            None if args is None or g not in pools else getattr(pools[g], message.method)(*args)
            for g, args in enumerate(message.args)
        ]
        if message.method == "call":
            return [mine and [tuple(x) for x in mine] for mine in answers]
        return [x.to_plain() if isinstance(x, PoolState) else x for x in answers]

    def make(self, message: MakePool) -> Any:
        for pool in self.pools.pop(message.pool, {}).values():
            pool.close()
        take_shipped(message.entries)
        episode_table = view(self.spawn_args.memory_fds[message.memory], message.episode_table)
        activity: Any = self.block[control.ACTIVITY : control.ACTIVITY + control.ACTIVITY_WORDS]
        pools: dict[int, LocalPool] = {}
        for g, slots in enumerate(message.shares):
            if slots is not None:
                own = slice(message.first_slot + slots.start, message.first_slot + slots.stop)
                table = None if message.keep else episode_table[slots]
                settings = replace(message.settings, activity=activity, episode_table=table)
                pools[g] = pool_for(message.config, message.seed, own, settings)
                pools[g].host.episode_table = episode_table[slots]
        self.pools[message.pool], self.shares[message.pool] = pools, message.shares
        for g, pool in pools.items() if message.calls else ():
            pool.recall(message.calls[g])
        return next((pool.specs[0].to_plain() for pool in pools.values()), None)

    def attach(self, message: Attach) -> None:
        fd = self.spawn_args.memory_fds[message.memory]
        batches = [view(fd, batch) for batch in message.batches]
        shares, pools = self.shares[message.pool], self.pools[message.pool]
        seats = next((pool.seats for pool in pools.values()), ())
        buffers = [batches[k : k + len(seats)] for k in range(0, len(batches), max(len(seats), 1))]
        self.batches[message.pool] = [
            [
                [] if slots is None else [batch[:, columns(slots, n)] for batch, n in zip(buffer, seats)]
                for slots in shares
            ]
            for buffer in buffers
        ]
        if message.log_and_turns is not None:
            log_and_turns: LogAndTurns = view(fd, message.log_and_turns)
            self.turns[message.pool] = [None if slots is None else log_and_turns.turns[slots] for slots in shares]
            for g, pool in pools.items():
                if isinstance(pool, AgentsPool):
                    pool.recorder.log = tree_map(lambda x, s=shares[g]: x[s], log_and_turns.log)
        if message.acting is not None and shares[0] is not None:
            actor, mine = import_object(message.acting.actor), [buffer[0] for buffer in self.batches[message.pool]]
            parameters = view(self.spawn_args.memory_fds[message.parameter_memory], message.acting.parameters)
            mine_of = [columns(shares[0], n) for n in seats]
            states = [tree_map(lambda x, b=b: x[b], state) for b, state in zip(mine_of, view(fd, message.states))]
            self.actors[message.pool] = actor(pools[0], message.acting.agents, parameters, mine, states)

    def resume(self, number: int, buffer: int) -> None:
        for g, pool in self.pools[number].items():
            pool.resume(None if buffer < 0 else self.batches[number][buffer][g])

    def close(self) -> None:
        for pools in self.pools.values():
            for pool in pools.values():
                pool.close()


def main() -> None:
    """Entry point of the process."""
    run_process(SamplingProcess)
