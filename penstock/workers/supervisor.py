"""The learner's side of its worker processes: starts them, waits for them, sees them die, and replaces them.

Nothing here waits without a limit: every wait polls the workers' events together with their pidfds, and a worker that
owes an answer and shows no progress for `step_timeout_s` is killed and counts as dead.
"""

from __future__ import annotations

import builtins
import os
import select
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.core.placement import pin
from penstock.core.shared_memory import open_memory
from penstock.envs.pools.settings import CLOSING, RESETTING, STEPPING
from penstock.envs.shutdown import is_of_closing, warn_of_closing
from penstock.processes.descriptors import hold_standard_streams
from penstock.processes.fork_client import ForkServer
from penstock.processes.limits import require_linux, require_room
from penstock.processes.termination import new_mark
from penstock.processes.tether import Tether
from penstock.workers import control
from penstock.workers.control import SPIN_S, Control, Event, Spin, outnumbered
from penstock.workers.faults import Fault, Faults, fault_of
from penstock.workers.messages import WorkerSettings
from penstock.workers.process import DESCRIPTORS, StartArguments, WorkerProcess
from penstock.workers.shares import SharedMemory

SHARED_FILES = 5
"""Shared files that every worker inherits, empty at first: batches and episode table of two pools, and parameters."""
_LONGEST_SLEEP_S = 0.25
_SHUTDOWN_S = 5.0


class Supervised(Protocol):
    """The learner's part of the work that workers do, such as a pool: told of deaths, asked for messages."""

    def messages(self, w: int, replaces: bool) -> list[Any]:
        """First messages to a new worker."""
        ...

    def whereabouts(self, w: int, block: Any) -> str:
        """Start of a fault message: the slot at work and its activity; empty if the slot is of another pool."""
        ...

    def lost(self, w: int) -> None:
        """Invalidates the rows that a dead worker had not delivered."""


class Workers:
    """N worker processes.

    Args:
        cpus: CPUs of each worker, and `own` of this thread until `close`; empty for all.
        step_timeout_s: longest time without progress. start_timeout_s: the same while environments are made.
        computing: processes that compute at a time, which decides whether waiters yield.
        module: that the processes run. forked_with: modules that a process imports to fork them of; with none each is a
            fresh interpreter. shared: a parent process's memory for training batches and their episode table, and its
            watch over this process, which sees from here that the wait for workers goes on; None if there is none.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        faults: Faults,
        step_timeout_s: float,
        start_timeout_s: float,
        cpus: Sequence[tuple[int, ...]] = (),
        computing: int | None = None,
        module: str = "penstock.workers.env_worker",
        shared: SharedMemory | None = None,
        own: tuple[int, ...] = (),
        forked_with: Sequence[str] = (),
    ) -> None:
        require_linux()
        hold_standard_streams()
        require_room(count, "workers", DESCRIPTORS, "use SerialSampler")
        self.count, self.faults, self._seed = count, faults, seed
        self._timeout_s, self._start_timeout_s = step_timeout_s, start_timeout_s
        self._allowed = tuple(sorted(os.sched_getaffinity(0)))
        self._cpus = list(cpus) or [self._allowed] * count
        self._control_fd = open_memory("control")
        self.control = Control(self._control_fd, count)
        self.event = Event()
        self.memory_fds = [open_memory(f"memory_fd-{i}") for i in range(SHARED_FILES)]
        if shared is not None:
            for mine, theirs in zip(self.memory_fds, (shared.memory_fd, shared.episode_tables[0])):
                os.dup2(theirs, mine, inheritable=False)
        self._activity: Any = [0] * control.ACTIVITY_WORDS if shared is None else shared.activity
        mark = new_mark()
        forks = ForkServer(mark, forked_with, start_timeout_s) if forked_with else None
        fds = [self._control_fd, self.event.fd, *self.memory_fds]
        self.workers: list[WorkerProcess] = []
        self._tether = Tether(self, _end, self.workers, forks, fds)
        named = {"control": self._control_fd, "learner_event": self.event.fd, "memory_fds": self.memory_fds}
        arguments = StartArguments(module, count, self._tether, mark, named, forks)
        self.workers += [WorkerProcess(w, arguments) for w in range(count)]
        self.yields = outnumbered(count + 1 if computing is None else computing)
        self.spin = Spin(SPIN_S, self.yields)
        self.supervised: list[Supervised] = []
        self.dropped: set[int] = set()
        self._pinned, self._looked_at = bool(own), 0.0
        if own:
            pin(own)

    @property
    def live(self) -> list[int]:
        """Workers that take part in the next batch."""
        return [w.index for w in self.workers if w.index not in self.dropped]

    def start(self, work: Supervised) -> list[Any]:
        """Starts all processes side by side; returns the answers to their first messages."""
        self.supervised.append(work)
        for worker in self.workers:
            self._spawn(worker)
        self.settle()
        return [self._answer(w) for w in range(self.count)]

    def settle(self) -> None:
        """Waits until every worker that is being started or replaced is up."""
        self._wait(lambda: all(worker.up or worker.index in self.dropped for worker in self.workers))

    def call(self, messages: Sequence[list[Any] | None], watch: Callable[[], None] | None = None) -> list[Any]:
        """Sends each worker its messages; returns their answers, None where there were none or the worker died.

        The replacement of one that died may be up by then, and its first answers are no answer to these messages.
        """
        self.settle()
        called = {w: self.workers[w].child for w in self.live if messages[w] is not None}
        for w in called:
            self.workers[w].write(messages[w])
            self.command(w, control.MAIL)
        self.wait_for_commands(list(called), watch)
        alive = [worker.up and worker.child is called.get(worker.index) for worker in self.workers]
        return [self._answer(w) if alive[w] else None for w in range(self.count)]

    def command(self, w: int, code: int, **words: int) -> None:
        """Begins a command; `wait_for_commands` waits for it."""
        block = self.control.blocks[w]
        block[control.CODE] = code
        for name, value in words.items():
            block[getattr(control, name)] = value
        block[control.COMMAND] += 1
        control.fence()
        if block[control.SLEEPS]:
            self.workers[w].event.set()

    def wait_for_commands(self, called: Sequence[int], watch: Callable[[], None] | None = None) -> None:
        """Waits until each of these workers has done its command, or died; `watch` is called now and then meanwhile."""
        blocks = [(self.workers[w], self.control.blocks[w]) for w in called]

        def ready() -> bool:
            if watch is not None:
                watch()
            return all(b[control.COMMAND] == b[control.DONE_COMMAND] or not worker.up for worker, b in blocks)

        self.wait(ready)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Returns once `ready()`, which must hold when all workers have died.

        Raises:
            EnvWorkerError and its like: a worker died and the policy does not replace it.
        """
        self._activity[2] += 1
        if not self.spin.until(ready):
            self._wait(ready)

    def wake(self, w: int) -> None:
        """Wakes a worker."""
        self.workers[w].event.set()

    def close(self) -> None:
        """Ends the processes: asks, then kills. A second call does nothing."""
        if not self._tether.holds:  # also in a fork of this process, whose workers they are not
            return
        if self._pinned:
            pin(self._allowed, self._allowed)
        for worker in self.workers:
            if worker.up:
                self.command(worker.index, control.QUIT)
        limit = min(_SHUTDOWN_S, self._timeout_s)
        for worker in self.workers:
            worker.token, worker.moved_at = b"", time.monotonic()
        said: list[str] = []
        for worker in self.workers:
            while worker.up and not worker.exited and self._moved(worker, time.monotonic()) < limit:
                self._activity[2] += 1
                time.sleep(0.001)
            if worker.up:
                self._ended(worker, said)
        self._tether.close()
        warn_of_closing(said)

    def _spawn(self, worker: WorkerProcess) -> None:
        """A new process with the same descriptors; its event is cleared and its block as if all were done."""
        messages = [m for work in self.supervised for m in work.messages(worker.index, worker.started)]
        block = self.control.blocks[worker.index]
        for i in range(control.WORDS):
            block[i] = 0
        block[control.COMMAND] = 1
        try:
            worker.launch(WorkerSettings(self._cpus[worker.index], self._seed, messages, self.yields))
        except (ChildProcessError, ConnectionError, TimeoutError) as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "exit"
            self._replace(worker, Fault(kind, f"worker {worker.index} cannot be started: {error.strerror or error}"))

    def _answer(self, w: int, said: list[str] | None = None) -> Any:
        """The answer that waits, None if there is none; its warnings are repeated here.

        Args:
            said: takes the warnings about `close()` instead, which are for all workers together.
        """
        report = self.workers[w].read_report()
        if not isinstance(report, dict) or "answer" not in report:
            return None
        closing = [] if said is None else said
        for name, text in report["warnings"]:
            if is_of_closing(text):
                closing.append(text)
            else:
                warnings.warn(text, getattr(builtins, name, UserWarning), stacklevel=4)
        if said is None:
            warn_of_closing(closing)
        return report["answer"]

    def _ended(self, worker: WorkerProcess, said: list[str]) -> None:
        """Warns if a process that was asked to end did not get through closing its environments."""
        block = self.control.blocks[worker.index]
        if block[control.COMMAND] == block[control.DONE_COMMAND]:
            self._answer(worker.index, said)
            return
        if block[control.ACTIVITY + 1] != CLOSING:  # it had failed before, while another's fault was on its way
            return
        what = "has not closed its environments in time and is killed"
        if worker.child is not None and worker.exited:
            what = fault_of(worker.child.death(), worker.read_report()).message
        where = next((text for work in self.supervised if (text := work.whereabouts(worker.index, block))), "")
        warnings.warn(f"worker {worker.index}, in close(): {where}: {what}; its results are kept", stacklevel=3)

    def _wait(self, ready: Callable[[], bool]) -> None:
        learner = self.control.learner
        self._looked_at = time.monotonic()
        for worker in self.workers:
            worker.token = b""
        while not self._look(ready):
            learner[0] = 1
            control.fence()
            try:
                if not ready():
                    self._sleep()
            finally:
                learner[0] = 0
            self.event.clear()
            if not ready():  # a wait that is over asks for nothing, and there is one in every row
                self._supervise()

    def _look(self, ready: Callable[[], bool]) -> bool:
        for worker in self.workers:
            block = self.control.blocks[worker.index]
            if (
                not worker.up
                and worker.child is not None
                and worker.start_at is None
                and block[control.DONE_COMMAND] == block[control.COMMAND]
                and not worker.exited
            ):
                worker.up = "answer" in (worker.read_report() or {})
        return ready()

    def _sleep(self) -> None:
        poll = select.poll()
        poll.register(self.event.fd, select.POLLIN)
        due = _LONGEST_SLEEP_S
        for worker in self.workers:
            if worker.start_at is not None:
                due = min(due, max(worker.start_at - time.monotonic(), 0.0))
            elif worker.child is not None:
                worker.child.register(poll)
        poll.poll(due * 1e3)

    def _supervise(self) -> None:
        self._activity[2] += 1
        now = time.monotonic()
        stood_still_s = max(now - self._looked_at - 2 * _LONGEST_SLEEP_S, 0.0)
        self._looked_at = now
        for worker in self.workers:
            worker.moved_at += stood_still_s  # this process had no turn: maybe the machine, and so the worker, had none
            if worker.index in self.dropped or not worker.started:
                continue
            if worker.start_at is not None:
                if now >= worker.start_at:
                    self._spawn(worker)
            elif worker.exited:
                self._died(worker, None)
            elif self._owes(worker):
                block = self.control.blocks[worker.index]
                # A message may have environments made, or torch imported.
                mailed = block[control.CODE] == control.MAIL and block[control.COMMAND] != block[control.DONE_COMMAND]
                starting = (not worker.up or mailed) and block[control.ACTIVITY + 1] not in (RESETTING, STEPPING)
                limit = self._start_timeout_s if starting else self._timeout_s
                if self._moved(worker, now) > limit:
                    self._died(
                        worker,
                        f"not started within {limit:g} s (start_timeout_s)"
                        if starting
                        else f"no progress for {limit:g} s (step_timeout_s)",
                    )

    def _moved(self, worker: WorkerProcess, now: float) -> float:
        """Seconds since the worker was seen to make progress."""
        token = self.control.blocks[worker.index][2 * 8 :].tobytes()
        if token != worker.token:
            worker.token, worker.moved_at = token, now
        return now - worker.moved_at

    def _owes(self, worker: WorkerProcess) -> bool:
        b = self.control.blocks[worker.index]
        groups = range(control.MAX_GROUPS)
        return b[control.COMMAND] != b[control.DONE_COMMAND] or any(
            b[control.SENT + g] > b[control.DONE + g] for g in groups
        )

    def _died(self, worker: WorkerProcess, hang: str | None) -> None:
        w, child = worker.index, worker.child
        assert child is not None
        if hang is not None:
            cause = Fault("timeout", f"{hang}\n{child.stacks()}")
        else:
            cause = fault_of(child.death(), worker.read_report())
        block = self.control.blocks[w]
        placed = cause.message.startswith(("slot ", "evaluation slot ", "env factory "))
        if placed or cause.kind in ("config", "native"):
            fault = Fault(cause.kind, f"worker {w}, pid {child.pid}: {cause.message}")
        else:
            where = next((text for work in self.supervised if (text := work.whereabouts(w, block))), child.process.args)
            fault = Fault(cause.kind, f"worker {w}, pid {child.pid}: {where}: {cause.message}")
        self._replace(worker, fault)

    def replace_faulty(self, w: int, message: str) -> None:
        """Replaces a worker with an environment that broke the contract in a row checked only afterwards."""
        self._replace(self.workers[w], Fault("contract", f"worker {w}: {message}"))

    def _replace(self, worker: WorkerProcess, fault: Fault) -> None:
        """Replaces or drops a worker that died, or raises, by the policy."""
        worker.up, w = False, worker.index
        worker.release()
        delay = self.faults.decide(w, fault)
        for work in self.supervised:
            work.lost(w)
        if delay is None:
            self.dropped.add(w)
            if len(self.dropped) == self.count:
                raise Fault(fault.kind, f"{fault.message}\nno worker is left (fault_policy='drop')").error()
        else:
            worker.start_at = time.monotonic() + delay
            if not delay:
                self._spawn(worker)


def _end(workers: list[WorkerProcess], forks: ForkServer | None, fds: list[int]) -> None:
    """Kills the processes that still run and closes every descriptor; also called when a sampler is forgotten."""
    for worker in workers:
        worker.close()
    if forks is not None:
        forks.close()
    for fd in fds:
        os.close(fd)
