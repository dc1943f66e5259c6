"""A worker process: `python -m penstock.samplers.worker`. It steps its slots, and nothing it does can make others wait.

It imports torch only if it is given an agent. What it is told comes as one message in a memfd from its own parent,
the only thing that penstock ever unpickles; what it answers is read as plain data.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError, EnvContractError
from penstock.core.slab import view
from penstock.core.tree import Tree, tree_map
from penstock.core.wire import encode
from penstock.envs.make import EnvConfig
from penstock.envs.serial_pool import Reset, SerialPool
from penstock.samplers import control
from penstock.samplers.control import Bell, Control, Spin, fence, sleep_on

_F_SETSIG = 10
_LOOK_AROUND_S = 2.0
"""Seconds of sleep after which a worker looks whether its learner lives, should everything else have failed."""


@dataclass(frozen=True)
class Boot:
    """Descriptors and numbers that a worker gets on its command line."""

    index: int
    workers: int
    learner_pid: int
    control: int
    bell: int
    learner_bell: int
    mail: int
    report: int
    crash: int
    alive: int
    slabs: tuple[int, ...]

    def fds(self) -> list[int]:
        """What the process inherits."""
        return [self.control, self.bell, self.learner_bell, self.mail, self.report, self.crash, self.alive, *self.slabs]


@dataclass(frozen=True)
class Start:
    """The first message: what holds for the whole life of the worker."""

    cpus: tuple[int, ...]
    seed: int
    spin_s: float
    messages: list[Any]
    """Obeyed at once; their answers are the first that the worker gives."""


@dataclass(frozen=True)
class MakePool:
    """Message: make the environments of a pool (0 training, 1 evaluation) for `shares[group]`, slices of its B slots."""

    pool: int
    config: EnvConfig
    seed: int
    shares: tuple[slice | None, ...]
    reset: Reset
    decorrelate: int
    evaluation: bool
    ledger: Tree
    slab: int
    keep: bool = False
    """The ledger tells of a worker that died, and stays as it is."""


@dataclass(frozen=True)
class Attach:
    """Message: the batches to write; with an agent also its recurrent states and where its parameters are."""

    pool: int
    slab: int
    batches: list[SampleBatch]
    states: Tree = None
    agent: Any = None
    parameters: Tree = None
    parameter_slab: int = 0


@dataclass(frozen=True)
class TakeOver:
    """Message: go on for a worker that died after it wrote this buffer; -1: it wrote none."""

    pool: int
    buffer: int


@dataclass(frozen=True)
class Call:
    """Message: call a method of every SerialPool of a pool with the arguments of its group."""

    pool: int
    method: str
    args: tuple[tuple[Any, ...] | None, ...]


@dataclass(frozen=True)
class SetState:
    """Message: bring the slots of each group back; see `EnvPool.set_state`."""

    pool: int
    buffer: int
    states: tuple[Any, ...]
    journals: tuple[Any, ...]


def initialize_worker(boot: Boot, cpus: Sequence[int], seed: int) -> None:
    """Sets up a process that dies with its learner, ignores Ctrl-C, and uses one thread on its own CPUs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    crash = open(boot.crash, "wb", buffering=0, closefd=False)  # noqa: SIM115
    faulthandler.enable(crash, all_threads=True)
    faulthandler.register(signal.SIGUSR2, crash, all_threads=True)
    die_with_the_learner(boot.alive, boot.learner_pid)
    if cpus:
        os.sched_setaffinity(0, cpus)
    # For environments that draw from global generators: streams of their own, though not those of other layouts.
    random.seed(seed * 1_000_003 + boot.index)
    np.random.seed((seed * 1_000_003 + boot.index) % 2**32)


def die_with_the_learner(alive: int, learner_pid: int) -> None:
    """Has the kernel kill this process group as soon as nobody holds the other end of the pipe `alive`.

    The pipe is opened anew: signal settings belong to the open file, and a shared one would serve one worker only.
    """
    fd = os.open(f"/proc/self/fd/{alive}", os.O_RDONLY | os.O_NONBLOCK)
    os.close(alive)
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is always reported
    if poll.poll(0) or os.getppid() != learner_pid:
        os.killpg(0, signal.SIGKILL)


def run_process(kind: type[Host]) -> None:
    """Sets the process up and serves; whatever goes wrong is reported as text before the process ends.

    Its one argument is a `Boot` as JSON.
    """
    fields = json.loads(sys.argv[1])
    boot = Boot(**{**fields, "slabs": tuple(fields["slabs"])})
    try:
        start: Start = _read_mail(boot.mail)
        initialize_worker(boot, start.cpus, start.seed)
        host = kind(boot, start)
        host.answer([host.read(message) for message in start.messages])
        host.serve()
    except BaseException as error:
        os.pwrite(boot.report, _pack({"error": describe(error)}), 0)
        os._exit(1)


def describe(error: BaseException) -> dict[str, str]:
    """The kind of fault and its text; `EnvWorkerError` and its like bring their traceback along."""
    if isinstance(error, ConfigError):
        return {"kind": "config", "text": str(error)}
    if isinstance(error, EnvContractError):
        return {"kind": "contract", "text": str(error)}
    if type(error).__name__ == "EnvWorkerError":
        return {"kind": "exception", "text": str(error)}
    text = "".join(traceback.format_exception(error))
    return {"kind": "exception", "text": f"{type(error).__name__}: {error}\n{text}"}


class Host:
    """What every kind of child process has: its block, its bells, and the way it answers."""

    def __init__(self, boot: Boot, start: Start) -> None:
        self.boot = boot
        shared = Control(boot.control, boot.workers)
        self.blocks, self.block, self.learner = shared.blocks, shared.blocks[boot.index], shared.learner
        self.bell, self.learner_bell = Bell(boot.bell), Bell(boot.learner_bell)
        self.spin = Spin(start.spin_s)

    def serve(self) -> None:
        """Obeys until told to quit."""
        raise NotImplementedError

    def read(self, message: Any) -> Any:
        """Does what one message says and gives the answer, which `penstock.core.wire` can send."""
        raise NotImplementedError

    def mail(self) -> list[Any]:
        """The messages that wait."""
        return _read_mail(self.boot.mail)

    def answer(self, value: Any) -> None:
        """Answers messages: a list of what each came to."""
        data = _pack({"answer": value})
        os.ftruncate(self.boot.report, 0)
        os.pwrite(self.boot.report, data, 0)
        self.done()

    def done(self) -> None:
        """The command is done."""
        self.block[control.DONE_COMMAND] = self.block[control.COMMAND]
        fence()
        if self.learner[0]:
            self.learner_bell.ring()


class SamplingProcess(Host):
    """Steps its slots in lockstep with the learner, or runs the whole loop over them."""

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

        def called() -> bool:
            if block[control.COMMAND] != block[control.DONE_COMMAND]:
                return True
            for g in range(len(self.active)):
                if block[control.SENT + g] > block[control.DONE + g]:
                    return True
            return False

        while True:
            if not self.spin.until(called):
                while not called():
                    sleep_on(self.bell, block, control.SLEEPS, called, _LOOK_AROUND_S)
                    if os.getppid() != self.boot.learner_pid:
                        os.killpg(0, signal.SIGKILL)
            if block[control.COMMAND] != block[control.DONE_COMMAND]:
                if not self.obey(block[control.CODE]):
                    return
                continue
            for g in groups[: len(self.active)]:
                if block[control.SENT + g] > block[control.DONE + g]:
                    self.step(g)

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
            self.close()
            self.done()
            return False
        if code == control.MAIL:
            self.answer([self.read(message) for message in self.mail()])
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
                pool.bind(out)
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
                None if pool is None or row is None else pool.set_state(state, row, journal)
                for pool, row, state, journal in zip(pools, rows, mail.states, mail.journals)
            ]
        assert isinstance(mail, Call)
        return [
            None if args is None or pool is None else getattr(pool, mail.method)(*args)
            for pool, args in zip(pools, mail.args)
        ]

    def make(self, mail: MakePool) -> Any:
        for pool in self.pools.pop(mail.pool, []):
            if pool is not None:
                pool.close()
        ledger = view(self.boot.slabs[mail.slab], mail.ledger)
        mark: Any = self.block[control.MARK : control.MARK + control.MARK_WORDS]
        before = ledger.copy()
        pools: list[SerialPool | None] = [
            None if slots is None else SerialPool(
                mail.config, mail.seed, slots, reset=mail.reset, max_decorrelation_steps=mail.decorrelate,
                evaluation=mail.evaluation, mark=mark, ledger=ledger[slots],
            )
            for slots in mail.shares
        ]  # fmt: skip
        if mail.keep:
            ledger[...] = before
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
        if mail.agent is not None and shares[0] is not None:
            from penstock.samplers.actor import Actor

            pool = self.pools[mail.pool][0]
            assert pool is not None
            parameters = view(self.boot.slabs[mail.parameter_slab], mail.parameters)
            mine = [b[0] for b in self.batches[mail.pool] if b[0] is not None]
            states = tree_map(lambda x: x[shares[0]], view(fd, mail.states))
            self.actors[mail.pool] = Actor(pool, shares[0].start, mail.agent, parameters, mine, states)

    def take_over(self, number: int, buffer: int) -> None:
        for g, pool in enumerate(self.pools[number]):
            if pool is not None:
                pool.take_over(None if buffer < 0 else self.batches[number][buffer][g])

    def close(self) -> None:
        for pools in self.pools.values():
            for pool in pools:
                if pool is not None:
                    pool.close()


def _pack(value: Any) -> bytes:
    data = encode(value)
    return len(data).to_bytes(8, "little") + data


def _read_mail(fd: int) -> Any:
    import cloudpickle

    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    path_size = int.from_bytes(os.pread(fd, 8, 8), "little")
    if path_size:
        sys.path[:] = json.loads(os.pread(fd, path_size, 16))
    return cloudpickle.loads(os.pread(fd, size, 16 + path_size))


def sampling_process() -> None:
    """Entry point of the process."""
    run_process(SamplingProcess)


if __name__ == "__main__":
    from penstock.samplers import worker  # messages name the module's classes, not `__main__`'s

    worker.sampling_process()
