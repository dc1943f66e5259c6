"""Entry of every child: ties it to its parent, lets it say where it hangs, then runs the module that it is started for.

`python -P -m penstock.processes.tie MODULE SPAWN_ARGS`, a `Child`'s as JSON. Nothing slow comes before the
tie: a process whose parent dies while it still imports or unpickles ends as well.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import json
import os
import select
import signal
import sys
from typing import Any

_F_SETSIG = 10


def settle(spawn_args: dict[str, Any]) -> None:
    """Ties this process to its parent; from now on SIGUSR2 and a crash write its stacks where the parent reads them."""
    if "alive" in spawn_args:
        die_with_the_parent(spawn_args["alive"], spawn_args["parent"])
    faulthandler.enable(spawn_args["crash"], all_threads=True)
    faulthandler.register(signal.SIGUSR2, spawn_args["crash"], all_threads=True)


def die_with_the_parent(alive: int, parent: int) -> None:
    """Has the kernel kill this process and its group as soon as nobody holds the other end of the pipe `alive`.

    The pipe is opened anew, once for the group and once for a process that leaves it: signal settings belong to the
    open file, and a shared one would serve one child only.
    """
    opened = [os.open(f"/proc/self/fd/{alive}", os.O_RDONLY | os.O_NONBLOCK) for _ in range(2)]
    os.close(alive)
    for fd, owner in zip(opened, (-os.getpgid(0), os.getpid())):
        fcntl.fcntl(fd, fcntl.F_SETOWN, owner)
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(opened[0], 0)  # a hang-up is always reported
    if poll.poll(0) or os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Settles this process, and runs the module that the command line names."""
    module, spawn_args = sys.argv[1], json.loads(sys.argv[2])
    settle(spawn_args)
    sys.argv[:] = [module, sys.argv[2]]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
