"""Slots: where runs execute, one at a time in each; every slot is an actor, on this machine or on a Ray cluster.

Runs write their own files, so launcher and nodes must share the file system that holds the directory of the runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.actors.backend import Backend, RunnerError
from penstock.actors.make import make_backend
from penstock.core.errors import ConfigError, nearest
from penstock.core.limits import require_whole
from penstock.core.machine import Gpu, Machine, read_machine
from penstock.processes.limits import require_linux
from penstock.processes.python import ONE_THREAD
from penstock.run.affinity import slices
from penstock.run.files.lock import RunLock
from penstock.studies.slots.slot_actor import SlotActor

BACKENDS = "processes", "ray"
STOPPED = {*(128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)), -1, -2, -15}
"""Exit codes of a run that a signal stopped, as shells and as Popen report them."""
_START_S, _ANSWER_S, _END_S, _SETTLE_S, _LOOK_S = 120.0, 20.0, 30.0, 30.0, 0.1
_PASSED_ON = (*ONE_THREAD, "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
"""Environment variables of the launcher that runs on other machines have as well."""


def make_slots(backend: str, count: int, address: str = "local", cpus: float = 1.0) -> Slots:
    """Makes `count` slots, `processes` of this machine or on a cluster of `ray`; slots of a node share it equally.

    Args:
        address: of the cluster, see `start_ray`. cpus: that Ray counts for each slot when it places them.

    Raises:
        ConfigError: unknown backend, the cluster cannot be reached, or there is no room for this many slots.
    """
    machines = check_backend(backend, address, cpus, count)
    if backend == "processes":
        return local_slots(machines, "--parallel")
    words = "--parallel", "--cpus"
    return Slots(make_backend("ray", count, address=address, num_cpus=cpus, words=words), count)


def local_slots(machines: Sequence[Machine], setting: str = "--slots") -> Slots:
    """Slots of this machine, each with a part of it.

    Args:
        setting: that sets their number, for messages.

    Raises:
        ConfigError: this system has no room for this many.
    """
    require_linux("train one run at a time, with penstock train")
    backend = make_backend("processes", len(machines), words=(setting, ""))
    return Slots(backend, len(machines), machines)


def check_backend(backend: str, address: str, cpus: float, count: int | None = None) -> list[Machine]:
    """Returns the part of this machine that each of this many slots would have, [] on a cluster.

    Raises ConfigError for invalid arguments of `make_slots`, before any slot is made.
    """
    require_whole(1, parallel=count)
    if backend not in BACKENDS:
        raise ConfigError(f"--backend {backend}: there is none; {nearest(str(backend), BACKENDS)}")
    if not isinstance(cpus, (int, float)) or not 0 <= cpus < math.inf:
        raise ConfigError(f"--cpus {cpus!r:.60}; expected the CPUs that Ray counts for a trial, 0 or more")
    if backend == "processes" and (address, cpus) != ("local", 1.0):
        raise ConfigError("--address and --cpus are of --backend ray; a slot of this machine has its share of all CPUs")
    return slices(read_machine(), count) if count is not None and address == "local" else []


class _Place(NamedTuple):
    """Where a slot is."""

    node: Any
    """Equal for slots that share a machine out."""
    machine: Machine
    """The part of it that the slot has."""


class Slots:
    """Slots by number; the kernel kills their actors and runs with the launcher, however it dies.

    Args:
        machines: the part of this machine that each has; None: those of a node share its CPUs and GPUs out.

    Raises:
        ConfigError: a slot does not come up, or there are more on a node than it has CPUs.
    """

    def __init__(self, backend: Backend, count: int, machines: Sequence[Machine] | None = None) -> None:
        self._backend, self._told_where = backend, machines is None
        self._actors: list[Any] = []
        try:
            for k in range(count):
                self._actors.append(self._new(k))
            self._places = self._shared_out() if machines is None else [_Place(None, part) for part in machines]
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    @staticmethod
    def settle(run_dir: Path) -> None:
        """Waits until no run that an earlier launcher left holds the directory: it ends shortly after its launcher.

        A run that finds its directory still locked after that reports it itself.
        """
        until = time.monotonic() + _SETTLE_S
        while (run_dir / ".lock").exists() and time.monotonic() < until:
            with contextlib.suppress(ConfigError), RunLock(run_dir):
                return
            time.sleep(_LOOK_S)

    def start(self, k: int, command: Sequence[str], log: Path, extra: Mapping[str, str]) -> Execution:
        """Starts `penstock COMMAND` in slot k, its output added to a log; its GPU alone is visible where it has one.

        Args:
            extra: environment variables besides the launcher's.
        """
        node, machine = self._places[k]
        gpu = visible_gpu(machine, [place.machine for place in self._places if place.node == node])
        variables = {**self._variables(), **extra, **gpu}
        args = (list(command), os.getcwd(), str(log.absolute()), variables, machine.cpus)
        return Execution(self, k, self.call(k, "start", *args))

    def call(self, k: int, method: str, *args: Any) -> Any:
        """Calls a method of the actor of slot k; returns a reference to its result."""
        return self._backend.call(self._actors[k], method, *args)

    def wait(self, call: Any, timeout_s: float) -> bool:
        """True once a call has ended."""
        return bool(self._backend.wait([call], timeout_s))

    def result(self, call: Any) -> Any:
        """The result of a call that has ended. Raises RunnerError."""
        return self._backend.result(call, _ANSWER_S)

    def replace(self, k: int, why: str) -> None:
        """Restarts a slot that has lost its actor."""
        print(f"penstock: slot {k + 1} is lost and started anew: {why.splitlines()[0]}", file=sys.stderr)
        self._backend.kill(self._actors[k])
        self._actors[k] = self._new(k)
        if self._told_where and (place := self._answered(self.call(k, "node"))).node != self._places[k].node:
            self._places[k] = place  # it shares the CPUs with other processes of the node

    def close(self) -> None:
        """Ends the actors and all that runs in them, and leaves the cluster."""
        self._backend.close()

    def _new(self, k: int) -> Any:
        return self._backend.start(SlotActor, (f"slot {k + 1}",), f"slot {k + 1}")

    def _variables(self) -> dict[str, str]:
        """The launcher's environment variables: all of them for this machine, a few for others."""
        here = self._backend.name != "ray"
        found = {name: value for name, value in os.environ.items() if here or name in _PASSED_ON}
        if "PYTHONPATH" in found:  # relative to the launcher's directory, which is not that of an actor
            found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, found["PYTHONPATH"].split(os.pathsep)))
        return found

    def _shared_out(self) -> list[_Place]:
        """The place of each slot. Raises ConfigError if one does not come up, or has no CPU of its own."""
        calls = [self.call(k, "node") for k in range(len(self))]
        whole = [self._answered(call) for call in calls]
        nodes, places = [place.node for place in whole], list[_Place]()
        for k, (node, machine) in enumerate(whole):
            count, cpus = nodes.count(node), len(machine.cpus)
            if count > cpus:
                raise ConfigError(
                    f"{count} slots on a node of {cpus} CPUs, and each has CPUs of its own; use a smaller --parallel, "
                    "or a larger --cpus, by which Ray spreads them over nodes"
                )
            places.append(_Place(node, slices(machine, count)[nodes[:k].count(node)]))
        return places

    def _answered(self, call: Any) -> _Place:
        """The node that an actor has answered, as the place of a slot that has all of it."""
        try:
            name, plain = self._backend.result(call, _START_S)
        except RunnerError as error:
            raise ConfigError(f"a slot of backend {self._backend.name} does not come up: {error}") from error
        machine = replace(Machine(**plain), gpus=tuple(Gpu(**gpu) for gpu in plain["gpus"]))
        return _Place((name, machine), machine)


class Execution:
    """A run that was started in a slot.

    Args:
        call: the call that started it.
    """

    def __init__(self, slots: Slots, k: int, call: Any) -> None:
        self._slots, self._k, self._call = slots, k, call
        self._code: int | None = None

    def code(self) -> int | None:
        """The exit code, -N of one that signal N ended; None while it runs. -9 if it was lost with its slot or node.

        Raises:
            ConfigError: it could not be started.
        """
        if self._code is None and self._slots.wait(self._call, 0.0):
            try:
                self._code = self._slots.result(self._call)
            except RunnerError as error:
                if error.kind == "exception":
                    raise ConfigError(str(error)) from error
                self._code = -signal.SIGKILL
                self._slots.replace(self._k, str(error))
            if self._code is None:
                self._call = self._slots.call(self._k, "code")
        return self._code

    def terminate(self) -> None:
        """Has it save and end, by SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once, by SIGKILL."""
        self._send(signal.SIGKILL)

    def end(self) -> None:
        """Kills it, and waits until it is gone."""
        if self._code is None:
            self._slots.wait(self._slots.call(self._k, "end"), _END_S)

    def _send(self, number: int) -> None:
        if self._code is None:
            self._slots.call(self._k, "send", int(number))


def visible_gpu(machine: Machine, all_of_them: Sequence[Machine]) -> dict[str, str]:
    """The environment variable that leaves a slot its own GPU, where slots have several and the user chose none."""
    several = len({gpu.uuid for one in all_of_them for gpu in one.gpus} - {""}) > 1
    if several and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in machine.gpus)}
    return {}
