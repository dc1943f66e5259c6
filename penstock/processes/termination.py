"""Ends processes by force, with all that they have started.

A child has a process group of its own, and a mark in its environment variables, which all its children inherit. The
mark finds processes that left the group for a session of their own, and outlived the child.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal

MARK = "PENSTOCK_WORKER"
"""Environment variable of a child: its own mark after those of the children that it is a descendant of."""
_ROUNDS = 5
"""Most looks at all processes: one that is found may have started another meanwhile."""


def new_mark() -> str:
    """A mark that no other child has."""
    return f"{secrets.token_hex(8)}."


def kill_group(pid: int, pidfd: int = -1) -> None:
    """Kills a child, and its process group if it has not left it: processes that it has started.

    Args:
        pidfd: of the child, if there is one: another process may have reaped it, as when its fork server has died, and
            then its number may be anyone's. Then only the mark finds the processes it started.
    """
    with contextlib.suppress(ProcessLookupError):
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kills every process of this user that bears the mark, whichever group, session or parent it has by now."""
    for _ in range(_ROUNDS):
        found = [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != os.getpid()]
        if not [pid for pid in found if _kill_if_marked(pid, mark.encode())]:
            return


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """True if the process bears the mark and was sent the signal; it cannot be another one of the same number."""
    try:
        if not _bears(pid, mark):
            return False
        fd = os.pidfd_open(pid)
    except OSError:  # it has ended, or is another user's
        return False
    try:
        if not _bears(pid, mark):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _bears(pid: int, mark: bytes) -> bool:
    with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
        return mark in file.read()
