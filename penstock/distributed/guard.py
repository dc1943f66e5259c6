"""The guard of a local cluster: a small process that ends all of it when the driver is gone, however it went.

Ray's own processes end by themselves when a driver is killed, runners within 2 seconds but its agents after a minute.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable

from penstock.workers.killing import kill_marked
from penstock.workers.process import environment_of_children

_STOP_S = 10.0


def start_guard(mark: str, folder: str) -> Callable[[], None]:
    """Starts the guard, and returns what ends it.

    Args:
        mark: borne by every process of the cluster.
        folder: the cluster's, removed when the driver is gone.
    """
    guard = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.distributed.guard", str(os.getpid()), mark, folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the driver's group is not for it
        env=environment_of_children(),
    )

    def stop() -> None:
        guard.kill()
        guard.wait(timeout=_STOP_S)

    return stop


def main() -> None:
    """Waits for the end of the driver, then ends its cluster."""
    driver, mark, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    try:
        fd = os.pidfd_open(driver)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while os.getppid() == driver and not poll.poll(60_000):
            pass
    except ProcessLookupError:
        pass
    kill_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
