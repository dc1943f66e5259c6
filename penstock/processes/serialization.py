"""Objects that travel from a process to one that it has started: pickled one way, with the path that imports them."""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from penstock.core import VERSION
from penstock.core.errors import ConfigError
from penstock.native.library import VARIABLE, kernel

CURE = "make files, locks, sockets and the like inside the environment's factory"


def ship(message: Any, what: str, cure: str = CURE, *, path: bool = True) -> bytes:
    """The message as bytes for `unship`.

    Args:
        what: the message in words, and where it goes. path: the receiver takes over this process's import path.

    Raises:
        ConfigError: it cannot be pickled; names the part and the cure.
    """
    import cloudpickle  # not needed by those who only start without a message

    try:
        data = cloudpickle.dumps(message)
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}; {cure}") from error
    entries = json.dumps(sys.path).encode() if path else b""
    return len(entries).to_bytes(8, "little") + entries + data


def unship(data: Any, *, elsewhere: bool = False) -> Any:
    """The object that `ship` made these bytes of.

    Args:
        data: bytes, or anything that supports the buffer protocol.
        elsewhere: it may come from another machine: entries of its path that exist here are added to this one's.
    """
    import cloudpickle

    size = int.from_bytes(data[:8], "little")
    if size:
        entries = json.loads(bytes(data[8 : 8 + size]))
        if elsewhere:
            sys.path += [entry for entry in entries if entry not in sys.path and os.path.exists(entry)]
        else:
            sys.path[:] = entries
    return cloudpickle.loads(memoryview(data)[8 + size :])


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of Python, penstock, its kernel and these packages, which both ends of a connection must share."""
    known = {name: str(importlib.import_module(name).__version__) for name in packages}
    own = {"penstock": VERSION, "kernel": kernel()}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **own, **known}


def require_same_versions(name: str, host: str, theirs: dict[str, str], packages: Sequence[str]) -> None:
    """Raises ConfigError if a process has other versions than this one."""
    own = versions(packages)
    odd = [f"{x} {theirs.get(x)} (here {own[x]})" for x in own if x != "kernel" and theirs.get(x) != own[x]]
    if odd:
        raise ConfigError(
            f"{name} on {host} has {', '.join(odd)}; install the same versions on every node, e.g. with the same "
            "constraints.txt or image"
        )
    if "kernel" in own and own["kernel"] != theirs.get("kernel"):
        raise ConfigError(
            f"{name} on {host} computes by kernel {theirs.get('kernel')!r}, this process by {own['kernel']!r}, and "
            f"their last bits differ; set {VARIABLE} alike everywhere, and install penstock there with a C compiler"
        )
