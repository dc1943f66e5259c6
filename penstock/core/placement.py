"""The CPUs of workers, action server and learner: a placement as data, and `pin`, which binds a process to them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.config import check_fields
from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """CPUs of the processes of one run; empty means anywhere. Two workers may share a CPU."""

    workers: tuple[tuple[int, ...], ...] = ()
    """CPU numbers of each worker, in their order."""
    server: tuple[int, ...] = ()
    """CPUs of the action server."""
    learner: tuple[int, ...] = ()
    """CPUs of the learner."""
    why: str = ""
    """The reasons for it, in a sentence."""

    def __post_init__(self) -> None:
        check_fields(self)
        named = {f"workers[{w}]": cpus for w, cpus in enumerate(self.workers)}
        for name, cpus in {**named, "server": self.server, "learner": self.learner}.items():
            if any(cpu < 0 for cpu in cpus):
                raise ConfigError(
                    f"Placement.{name}={tuple(cpus)} names CPU {min(cpus)}; expected numbers from 0, as the file "
                    "/sys/devices/system/cpu/online has them"
                )
            if len(set(cpus)) < len(cpus):
                twice = sorted({cpu for cpu in cpus if list(cpus).count(cpu) > 1})
                raise ConfigError(
                    f"Placement.{name}={tuple(cpus)} names CPU {', '.join(map(str, twice))} twice; name each once"
                )


def pin(cpus: Iterable[int], allowed: Iterable[int] | None = None) -> None:
    """Binds this process, and those it starts from now on, to CPUs; with none it changes nothing.

    Args:
        allowed: CPUs that may be named; None for those this process has now. A process whose parent has pinned itself
            inherits few: give it what the parent had before.

    Raises:
        ConfigError: a CPU that this process may not use, or a system that cannot bind processes.
    """
    wanted = set(cpus)
    if not wanted:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            "this system cannot bind a process to CPUs; placements need Linux, leave the affinity at None"
        )
    before = os.sched_getaffinity(0)
    usable = before if allowed is None else set(allowed)
    if wanted <= usable:
        try:
            os.sched_setaffinity(0, wanted)
        except (OSError, ValueError, OverflowError):  # the control group grants none of them, or they do not exist
            usable = usable - wanted
        else:
            granted = os.sched_getaffinity(0)  # the kernel silently drops CPUs that a control group does not grant
            if granted == wanted:
                return
            os.sched_setaffinity(0, before)
            usable = usable - (wanted - granted)
    raise ConfigError(
        f"CPU {_listed(wanted - usable)} is not for this process to use; expected some of {_listed(usable) or 'none'}. "
        "Change the placement, or leave it out"
    )


def _listed(cpus: set[int]) -> str:
    return ", ".join(map(str, sorted(cpus)))
