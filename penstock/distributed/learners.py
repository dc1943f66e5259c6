"""RayRanks: the other ranks of a gang as actors of a Ray cluster, each in a bundle of one placement group.

Rank 0 stays in the process of the run, which holds its directory, display and signals.
"""

from __future__ import annotations

import importlib
import math
import os
import queue
import secrets
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import cloudpickle

from penstock.actors.backend import RunnerError
from penstock.actors.cluster import MIN_STORE_BYTES
from penstock.actors.on_ray import Ray, place_runners
from penstock.core.errors import ConfigError
from penstock.distributed.meeting import RayStore
from penstock.learn.comm import Comm, meet_by
from penstock.run.experiment import Experiment
from penstock.run.gang.gang import START_TIMEOUT_S, Member
from penstock.run.gang.local import without_display
from penstock.run.gang.process import pickled
from penstock.run.gang.rank import follow, report_of
from penstock.run.gang.ranks import MEET_TIMEOUT_S
from penstock.run.gang.shared import shares

_PLACE_TIMEOUT_S = 60.0
_ANSWER_S = 5.0
"""Longest wait for an actor to say where it is, or of a new one for its process."""
_LOOK_S = 60.0
_TAIL = 2_000
_LOOPBACK = "127.0.0.1"
_VISIBLE = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Leaves GPUs visible to an actor for which Ray counts none."""


class RayMember(Member):
    """A rank in an actor; it says that it is ready, and meets the others when rank 0 says where."""

    def __init__(self, rank: int, size: int, meeting: str, timeout_s: float) -> None:
        super().__init__(rank, size, self._met, lambda number: None, timeout_s, own_gpus=False)
        self._meeting = meeting
        self.ready = threading.Event()
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()

    @property
    def entered(self) -> int:
        """The number of its last collective."""
        return self._entered

    def comm(self, device: str) -> Comm:
        self.ready.set()
        return super().comm(device)

    def orders(self) -> Iterator[dict[str, Any]]:
        """Yields the orders of rank 0; the actor is killed when there are no more."""
        while True:
            try:
                yield self.inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                continue

    def _met(self, backend: str) -> Any:
        order = next(self.orders())
        if order["do"] != "meet":
            raise SystemExit(f"rank 0 said {order['do']}")
        host = _LOOPBACK if order["loopback"] else _own_address()
        return meet_by(RayStore(self._meeting), self.rank, self.size, backend, MEET_TIMEOUT_S, host, "Ray")


class RankActor:
    """The actor of one rank: `serve` trains in one of its threads while others take orders and answer questions."""

    def __init__(self, rank: int, size: int, meeting: str, timeout_s: float, payload: bytes, place: Any) -> None:
        self._member, self._payload = RayMember(rank, size, meeting, timeout_s), payload
        self._thread, self._next, self._early = 0, 0, dict[int, dict[str, Any]]()
        self._lock = threading.Lock()
        place_runners(place)

    def about(self) -> tuple[int, str]:
        """Its process and the address of its machine."""
        return os.getpid(), _own_address()

    def serve(self) -> dict[str, str] | None:
        """Trains until rank 0 says stop; returns the report of an error."""
        self._thread = threading.get_ident()
        try:
            exp, init = cloudpickle.loads(self._payload)
            follow(self._member, exp, init)
        except BaseException as error:
            return report_of(error)
        return None

    def ready(self, timeout_s: float) -> bool:
        """Waits so long until the rank has built its share of the run; returns whether it has."""
        return self._member.ready.wait(timeout_s)

    def order(self, number: int, order: dict[str, Any]) -> None:
        """Takes order `number`; those of several threads may come in any order, and are carried out in theirs."""
        with self._lock:
            self._early[number] = order
            while self._next in self._early:
                self._member.inbox.put(self._early.pop(self._next))
                self._next += 1

    def here(self) -> tuple[int, str]:
        """The number of its last collective, and the stack of the thread that trains."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        return self._member.entered, "" if frame is None else "".join(traceback.format_stack(frame))[-_TAIL:]


class RayRank:
    """Rank 0's handle of an actor."""

    def __init__(self, rank: int, backend: Ray, actor: Any) -> None:
        self.rank, self.said_ready, self.actor = rank, False, actor
        self.report: dict[str, Any] | None = None
        self._backend, self._where, self._orders, self._ended = backend, "", 0, False
        self.about = backend.call(actor, "about")
        self.serving = backend.call(actor, "serve")
        self.ready = backend.call(actor, "ready", START_TIMEOUT_S)

    @property
    def label(self) -> str:
        """Its number and, once known, its process and machine."""
        if not self._where:
            found = self._asked(self.about)
            self._where = "" if found is None else f" (pid {found[0]} at {found[1]})"
        return f"rank {self.rank}{self._where}"

    @property
    def exited(self) -> bool:
        """True if it has ended, and all that it reported was taken in."""
        if self._ended:
            return True
        if not self.said_ready and self._backend.wait([self.ready], 0.0):
            self.said_ready = bool(self._asked(self.ready))
        if not self._backend.wait([self.serving], 0.0):
            return False
        self.report = self._asked(self.serving)
        return True

    def order(self, order: dict[str, Any]) -> None:
        """Sends an order; one that has ended gets none."""
        if not self._ended:
            self._backend.call(self.actor, "order", self._orders, order)
            self._orders += 1

    def is_behind(self, number: int) -> bool:
        """True if it has not come to the collective of this number, or does not answer."""
        found = self._here()
        return found is None or found[0] < number

    def stacks(self) -> str:
        """Where it is now, from a thread of its own."""
        found = self._here()
        return found[1] if found and found[1] else "it does not say where: it is stopped, or in native code"

    def ending(self) -> str:
        """How it ended, with the end of its output where it is of this machine."""
        try:
            self._backend.result(self.serving, _ANSWER_S)
            return f"{self.label} has ended"
        except RunnerError as error:
            said = error.trace[-_TAIL:]
            return f"{error}{self._where}" + (f"; what is known of it:\n{said}" if said else "")

    def end(self, grace_s: float) -> None:
        """Waits so long for its end, then kills it. A second call does nothing."""
        if not self._ended:
            self._backend.wait([self.serving], grace_s)
            self._ended = True
            self._backend.kill(self.actor)

    def _here(self) -> tuple[int, str] | None:
        return self._asked(self._backend.call(self.actor, "here"))

    def _asked(self, call: Any) -> Any:
        """The answer of a call, None if there is none."""
        try:
            return self._backend.result(call, _ANSWER_S)
        except RunnerError:
            return None


class RayRanks:
    """Actors of ranks 1 and up, which end with this process, however that ends.

    Raises:
        ConfigError: the cluster cannot be reached, or has no room for the learners and their runners.
    """

    def __init__(self, exp: Experiment, init: dict[str, Any] | None) -> None:
        run, size = exp.run, exp.run.learners
        payload = pickled((without_display(exp), init))
        address, runners, store_mb = _shared(exp)
        own = [0, *[run.learner_threads] * (size - 1)]
        bundles = [float(a) + b for a, b in zip(own, runners)]
        cpus = max(os.cpu_count() or 1, math.ceil(sum(bundles)))
        self._size, self.handles = size, list[RayRank]()
        self._backend = Ray(address, float(own[1]), cpus, max(store_mb << 20, MIN_STORE_BYTES))
        self._meeting = secrets.token_hex(8)
        self._group: Any = None
        self._finalizer = weakref.finalize(self, self._backend.close)
        try:
            places = self._placed(bundles)
            print(f"penstock: {self._backend.cluster}; learners {size}", file=sys.stderr)
            place_runners(places[0] if runners[0] else None)
            for rank in range(1, size):
                args = (rank, size, self._meeting, run.learner_timeout_s, payload, places[rank] if runners[0] else None)
                how = {"scheduling_strategy": places[rank], "max_concurrency": 4}
                if run.device.startswith("cuda"):
                    how["runtime_env"] = {"env_vars": _VISIBLE}
                actor = self._backend.start(RankActor, args, f"rank {rank}", **how)
                self.handles.append(RayRank(rank, self._backend, actor))
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_s: float) -> None:
        """Returns once one that is not ready has said something or ended."""
        waiting = [call for rank in self.handles if not rank.said_ready for call in (rank.ready, rank.serving)]
        self._backend.wait(waiting, min(timeout_s, _LOOK_S))

    def meet(self, backend: str) -> Any:
        """The process group of ranks that meet by the control service: on loopback if all are of this machine."""
        own = _own_address()
        loopback = all(self._backend.result(rank.about, _ANSWER_S)[1] == own for rank in self.handles)
        for rank in self.handles:
            rank.order({"do": "meet", "loopback": loopback})
        store = RayStore(self._meeting)
        try:
            host = _LOOPBACK if loopback else own
            return meet_by(store, 0, self._size, backend, MEET_TIMEOUT_S, host, "Ray")
        finally:
            store.forget()

    def entering(self, number: int) -> None:
        """Does nothing: actors are asked where they are."""

    def close(self) -> None:
        """Kills what is left, gives its places back, and leaves the cluster."""
        place_runners(None)
        if self._group is not None and self._backend.cluster.ray.is_initialized():
            _util().remove_placement_group(self._group)
        self._group = None
        self._finalizer()

    def _placed(self, bundles: list[float]) -> list[Any]:
        """Each rank's place: its bundle, once Ray has reserved all of them."""
        indices = [i for i, cpus in enumerate(bundles) if cpus]
        wanted = [{"CPU": bundles[i]} for i in indices]
        ray = self._backend.cluster.ray
        sizes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        never = max(bundles) > max(sizes) or sum(bundles) > sum(sizes)
        if not never:
            self._group = _util().placement_group(wanted, strategy="PACK")
        if never or not self._group.wait(_PLACE_TIMEOUT_S):
            places, nodes = (", ".join(f"{x:g}" for x in y) for y in ([bundles[i] for i in indices], sizes))
            free = ray.available_resources().get("CPU", 0.0)
            found = "can never have" if never else f"did not get within {_PLACE_TIMEOUT_S:g} s"
            raise ConfigError(
                f"run.learners={self._size} needs places of {places} CPUs, which it {found} on the cluster at "
                f"{self._backend.cluster.address}: its nodes have {nodes}, of which {free:g} are free; add nodes, stop "
                "other work there, or use fewer learners, learner_threads, runners or a smaller sampler.num_cpus"
            )
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        places = {i: strategies.PlacementGroupSchedulingStrategy(self._group, k) for k, i in enumerate(indices)}
        return [places.get(i) for i in range(len(bundles))]


def _shared(exp: Experiment) -> tuple[str, list[float], int]:
    """The cluster that a gang and its runners share: its address, the CPUs of each rank's runners, MB of its store."""
    given, settings = exp.run.learner_address, exp.sampler_settings
    inner: Any = settings
    if not hasattr(inner, "runners") or inner.backend != "ray":
        return given or "local", [0.0] * exp.run.learners, 0
    if given and given != inner.address:
        raise ConfigError(
            f"run.learner_address={given!r} with sampler.address={inner.address!r}; learners and their runners share a "
            "cluster: leave the first out"
        )
    own: list[Any] = shares(settings, exp.run.learners)
    store_mb = inner.store_mb(exp.env_config, exp.run.seed)
    return inner.address, [x.runners * inner.num_cpus for x in own], store_mb


def _own_address() -> str:
    return _util().get_node_ip_address()


def _util() -> Any:
    return importlib.import_module("ray.util")
