"""The guard of a local cluster: a small process that ends all of it when the driver is gone, however it went.

Ray's own processes end by themselves when a driver is killed, runners within 2 seconds but its agents after a minute.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

from penstock.workers.killing import kill_marked
from penstock.workers.process import environment_of_children
from penstock.workers.python import module_command

_STOP_S = 10.0
_ROUNDS = 5
"""Most looks at all processes: one that is found may have started another meanwhile."""


def start_guard(mark: str, folder: str) -> Callable[[], None]:
    """Starts the guard, and returns what ends it.

    Args:
        mark: borne by every process of the cluster.
        folder: the cluster's, removed when the driver is gone.
    """
    guard = subprocess.Popen(
        module_command("penstock.distributed.guard", str(os.getpid()), mark, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the driver's group is not for it
        env=environment_of_children(),
    )

    def stop() -> None:
        guard.kill()
        guard.wait(timeout=_STOP_S)

    return stop


def end_cluster(mark: str, folder: str) -> None:
    """Kills every process of a cluster, and removes its folder."""
    kill_marked(mark)
    for _ in range(_ROUNDS):
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        if not [pid for pid in found if _kill_if_user_of(pid, folder)]:
            break
    shutil.rmtree(folder, ignore_errors=True)


def _kill_if_user_of(pid: int, folder: str) -> bool:
    """True if the process has a file of the folder open and was sent the signal.

    Ray's agents write their titles where the mark was.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # it has ended
        return False
    try:
        files = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        if not any(file.startswith(f"{folder}/") for file in files):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:  # it has ended, or is another user's
        return False
    finally:
        os.close(fd)


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
    end_cluster(mark, folder)


if __name__ == "__main__":
    main()
