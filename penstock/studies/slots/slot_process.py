"""The process of a run in a slot: `penstock` with its arguments, on the CPUs of the slot."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys


def main() -> None:
    """Runs `penstock` as `python -P -m penstock` would, in the launcher's directory."""
    spawn_args = json.loads(sys.argv[1])
    if spawn_args["cpus"]:
        os.sched_setaffinity(0, spawn_args["cpus"])
    os.chdir(spawn_args["cwd"])
    # An actor is deaf to SIGINT, or blocks it; a run is not, though Ctrl-C in the launcher's terminal never reaches it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.argv[:] = ["penstock", *spawn_args["command"]]
    runpy.run_module("penstock", run_name="__main__", alter_sys=True)
