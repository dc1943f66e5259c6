"""`start_ray`: this process as the driver of a Ray cluster, one of its own that nobody else can reach or another."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

from penstock.actors.addresses import (
    ClusterAddress,
    find_cluster,
    listeners_of,
    require_loopback,
)
from penstock.actors.guard import end_cluster, start_guard
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.processes.python import ONE_THREAD
from penstock.processes.termination import MARK, new_mark

MIN_STORE_BYTES = 80 << 20
"""Smallest object store that Ray accepts, with some to spare."""
_INLINE_BYTES = 512 << 10
"""Results up to this travel with their message: 200 KB take 1.0 ms so and 2.5 by the store, 1 MB 4.7 and 2.7."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGALRM] if hasattr(signal, "SIGALRM") else []))

Origin = Literal["started", "joined", "found"]


class Cluster:
    """Ray, connected.

    Args:
        ray: the module.
        origin: `started` here, `joined` here, or `found` initialised by the user's script, which is left as it is.
        listeners: addresses that listen by the connection: of all processes of a cluster that was started here, of this
            process where it joined one.
        folder: where the processes of a started cluster write, private to this user; "" of others.
    """

    def __init__(self, ray: Any, origin: Origin, listeners: tuple[str, ...], folder: str) -> None:
        self.ray, self.origin, self.listeners, self.folder = ray, origin, listeners, folder
        self.address: str = ray.get_runtime_context().gcs_address
        self.holders = 1
        """Callers of `start_ray` that have not closed it."""
        self.undo = contextlib.ExitStack()
        """Callbacks of `close`, the last entered first."""

    def __str__(self) -> str:
        cpus = self.ray.cluster_resources().get("CPU", 0.0)
        nodes = sum(1 for node in self.ray.nodes() if node["Alive"])
        listens = f"; listening: {', '.join(self.listeners)}" if self.listeners else ""
        return f"Ray {self.ray.__version__} at {self.address}, {self.origin}: {cpus:g} CPUs, nodes {nodes}{listens}"

    def close(self) -> None:
        """Leaves the cluster, and ends it with all its processes if it was started here, once nobody holds it."""
        self.holders -= 1
        if self.holders == 0 and self.origin != "found":
            self.undo.close()


_current: list[Cluster] = []
"""The cluster that this process started or joined here; Ray has one connection a process."""


def start_ray(
    address: str = "local",
    *,
    num_cpus: int | None = None,
    store_bytes: int = MIN_STORE_BYTES,
    timeout_s: float = 20.0,
) -> Cluster:
    """Connects this process to Ray, and returns the connection; `close` it.

    Where the user's script has initialised Ray, that is used; where this function has, so is that, if the address is
    the same. Signal handlers stay the caller's.

    Args:
        address: `local` starts a cluster on this machine, which ends with this process and whose processes listen on
            the loopback interface, want a token that is never written to a file, and report nothing to anyone; neither
            RAY_ADDRESS nor a file in the temporary directory changes that. `auto` joins what RAY_ADDRESS names, else
            the one cluster of this user on this machine. `HOST:PORT` joins that: its nodes run code as you.
        num_cpus: of a local cluster, a number for its book-keeping; None for those of this machine.
        store_bytes: size of a local cluster's object store.
        timeout_s: longest wait for an answer of a cluster to join.

    Raises:
        MissingExtraError: Ray is not installed. ConfigError: there is no such cluster, it is another user's, it wants
            another token, or Ray does not start.
    """
    seen = "ray" in sys.modules
    with _environment({} if seen else _settings(address)):  # Ray reads much of it when it is imported
        ray = _import_ray()
    if ray.is_initialized():
        if _current:
            _require_same(_current[0], address, timeout_s)
            _current[0].holders += 1
            return _current[0]
        return Cluster(ray, "found", (), "")
    if _current:  # the script has ended our cluster
        _current.pop().undo.close()
    if address == "local":
        cluster = _start(ray, num_cpus, max(store_bytes, MIN_STORE_BYTES))
    else:
        cluster = _join(ray, find_cluster(address, timeout_s))
    _current.append(cluster)
    cluster.undo.callback(_current.clear)
    return cluster


def _require_same(cluster: Cluster, address: str, timeout_s: float) -> None:
    """Raises ConfigError if the address is of another cluster than this one."""
    if cluster.origin == "started":
        same = address == "local"
    else:
        same = address != "local" and find_cluster(address, timeout_s).address == cluster.address
    if not same:
        raise ConfigError(
            f"address={address!r} while this process uses the cluster at {cluster.address}, {cluster.origin} for other "
            "runners; Ray has one connection a process: end those first, or give all of them the same address"
        )


def _import_ray() -> Any:
    """The module, or MissingExtraError: the one place that imports it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error


def _settings(address: str) -> dict[str, str]:
    common = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    if address != "local":
        return common
    return common | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else all processes listen on all interfaces, despite the address
        "RAY_worker_niceness": "0",
        "RAY_task_events_report_interval_ms": "0",  # a record of every call, which only a dashboard reads: 3 KB each
        "RAY_max_direct_call_object_size": str(_INLINE_BYTES),
        **ONE_THREAD,
    }


def _start(ray: Any, num_cpus: int | None, store_bytes: int) -> Cluster:
    mark = new_mark()
    # Ray opens its own folder to all users: it lies in one that is closed to them.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 24 else "/tmp"  # a socket's path has 107 characters
    folder = tempfile.mkdtemp(prefix="penstock-ray-", dir=base)
    marks = {MARK: os.environ.get(MARK, "") + mark}
    before = set(listeners_of(os.getpid()))
    with contextlib.ExitStack() as undo:
        undo.callback(start_guard(mark, folder))
        undo.callback(end_cluster, mark, folder)
        undo.enter_context(_environment(_settings("local")))
        undo.enter_context(_refreshed(ray))
        undo.callback(ray.shutdown)
        with _environment(marks), _loopback(ray, True), _kept_manners():
            try:
                ray.init(
                    "local",
                    num_cpus=num_cpus,
                    object_store_memory=store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    _temp_dir=str(Path(folder) / "ray"),
                )
            except (Exception, SystemExit) as error:
                raise ConfigError(f"Ray does not start here: {type(error).__name__}: {error}") from error
        listeners = tuple(x for x in listeners_of(os.getpid()) if x not in before)
        require_loopback(listeners)
        cluster = Cluster(ray, "started", listeners, folder)
        cluster.undo = undo.pop_all()
        return cluster


def _join(ray: Any, found: ClusterAddress) -> Cluster:
    before = set(listeners_of(os.getpid(), children=False))
    with contextlib.ExitStack() as undo:
        undo.enter_context(_environment(_settings(found.address)))
        undo.enter_context(_refreshed(ray))
        undo.callback(ray.shutdown)
        with _loopback(ray, found.loopback), _kept_manners():
            try:
                ray.init(found.address, log_to_driver=False, logging_level="ERROR")
            except ray.exceptions.AuthenticationError as error:
                raise ConfigError(
                    f"the cluster at {found.address} does not let this process in: {str(error).strip()}. Start every "
                    "node with the token of this user (`ray get-auth-token --generate`, then RAY_AUTH_MODE=token ray "
                    "start ...), and copy it here; or say RAY_AUTH_MODE=disabled, where everyone who reaches a port "
                    "of the cluster may run code as you"
                ) from error
            except (Exception, SystemExit) as error:
                raise ConfigError(
                    f"the cluster at {found.address} cannot be joined: {type(error).__name__}: {error}; this process "
                    f"has Ray {ray.__version__} and Python {sys.version.split()[0]}, which must be the nodes' too, and "
                    "so must its token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"
                ) from error
        listeners = tuple(x for x in listeners_of(os.getpid(), children=False) if x not in before)
        cluster = Cluster(ray, "joined", listeners, "")
        cluster.undo = undo.pop_all()
        return cluster


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Generator[None]:
    """Sets environment variables, and restores their old values."""
    kept = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _refreshed(ray: Any) -> Generator[None]:
    """Makes Ray read its environment again now, and once more at the end: it caches what it read when imported."""
    _refresh(ray)
    try:
        yield
    finally:
        _refresh(ray)


def _refresh(ray: Any) -> None:
    try:
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
    except AttributeError as error:
        raise ConfigError(f"Ray {ray.__version__} is not one that penstock knows; it was tested with 2.60") from error


@contextlib.contextmanager
def _loopback(ray: Any, wanted: bool) -> Generator[None]:
    """Has this process take the loopback address as its own, or not: Ray reads the variable when it is imported."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    kept, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, not wanted
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept


@contextlib.contextmanager
def _kept_manners() -> Generator[None]:
    """Restores the handlers of signals and of `breakpoint()`, which Ray replaces and never gives back."""
    with _environment({"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT", "")}), _kept_signals():
        yield


@contextlib.contextmanager
def _kept_signals() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers, Ray too
        return
    kept = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:  # None: not of Python's, which cannot set it
                signal.signal(number, handler)
