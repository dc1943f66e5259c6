"""The guard of a local cluster: a small process that ends all of it when the driver is gone, however it went.

Ray's own processes end by themselves when a driver is killed, runners within 2 seconds but its agents after a minute.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable

from penstock.processes.child import Child
from penstock.processes.termination import kill_marked

_ROUNDS = 5
"""Most looks at all processes: one that is found may have started another meanwhile."""


def start_guard(mark: str, folder: str) -> Callable[[], None]:
    """Starts the guard, and returns what ends it.

    Args:
        mark: borne by every process of the cluster.
        folder: the cluster's, removed when the driver is gone.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        words = {"mark": mark, "folder": folder}
        # Without a tether, as it outlives the driver, and in a session of its own, so that no signal to the driver's
        # group is for it.
        guard = Child("penstock.actors.guard", "the guard of a local cluster", None, {}, words, output=nowhere)
    finally:
        os.close(nowhere)

    def stop() -> None:
        guard.kill()
        guard.close()

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
    spawn_args = json.loads(sys.argv[1])
    driver, mark, folder = spawn_args["parent"], spawn_args["mark"], spawn_args["folder"]
    try:
        fd = os.pidfd_open(driver)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while os.getppid() == driver and not poll.poll(60_000):
            pass
    except ProcessLookupError:
        pass
    end_cluster(mark, folder)
