"""Limits of the system that stand in the way of child processes: the error of each says how to raise it."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

from penstock.core.errors import ConfigError

resource: Any = importlib.import_module("resource") if sys.platform != "win32" else None
"""Windows has no such module, and no child processes of ours."""

_SHARED = 32
"""Descriptors that all children share, with some to spare."""
_HINTS = {
    errno.EAGAIN: ": this user may have no more processes and threads (ulimit -u, or the container's limit of pids); "
    "raise that",
    errno.EMFILE: ": this process may open no more files (ulimit -n); raise that",
    errno.ENFILE: ": the system may open no more files (fs.file-max)",
    errno.ENOMEM: ": there is too little memory",
}


def why_no_children() -> str:
    """The reason why child processes of ours cannot work here; "" where they can."""
    can = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and hasattr(os, "eventfd")
    return "" if can else f"worker processes need Linux 5.3 or newer; this is {sys.platform}"


def require_linux(cure: str = "use SerialSampler, which works everywhere") -> None:
    """Raises ConfigError where child processes of ours cannot work."""
    if why := why_no_children():
        raise ConfigError(f"{why}: {cure}")


def require_room(children: int, setting: str, each: int, fewest: str) -> None:
    """Raises ConfigError if this process may not open the descriptors that this many children need.

    Args:
        setting: that sets their number. each: descriptors of one. fewest: the advice if not even one fits.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(os.listdir("/proc/self/fd"))
    needed = each * children + _SHARED
    if limit == resource.RLIM_INFINITY or is_open + needed <= limit:
        return
    fits = (limit - is_open - _SHARED) // each
    fewer = f"use {setting}<={fits}" if fits > 0 else fewest
    at_most = "" if hard == resource.RLIM_INFINITY else f"; {hard} is the most that it may set"
    raise ConfigError(
        f"{setting}={children} need {needed} file descriptors beside the {is_open} that are open, and this process may "
        f"have {limit} (ulimit -n); raise that to {is_open + needed} or more (ulimit -n 4096{at_most}), or {fewer}"
    )


def refusal(name: str, error: OSError, cure: str) -> ConfigError:
    """The error of a child that the system does not start, with the limit that is in the way."""
    return ConfigError(f"{name} cannot be started: {error.strerror or error}{_HINTS.get(error.errno or 0, '')}; {cure}")
