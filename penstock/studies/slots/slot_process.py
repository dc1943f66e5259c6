"""The process of a run in a slot: `penstock` with the arguments of its boot, on the CPUs of the slot."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys


def main() -> None:
    """Runs `penstock` as `python -P -m penstock` would, in the launcher's directory."""
    boot = json.loads(sys.argv[1])
    if boot["cpus"]:
        os.sched_setaffinity(0, boot["cpus"])
    os.chdir(boot["cwd"])
    # An actor is deaf to SIGINT, or blocks it; a run is not, though Ctrl-C in the launcher's terminal never reaches it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.argv[:] = ["penstock", *boot["command"]]
    runpy.run_module("penstock", run_name="__main__", alter_sys=True)
