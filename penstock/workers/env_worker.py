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
from penstock.core.slab import view
from penstock.core.tree import tree_map
from penstock.envs.ids import take_shipped
from penstock.envs.pools.factory import LocalPool, pool_for
from penstock.envs.pools.many.base import AgentsPool
from penstock.envs.pools.pool import PoolState
from penstock.workers import control
from penstock.workers.control import fence
from penstock.workers.host import Host, run_process
from penstock.workers.messages import Attach, Boot, Call, MakePool, SetState, Start, TakeOver
from penstock.workers.shares import Account, columns


class SamplingProcess(Host):
    """Steps its slots in lockstep with the learner, or runs the whole loop over them."""

    title = "worker"

    def __init__(self, boot: Boot, start: Start) -> None:
        super().__init__(boot, start)
        self.pools: dict[int, dict[int, LocalPool]] = {}
        """By pool and part, where it has slots of that."""
        self.shares: dict[int, tuple[slice | None, ...]] = {}
        self.batches: dict[int, list[list[list[SampleBatch]]]] = {}
        """By pool, buffer and part the columns of each policy."""
        self.turns: dict[int, list[Any]] = {}
        """By pool and part the lines [e, 3] of `shares.Account`; None where agents take none."""
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
            self.learner_bell.ring()
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
            self.respond(self.mail())
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
        mail = message
        if isinstance(mail, MakePool):
            return self.make(mail)
        if isinstance(mail, Attach):
            return self.attach(mail)
        pools = self.pools[mail.pool]
        if isinstance(mail, TakeOver):
            return self.take_over(mail.pool, mail.buffer)
        if isinstance(mail, SetState):
            parts = list(zip(mail.states, self.batches[mail.pool][mail.buffer], mail.journals))
            return [pools[g].set_state(*part) if g in pools else None for g, part in enumerate(parts)]
        assert isinstance(mail, Call)
        answers = [
            None if args is None or g not in pools else getattr(pools[g], mail.method)(*args)
            for g, args in enumerate(mail.args)
        ]
        if mail.method == "call":
            return [mine and [tuple(x) for x in mine] for mine in answers]
        return [x.to_plain() if isinstance(x, PoolState) else x for x in answers]

    def make(self, mail: MakePool) -> Any:
        for pool in self.pools.pop(mail.pool, {}).values():
            pool.close()
        take_shipped(mail.entries)
        ledger = view(self.boot.slabs[mail.slab], mail.ledger)
        mark: Any = self.block[control.MARK : control.MARK + control.MARK_WORDS]
        pools: dict[int, LocalPool] = {}
        for g, slots in enumerate(mail.shares):
            if slots is not None:
                own = slice(mail.first_slot + slots.start, mail.first_slot + slots.stop)
                settings = replace(mail.settings, mark=mark, ledger=None if mail.keep else ledger[slots])
                pools[g] = pool_for(mail.config, mail.seed, own, settings)
                pools[g].host.ledger = ledger[slots]
        self.pools[mail.pool], self.shares[mail.pool] = pools, mail.shares
        for g, pool in pools.items() if mail.calls else ():
            pool.recall(mail.calls[g])
        return next((pool.specs[0].to_plain() for pool in pools.values()), None)

    def attach(self, mail: Attach) -> None:
        fd = self.boot.slabs[mail.slab]
        batches = [view(fd, batch) for batch in mail.batches]
        shares, pools = self.shares[mail.pool], self.pools[mail.pool]
        seats = next((pool.seats for pool in pools.values()), ())
        buffers = [batches[k : k + len(seats)] for k in range(0, len(batches), max(len(seats), 1))]
        self.batches[mail.pool] = [
            [
                [] if slots is None else [batch[:, columns(slots, n)] for batch, n in zip(buffer, seats)]
                for slots in shares
            ]
            for buffer in buffers
        ]
        if mail.account is not None:
            account: Account = view(fd, mail.account)
            self.turns[mail.pool] = [None if slots is None else account.turns[slots] for slots in shares]
            for g, pool in pools.items():
                if isinstance(pool, AgentsPool):
                    pool.account.log = tree_map(lambda x, s=shares[g]: x[s], account.log)
        if mail.acting is not None and shares[0] is not None:
            actor, mine = import_object(mail.acting.actor), [buffer[0] for buffer in self.batches[mail.pool]]
            parameters = view(self.boot.slabs[mail.parameter_slab], mail.acting.parameters)
            mine_of = [columns(shares[0], n) for n in seats]
            states = [tree_map(lambda x, b=b: x[b], state) for b, state in zip(mine_of, view(fd, mail.states))]
            self.actors[mail.pool] = actor(pools[0], mail.acting.agents, parameters, mine, states)

    def take_over(self, number: int, buffer: int) -> None:
        for g, pool in self.pools[number].items():
            pool.take_over(None if buffer < 0 else self.batches[number][buffer][g])

    def close(self) -> None:
        for pools in self.pools.values():
            for pool in pools.values():
                pool.close()


def main() -> None:
    """Entry point of the process."""
    run_process(SamplingProcess)
