"""`make_backend`: a backend by its name."""

from __future__ import annotations

import math
import os
import sys
from typing import Literal

from penstock.actors.backend import ROOM, Backend
from penstock.actors.cluster import MIN_STORE_BYTES
from penstock.core.errors import ConfigError, nearest

BackendName = Literal["in-process", "processes", "ray"]


def make_backend(
    name: BackendName,
    runners: int,
    *,
    address: str = "local",
    num_cpus: float = 1.0,
    object_store_mb: int = 0,
    words: tuple[str, str] = ROOM,
) -> Backend:
    """The backend of this name, with room for this many runners.

    Args:
        address: of a Ray cluster, see `start_ray`; a local one counts as many CPUs as the runners need.
        num_cpus: that each runner takes of it. object_store_mb: of a local cluster; 0 for Ray's least.
        words: names of the settings that say how many runners, and how large, for messages.

    Raises:
        ConfigError: there is no such backend, or the cluster cannot be reached or is too small.
    """
    if name == "in-process":
        from penstock.actors.in_process import InProcess  # each needs its own imports only

        return InProcess()
    if name == "processes":
        from penstock.actors.processes import Processes

        return _with_room(Processes(), runners, words)
    if name == "ray":
        from penstock.actors.on_ray import Ray

        needed = max(os.cpu_count() or 1, math.ceil(runners * num_cpus))
        backend = Ray(address, num_cpus, needed, max(object_store_mb << 20, MIN_STORE_BYTES))
        _with_room(backend, runners, words)
        print(f"penstock: {backend.cluster}", file=sys.stderr)
        return backend
    raise ConfigError(f"unknown backend {name!r}; {nearest(name, ('in-process', 'processes', 'ray'))}")


def _with_room(backend: Backend, runners: int, words: tuple[str, str]) -> Backend:
    try:
        backend.require_room(runners, words)
    except ConfigError:
        backend.close()
        raise
    return backend
