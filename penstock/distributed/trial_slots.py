"""RaySlots: slots of a launcher on a Ray cluster, each an actor that executes one run at a time on its node.

What a run writes it writes itself, so nodes and launcher need one file system, on which the directory of the runs lies.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.actors.backend import RunnerError
from penstock.actors.on_ray import Ray
from penstock.core.errors import ConfigError
from penstock.core.machine import Machine, read_machine
from penstock.processes.python import ONE_THREAD
from penstock.run.affinity import slices
from penstock.run.files.lock import RunLock
from penstock.run.launch.slots import spawned, visible_gpu

_START_S, _ANSWER_S, _END_S, _SETTLE_S, _LOOK_S = 120.0, 20.0, 10.0, 30.0, 0.1
_RAYS = ("RAY_", "CUDA_VISIBLE_DEVICES")
"""Openings of the names of variables that Ray sets for its actors, and that are not for what they start."""


class SlotActor:
    """One slot, on its node."""

    def __init__(self) -> None:
        self._machine, self._gpu = read_machine(), dict[str, str]()
        self._process: subprocess.Popen[bytes] | None = None

    def node(self) -> tuple[str, int]:
        """Its node, and how many CPUs that has."""
        context: Any = importlib.import_module("ray").get_runtime_context()
        return context.get_node_id(), len(read_machine().cpus)

    def pin(self, k: int, count: int) -> str:
        """Takes part k of the node's CPUs and GPUs in so many; returns it in words."""
        parts: list[Machine] = slices(read_machine(), count)
        self._machine, self._gpu = parts[k], visible_gpu(parts[k], parts)
        return str(self._machine)

    def execute(self, command: Sequence[str], cwd: str, log: str, env: Mapping[str, str]) -> int:
        """Starts a run and waits for its end; returns the exit code.

        Raises ConfigError if the launcher's directories are not there on this node.
        """
        for path in (cwd, str(Path(log).parent)):
            if not os.path.isdir(path):
                raise ConfigError(
                    f"{path} of the launcher is not there on node {os.uname().nodename}; a search on several machines "
                    "needs a file system that all of them see: choose a --dir on it, and begin there"
                )
        own = {name: value for name, value in os.environ.items() if not name.startswith(_RAYS)}
        kept = {name: value for name, value in own.items() if name not in ONE_THREAD}
        self._process = spawned(command, Path(log), {**kept, **self._gpu, **env}, self._machine.cpus, cwd)
        while True:  # this thread stays, and with it the process: it dies with its parent thread
            try:
                return self._process.wait(timeout=_ANSWER_S)
            except subprocess.TimeoutExpired:
                continue

    def send(self, number: int) -> None:
        """Sends a signal to the run."""
        if self._process is not None:
            self._process.send_signal(number)


class RayExecution:
    """A run in a slot of a cluster."""

    def __init__(self, slots: RaySlots, actor: Any, call: Any) -> None:
        self._slots, self._actor, self._call = slots, actor, call
        self._code: int | None = None

    def code(self) -> int | None:
        """The exit code, None while it runs; -9 if it was lost with its slot or node."""
        backend = self._slots.backend
        if self._code is None and backend.wait([self._call], 0.0):
            try:
                self._code = int(backend.result(self._call, _ANSWER_S))
            except RunnerError as error:
                if error.kind == "exception":
                    raise ConfigError(str(error)) from error
                self._code = -signal.SIGKILL
                self._slots.replace(self._actor, str(error))
        return self._code

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._send(signal.SIGKILL)

    def end(self) -> None:
        """Kills it, and waits until it is gone."""
        if self._code is None:
            self._send(signal.SIGKILL)
            self._slots.backend.wait([self._call], _END_S)

    def _send(self, number: int) -> None:
        if self._code is None:
            self._slots.backend.call(self._actor, "send", int(number))


class RaySlots:
    """Slots on a cluster that was joined, or is started on this machine; those of a node share its CPUs and GPUs out.

    Args:
        address: see `start_ray`. cpus: that Ray counts for each slot when it places them.

    Raises:
        ConfigError: the cluster cannot be reached, or has no room for so many.
    """

    def __init__(self, count: int, address: str = "local", cpus: float = 1.0) -> None:
        if address == "local":
            slices(read_machine(), count)  # more than there are CPUs is refused before anything is started
        self.backend = Ray(address, cpus, max(os.cpu_count() or 1, math.ceil(count * cpus)))
        try:
            self.backend.require_room(count, ("--parallel", "--cpus"))
            print(f"penstock: {self.backend.cluster}", file=sys.stderr)
            self._actors = [self._started(k) for k in range(count)]
            self._places = [self._node(actor) for actor in self._actors]
            nodes = [node for node, _ in self._places]
            self._shares = [(nodes[:k].count(node), nodes.count(node)) for k, node in enumerate(nodes)]
            for k in range(count):
                self._pin(k)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    @staticmethod
    def settle(run_dir: Path) -> None:
        """Waits until no run that an earlier launcher left holds the directory: Ray ends them shortly after it."""
        until = time.monotonic() + _SETTLE_S
        while (run_dir / ".lock").exists():
            try:
                with RunLock(run_dir):
                    return
            except ConfigError:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)

    def start(self, k: int, command: Sequence[str], log: Path, extra: Mapping[str, str]) -> RayExecution:
        """Has a slot's actor start a run."""
        own = {name: os.environ[name] for name in (*ONE_THREAD, "PYTHONPATH") if name in os.environ}
        visible = "CUDA_VISIBLE_DEVICES"
        chosen = {visible: os.environ[visible]} if visible in os.environ else {}
        env = {**own, **chosen, **extra}
        args = (list(command), os.getcwd(), str(log.absolute()), env)
        return RayExecution(self, self._actors[k], self.backend.call(self._actors[k], "execute", *args))

    def replace(self, actor: Any, why: str) -> None:
        """Starts a slot anew whose actor is gone."""
        k = self._actors.index(actor)
        print(f"penstock: slot {k + 1} is lost and started anew: {why.splitlines()[0]}", file=sys.stderr)
        before = self._places[k][0]
        self.backend.kill(actor)
        self._actors[k] = self._started(k)
        self._places[k] = self._node(self._actors[k])
        if self._places[k][0] != before:  # it shares the CPUs of whatever runs there already
            self._shares[k] = 0, 1
        self._pin(k)

    def close(self) -> None:
        """Ends the actors and all that runs in them, and leaves the cluster."""
        self.backend.close()

    def _started(self, k: int) -> Any:
        return self.backend.start(SlotActor, (), f"slot {k + 1}", max_concurrency=3)

    def _node(self, actor: Any) -> tuple[str, int]:
        return self._told(actor, "node")

    def _pin(self, k: int) -> None:
        part, count = self._shares[k]
        cpus = self._places[k][1]
        if count > cpus:
            raise ConfigError(
                f"{count} slots on a node of {cpus} CPUs, and each has CPUs of its own; use a smaller --parallel, or a "
                "larger --cpus, by which Ray spreads them over nodes"
            )
        self._told(self._actors[k], "pin", part, count)

    def _told(self, actor: Any, method: str, *args: Any) -> Any:
        try:
            return self.backend.result(self.backend.call(actor, method, *args), _START_S)
        except RunnerError as error:
            raise ConfigError(f"a slot on the cluster at {self.backend.cluster.address}: {error}") from error
