"""Executes a command that dies with the launcher: `child.py LAUNCHER_PID CPUS COMMAND...`, CPUs as 0,1 or empty.

Run by path without site packages, so that it takes milliseconds; its settings outlast the exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, cpus: str, command: list[str]) -> None:
    """Sets parent-death signal and CPUs, then replaces this process by the command; never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cpus:
            os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    if os.getppid() != launcher:  # it died before the kernel was told to watch it
        raise SystemExit(128 + signal.SIGKILL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
