"""Death: how a process ended, in the same words for every kind of process."""

from __future__ import annotations

import signal
from typing import Literal, NamedTuple

from penstock.core.machine import oom_kills


class Death(NamedTuple):
    """How a process ended."""

    kind: Literal["exit", "signal", "oom"]
    text: str
    """In words, e.g. `was killed by signal 9 (SIGKILL)`."""
    said: str = ""
    """The stacks of its fault handler and the end of its output, where there are any."""


def death_of(status: int, oom_before: int, said: str = "") -> Death:
    """The death that an exit status tells of.

    Args:
        status: as `Popen.returncode`. oom_before: `oom_kills()` when the process started.
    """
    if status >= 0:
        return Death("exit", f"ended with exit code {status}", said)
    number = -status
    name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else "?"
    if number == signal.SIGKILL and oom_kills() > oom_before:
        text = "was killed by signal 9 (SIGKILL), likely for want of memory: the kernel reports such a kill"
        return Death("oom", text, said)
    return Death("signal", f"was killed by signal {number} ({name})", said)
