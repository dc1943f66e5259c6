"""Ray: runners are actors of a Ray cluster, on this machine or on many."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.actors.backend import ROOM, DeathKind, RunnerError, RunnerStatus, cannot_travel
from penstock.actors.cluster import MIN_STORE_BYTES, start_ray
from penstock.actors.watch import seen, watched
from penstock.core.errors import ConfigError
from penstock.processes.python import ONE_THREAD

INLINE_BYTES = 64 << 10
"""Weights up to this travel inside each call, and above as one object of the store: 0.8 ms against 2.4 for 37 KB."""
_TAIL = 2000
"""Characters of a dead runner's standard error that are shown."""
_WATCH_S, _LOOK_S = 2.0, 20.0
"""Longest wait for an actor to be made, and for a task that looks at it, which may start a process."""
_NO_TOKEN = (
    "; if this process has a token and the cluster's nodes were started without one, nothing that it asks for runs "
    "there, and everyone who reaches a port of it may run code as you: start every node with the token of this user "
    "(RAY_AUTH_MODE=token ray start ...), or say RAY_AUTH_MODE=disabled"
)
_OURS = "penstock.core.errors."
_COLOUR = re.compile(r"\x1b\[\d+m")
_places: list[Any] = []
"""The scheduling strategy of the runners of this process, where it is a learner's and they have a bundle with it."""
_NODE = ("NodeDiedError", "LocalRayletDiedError", "ObjectLostError", "OwnerDiedError", "ActorUnavailableError")


def place_runners(strategy: Any) -> None:
    """Has Ray place the runners that this process starts by this strategy from now on; None: wherever there is room."""
    _places[:] = [] if strategy is None else [strategy]


class Ray:
    """Backend with Ray actors as runners; nodes trust each other, and pickle arguments and results.

    Args:
        address: see `start_ray`.
        num_cpus: CPUs that Ray counts for each runner, when it places them; it may be a fraction.
        cluster_cpus: CPUs that a local cluster counts; None for those of this machine.
        store_bytes: size of a local cluster's object store.
    """

    name = "ray"

    def __init__(
        self,
        address: str = "local",
        num_cpus: float = 1.0,
        cluster_cpus: int | None = None,
        store_bytes: int = MIN_STORE_BYTES,
    ) -> None:
        self.cluster = start_ray(address, num_cpus=cluster_cpus, store_bytes=store_bytes)
        self._ray, self._closed = self.cluster.ray, False
        # A local cluster has as many CPUs as its first user needs; later users are placed regardless of CPUs.
        shared = self.cluster.origin == "started" and self.cluster.holders > 1 and not _places
        self._num_cpus = 0.0 if shared else num_cpus
        self._actors: dict[type, Any] = {}
        """Each class as Ray's own, which is shipped to the cluster once."""
        self._runners: dict[str, Any] = {}
        """Each actor that was not killed, by its identifier."""
        self._names: dict[str, str] = {}
        self._watches: dict[str, Any] = {}
        """Calls that return where each actor can be watched."""

    def require_room(self, runners: int, words: tuple[str, str] = ROOM) -> None:
        """Raises ConfigError if the cluster, even without other load, cannot place this many runners.

        A cluster that scales automatically counts at its present size: raise its minimum size, or lower `num_cpus`.
        """
        if _places:
            return  # it is reserved
        sizes = [node["Resources"].get("CPU", 0.0) for node in self._ray.nodes() if node["Alive"]]
        places = sum(int(size / self._num_cpus + 1e-6) for size in sizes) if self._num_cpus else runners
        if places < runners:
            many, size = words
            fewer = f"use {many}<={places}, or {size}<=" if places else f"use {size}<="
            cpus = ", ".join(f"{size:g}" for size in sizes)
            raise ConfigError(
                f"{runners} {many} with {size}={self._num_cpus:g} each never fit on the cluster at "
                f"{self.cluster.address}: its {len(sizes)} node(s) have {cpus} CPUs; "
                f"{fewer}{math.floor(_share(sizes, runners) * 1000) / 1000:g}, or add nodes"
            )

    def start(self, cls: type, args: Sequence[Any], name: str, **how: Any) -> Any:
        """Starts an actor; Ray places it as soon as there is room. `how`: options of Ray's, for this one."""
        if cls not in self._actors:
            options: dict[str, Any] = {"num_cpus": self._num_cpus, "max_restarts": 0, "max_task_retries": 0}
            if _places:
                options["scheduling_strategy"] = _places[0]
            elif not self._num_cpus:  # else all of them on one node
                options["scheduling_strategy"] = "SPREAD"
            if self.cluster.origin != "started":  # of ours every process has one thread
                options["runtime_env"] = {"env_vars": ONE_THREAD}
            self._actors[cls] = self._connected().remote(**options)(watched(cls))
        self._connected()
        try:
            actor = self._actors[cls].options(**how) if how else self._actors[cls]
            runner = actor.remote(*args)
        except TypeError as error:
            raise _refused(f"{name}: {cls.__name__}()", error) from error
        key = runner._actor_id.hex()
        self._runners[key], self._names[key] = runner, name
        self._watches[key] = runner.watch_place.remote()
        return runner

    def put(self, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
        """Returns bytes, or one object in the store of this machine, from which each node copies it once.

        Ray copies the parts straight into the store, and a method receives views of it.
        """
        small = sum(x.nbytes for x in parts) <= INLINE_BYTES
        return b"".join([x.data for x in parts]) if small else self._connected().put(list(parts))

    def call(self, runner: Any, method: str, *args: Any) -> Any:
        """Sends a call; the answer is a reference of Ray's, which `ray.get` takes too."""
        self._connected()
        try:
            return getattr(runner, method).remote(*args)
        except TypeError as error:
            name = self._names.get(runner._actor_id.hex(), "a runner")
            raise _refused(f"{name}.{method}()", error) from error

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Returns the calls that have ended, in the order of `calls`."""
        found = self._connected().wait(list(calls), num_returns=1, timeout=timeout_s)[0] if calls else []
        if len(found) == len(calls) or not found:
            return found
        return self._connected().wait(list(calls), num_returns=len(calls), timeout=0)[0]

    def result(self, call: Any, timeout_s: float) -> Any:
        """Returns the result of a call; arrays in it cannot be written."""
        name = self._names.get(key := call.task_id().actor_id().hex())
        if name is not None and key not in self._runners:  # it may answer for a moment, before Ray has ended it
            raise RunnerError("exit", f"{name} was killed by its owner")
        try:
            return self._connected().get(call, timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise self._told(key, error, timeout_s) from None

    def look(self, runner: Any, stacks: bool = True) -> RunnerStatus:
        """Returns an actor's note and stacks, by a task on its node; nothing where it was not made, or is not there."""
        watch = self._watches.get(runner._actor_id.hex())
        if watch is None or not self._ray.is_initialized():
            return RunnerStatus()
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        try:
            node, *where = self._ray.get(watch, timeout=_WATCH_S)
            there = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            task = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(seen)
            return RunnerStatus(*self._ray.get(task.remote(*where, stacks), timeout=_LOOK_S))
        except (self._ray.exceptions.RayError, ValueError):
            return RunnerStatus()

    def kill(self, runner: Any) -> None:
        """Ends an actor; the processes that it started follow it."""
        if self._runners.pop(runner._actor_id.hex(), None) is not None and self._ray.is_initialized():
            self._ray.kill(runner, no_restart=True)

    def close(self) -> None:
        """Kills every runner, and leaves the cluster."""
        for runner in list(self._runners.values()):
            self.kill(runner)
        if not self._closed:
            self._closed = True
            self.cluster.close()

    def _connected(self) -> Any:
        """The module, or ConfigError once Ray was shut down: it would start or join another cluster by itself."""
        if not self._ray.is_initialized():
            raise ConfigError(
                "Ray was shut down while runners live on it, as by ray.shutdown() in the script; end their sampler or "
                "group first, then make another"
            )
        return self._ray

    def _told(self, key: str, error: Any, timeout_s: float) -> RunnerError:
        """Explains an error of Ray in a line, with the runner's traceback or the end of its standard error."""
        name, kinds = self._names.get(key, "a runner"), self._ray.exceptions
        lines = [line for line in _COLOUR.sub("", str(error)).strip().splitlines() if line.strip(" ^~")]
        text, last = "\n".join(lines), _raised(lines) or type(error).__name__
        if isinstance(error, kinds.GetTimeoutError):
            return RunnerError("timeout", f"{name}: no result within {timeout_s:.3g} s{self.crowded()}")
        if isinstance(error, kinds.RayTaskError) or getattr(error, "actor_init_failed", False):
            return RunnerError("exception", f"{name} raised {last}", text, last.partition(":")[0].rpartition(".")[2])
        if key in self._names and key not in self._runners:  # Ray may report the death before or after us
            return RunnerError("exit", f"{name} was killed by its owner", text)
        if isinstance(error, kinds.OutOfMemoryError) or "NODE_OUT_OF_MEMORY" in text:
            return RunnerError("oom", f"{name} was killed for want of memory: {lines[0]}", text)
        kind, why = _cause(type(error).__name__, text, last)
        if self.cluster.origin == "joined" and "never ran" in text:
            why += _NO_TOKEN
        return RunnerError(kind, f"{name} {why}", self._last_words(text))

    def crowded(self) -> str:
        """Says which resources are missing where a runner may be waiting for its place, else ""."""
        free = self._connected().available_resources().get("CPU", 0.0)
        if free >= self._num_cpus:
            return ""
        total = self._connected().cluster_resources().get("CPU", 0.0)
        return (
            f"; if it never answered, it may wait for its place: it needs {self._num_cpus:g} CPUs, {free:g} of the "
            f"cluster's {total:g} are free; stop other work there, use fewer runners or a smaller num_cpus"
        )

    def _last_words(self, text: str) -> str:
        """The end of a dead runner's standard error, if its cluster runs on this machine."""
        pid = re.search(r"^\s*pid: (\d+)$", text, re.MULTILINE)
        if pid is None or not self.cluster.folder:
            return text
        files = sorted(Path(self.cluster.folder).glob(f"ray/session_2*/logs/worker-*-{pid[1]}.err"))
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line[:1] != ":"]
        said = "\n".join(lines)[-_TAIL:].strip()  # Ray's own lines begin with colons
        return f"{text}\nThe end of its standard error:\n{said}" if said else text


def _refused(what: str, error: TypeError) -> ConfigError:
    """The error of arguments that cannot be pickled, with the reason that stands in Ray's page about it."""
    found = re.search(r"serialization: (.+)", _COLOUR.sub("", str(error)))
    begin, cure = cannot_travel(what)
    return ConfigError(f"{begin}: {found[1] if found else error}; {cure}")


def _share(sizes: list[float], runners: int) -> float:
    """Most CPUs for each runner with which this many fit on nodes of these sizes."""
    shares = [size / n for size in sizes for n in range(1, runners + 1) if size]
    return max((x for x in shares if sum(int(size / x + 1e-6) for size in sizes) >= runners), default=0.0)


def _raised(lines: list[str]) -> str:
    """The last part of a traceback: the error's name and text. Our errors may have another traceback in their text."""
    ours = [i for i, line in enumerate(lines) if line.startswith(_OURS)]
    inside = [i for i, line in enumerate(lines) if line[:1].isspace()]
    start = ours[-1] if ours else inside[-1] + 1 if inside else 0
    return "\n".join(lines[start:]).strip().removeprefix(_OURS)


def _cause(error: str, text: str, last: str) -> tuple[DeathKind, str]:
    """Kind and details of a death, parsed from Ray's message, their only source."""
    if error in _NODE or "node has died" in text or "node was terminated" in text:
        return "node", f"is gone with its node: {last.strip()}"
    code = re.search(r"exits with an exit code (-?\d+)", text)
    if code is not None:
        return "exit", f"ended with exit code {code[1]}"
    if "connection error code" in text:
        return "signal", "died: a signal killed it (as for want of memory, or in native code), or it called os._exit"
    return "exit", f"is gone: {last.strip()}"
