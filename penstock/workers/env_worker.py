"""A worker process that steps its slots; no other worker waits for it.

It imports torch only if it is given an agent.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

from penstock.core import trace
from penstock.core.batch import SampleBatch
from penstock.core.config import import_object
from penstock.core.slab import view
from penstock.core.tree import tree_map
from penstock.envs.ids import take_shipped
from penstock.envs.pools.pool import PoolState
from penstock.envs.pools.serial import SerialPool
from penstock.workers import control
from penstock.workers.control import fence
from penstock.workers.host import Host, run_process
from penstock.workers.messages import Attach, Boot, Call, MakePool, SetState, Start, TakeOver


class SamplingProcess(Host):
    """Steps its slots in lockstep with the learner, or runs the whole loop over them."""

    title = "worker"

    def __init__(self, boot: Boot, start: Start) -> None:
        super().__init__(boot, start)
        self.pools: dict[int, list[SerialPool | None]] = {}
        self.shares: dict[int, tuple[slice | None, ...]] = {}
        self.batches: dict[int, list[list[SampleBatch | None]]] = {}
        self.actors: dict[int, Any] = {}
        self.active: list[SerialPool | None] = []

    def serve(self) -> None:
        block = self.block
        groups = range(control.MAX_GROUPS)
        step, sleep_until = trace.timed(trace.STEP, self.step), trace.timed(trace.WAIT, self.sleep_until)

        def called() -> bool:
            if block[control.COMMAND] != block[control.DONE_COMMAND]:
                return True
            for g in range(len(self.active)):  # noqa: SIM110 (twice as fast as any())
                if block[control.SENT + g] > block[control.DONE + g]:
                    return True
            return False

        while True:
            sleep_until(called)
            if block[control.COMMAND] != block[control.DONE_COMMAND]:
                if not self.obey(block[control.CODE]):
                    return
                continue
            for g in groups[: len(self.active)]:
                if block[control.SENT + g] > block[control.DONE + g]:
                    step(g)

    def step(self, g: int) -> None:
        """One row of a group's slots; the last worker of the group to finish wakes the learner."""
        block, pool = self.block, self.active[g]
        assert pool is not None
        sent = block[control.SENT + g]
        started = time.perf_counter_ns()
        pool.send(0, sent - 1)
        block[control.BUSY_NS] += time.perf_counter_ns() - started
        block[control.DONE + g] = sent
        fence()
        if self.learner[0] and all(b[control.DONE + g] >= b[control.SENT + g] for b in self.blocks):
            self.learner_bell.ring()
        if sent == block[control.T]:
            pool.prepare()

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
            for each in self.pools[pool]:
                if each is not None:
                    each.prepare()
        return True

    def bind(self) -> None:
        block = self.block
        number, buffer = block[control.POOL], block[control.BUFFER]
        self.active = self.pools[number]
        for g, pool in enumerate(self.active):
            if pool is not None:
                out = self.batches[number][buffer][g]
                assert out is not None
                pool.bind([out])
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
            rows = self.batches[mail.pool][mail.buffer]
            return [
                None if pool is None or row is None else pool.set_state(state, [row], journal)
                for pool, row, state, journal in zip(pools, rows, mail.states, mail.journals)
            ]
        assert isinstance(mail, Call)
        answers = [
            None if args is None or pool is None else getattr(pool, mail.method)(*args)
            for pool, args in zip(pools, mail.args)
        ]
        return [x.to_plain() if isinstance(x, PoolState) else x for x in answers]

    def make(self, mail: MakePool) -> Any:
        for pool in self.pools.pop(mail.pool, []):
            if pool is not None:
                pool.close()
        take_shipped(mail.entry)
        ledger = view(self.boot.slabs[mail.slab], mail.ledger)
        mark: Any = self.block[control.MARK : control.MARK + control.MARK_WORDS]
        pools: list[SerialPool | None] = [
            None
            if slots is None
            else SerialPool(
                mail.config,
                mail.seed,
                slice(mail.first_slot + slots.start, mail.first_slot + slots.stop),
                reset=mail.reset,
                max_decorrelation_steps=mail.decorrelate,
                evaluation=mail.evaluation,
                mark=mark,
                ledger=None if mail.keep else ledger[slots],
            )
            for slots in mail.shares
        ]
        for pool, slots in zip(pools, mail.shares):
            if pool is not None:
                pool.ledger = ledger[slots]
        self.pools[mail.pool], self.shares[mail.pool] = pools, mail.shares
        spec = next((pool.spec for pool in pools if pool is not None), None)
        return None if spec is None else spec.to_plain()

    def attach(self, mail: Attach) -> None:
        fd = self.boot.slabs[mail.slab]
        batches = [view(fd, batch) for batch in mail.batches]
        shares = self.shares[mail.pool]
        self.batches[mail.pool] = [
            [None if slots is None else batch[:, slots] for slots in shares] for batch in batches
        ]
        if mail.acting is not None and shares[0] is not None:
            actor = import_object(mail.acting.actor)
            parameters = view(self.boot.slabs[mail.parameter_slab], mail.acting.parameters)
            mine = [b[0] for b in self.batches[mail.pool] if b[0] is not None]
            states = tree_map(lambda x: x[shares[0]], view(fd, mail.states))
            self.actors[mail.pool] = actor(self.pools[mail.pool][0], mail.acting.agent, parameters, mine, states)

    def take_over(self, number: int, buffer: int) -> None:
        for g, pool in enumerate(self.pools[number]):
            if pool is not None:
                pool.take_over(None if buffer < 0 else self.batches[number][buffer][g])

    def close(self) -> None:
        for pools in self.pools.values():
            for pool in pools:
                if pool is not None:
                    pool.close()


def main() -> None:
    """Entry point of the process."""
    run_process(SamplingProcess)
