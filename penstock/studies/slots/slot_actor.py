"""SlotActor: one slot of a launcher, in an actor on the machine where its runs execute."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.machine import read_machine
from penstock.processes.child import Child
from penstock.processes.python import ONE_THREAD, child_environment
from penstock.processes.tether import Tether

_MODULE = "penstock.studies.slots.slot_process"
_RAYS = ("RAY_", "CUDA_VISIBLE_DEVICES")
"""Prefixes of environment variables that Ray sets for its actors, but not for their child processes."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SlotActor:
    """Executes one run at a time, which dies with this process; no method but `end` waits for it.

    Args:
        name: of the slot, in messages and in the run's command line.
    """

    def __init__(self, name: str) -> None:
        self._name, self._log = name, ""
        self._runs: list[Child] = []
        """The run, if there is one."""
        self._code: int | None = None
        self._tether = Tether(self, _end, self._runs)

    def node(self) -> tuple[str, dict[str, Any]]:
        """Returns what tells its machine from others, and the part of it that slots may use, as plain data."""
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        return f"{os.uname().nodename} {boot_id}", asdict(read_machine())

    def start(
        self, command: Sequence[str], cwd: str, log: str, variables: Mapping[str, str], cpus: Sequence[int]
    ) -> None:
        """Starts a run, whose output is added to a log.

        Args:
            command: arguments of `penstock`. variables: of its environment, besides those of this process.

        Raises:
            ConfigError: the launcher's directories are not there on this node, or the system does not start it.
        """
        for path in (cwd, str(Path(log).parent)):
            if not os.path.isdir(path):
                raise ConfigError(
                    f"{path} of the launcher is not there on node {os.uname().nodename}; a search on several machines "
                    "needs a file system that all of them see: choose a --dir on it, and begin there"
                )
        words = {"command": list(command), "cwd": cwd, "cpus": list(cpus)}
        with open(log, "ab", buffering=0) as out:
            run = Child(
                _MODULE,
                self._name,
                self._tether,
                {},
                words,
                environment=_environment(variables),
                output=out.fileno(),
                cure="use fewer slots",
            )
        self._runs.append(run)
        self._log, self._code = log, None

    def code(self) -> int | None:
        """Returns the exit code of the run, -N of one that signal N ended; None while it runs."""
        if self._runs and self._runs[0].exited:
            run = self._runs[0]
            said = run.crash()
            self._code = run.kill()  # it has ended: this ends processes that it may have left behind
            _end(self._runs)
            if said:
                with open(self._log, "a") as out:
                    out.write(f"{said}\n")
        return self._code

    def send(self, number: int) -> None:
        """Sends a signal to the run, if it has not ended."""
        for run in self._runs:
            os.kill(run.pid, number)

    def end(self) -> None:
        """Kills the run and all that it has started, and waits until it is gone."""
        _end(self._runs)

    def close(self) -> None:
        """Ends the run."""
        self._tether.close()


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(_RAYS) and name not in ONE_THREAD}
    return child_environment({**own, **variables}) | {"PYTHONUNBUFFERED": "1"}


def _end(runs: list[Child]) -> None:
    while runs:
        run = runs.pop()
        run.kill()
        run.close()
