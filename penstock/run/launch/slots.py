"""Slots: where runs execute, one at a time in each; `LocalSlots` are processes of this machine, pinned to CPUs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from penstock.core.config import import_object
from penstock.core.errors import ConfigError, nearest
from penstock.core.machine import Machine, read_machine
from penstock.processes.python import module_command, script_command
from penstock.run.affinity import slices

BACKENDS: dict[str, str] = {
    "processes": "penstock.run.launch.slots:local_slots",
    "ray": "penstock.distributed.trial_slots:RaySlots",
}
"""What makes slots by name: called with their number, the cluster's address and the CPUs that it counts for each."""
_CHILD = str(Path(__file__).with_name("child.py"))
_END_S = 30.0


class Execution(Protocol):
    """A run that was started in a slot."""

    def code(self) -> int | None:
        """The exit code, -N of one that signal N ended; None while it runs."""
        ...

    def terminate(self) -> None:
        """Has it save and end."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...

    def end(self) -> None:
        """Kills it, and waits until it is gone."""
        ...


class Slots(Protocol):
    """Slots by number."""

    def __len__(self) -> int: ...
    def settle(self, run_dir: Path) -> None:
        """Returns once nothing that an earlier launcher left uses a run directory."""
        ...

    def start(self, k: int, command: Sequence[str], log: Path, extra: Mapping[str, str]) -> Execution:
        """Starts `python -P -m penstock COMMAND` in slot k, its output added to a log.

        Args:
            extra: environment variables besides the launcher's.
        """
        ...

    def close(self) -> None:
        """Gives the slots back."""
        ...


def make_slots(backend: str, count: int, address: str = "local", cpus: float = 1.0) -> Slots:
    """So many slots, `processes` of this machine or on a cluster of `ray`. Raises ConfigError if there is no room."""
    check_backend(backend, address, cpus)
    return import_object(BACKENDS[backend])(count, address, cpus)


def check_backend(backend: str, address: str, cpus: float) -> None:
    """Raises ConfigError for what `make_slots` takes not, before anything is made."""
    if backend not in BACKENDS:
        raise ConfigError(f"--backend {backend}: there is none; {nearest(backend, BACKENDS)}")
    if not 0 <= cpus < math.inf:
        raise ConfigError(f"--cpus {cpus:g}; expected the CPUs that Ray counts for a trial, 0 or more")
    if backend == "processes" and (address, cpus) != ("local", 1.0):
        raise ConfigError("--address and --cpus are of --backend ray; a slot of this machine has its share of all CPUs")


def local_slots(count: int, address: str, cpus: float) -> LocalSlots:
    """The slots of this machine, each with CPUs of its own."""
    return LocalSlots(slices(read_machine(), count))


class LocalSlots:
    """Processes that the kernel kills with the launcher, however it dies.

    Args:
        machines: the part of this machine that each slot has.
    """

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines

    def __len__(self) -> int:
        return len(self._machines)

    def settle(self, run_dir: Path) -> None:
        """Does nothing: the runs of a launcher die before it is gone."""

    def start(self, k: int, command: Sequence[str], log: Path, extra: Mapping[str, str]) -> LocalExecution:
        """Starts a process on the CPUs of the slot, its GPU visible alone where slots have several."""
        machine = self._machines[k]
        env = {**os.environ, **extra, **visible_gpu(machine, self._machines)}
        return LocalExecution(spawned(command, log, env, machine.cpus))

    def close(self) -> None:
        """Does nothing."""


class LocalExecution:
    """A process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def code(self) -> int | None:
        """The exit code, None while it runs."""
        try:
            return self._process.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._process.kill()

    def end(self) -> None:
        """Kills it, and waits until it is gone."""
        self._process.kill()
        self._process.wait(timeout=_END_S)


def visible_gpu(machine: Machine, all_of_them: Sequence[Machine]) -> dict[str, str]:
    """The environment variable that leaves a slot its own GPU, where slots have several and the user chose none."""
    several = len({gpu.uuid for one in all_of_them for gpu in one.gpus} - {""}) > 1
    if several and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in machine.gpus)}
    return {}


def spawned(
    command: Sequence[str], log: Path, env: Mapping[str, str], cpus: Sequence[int], cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """`python -P -m penstock COMMAND` as a process on these CPUs, which dies with the thread that started it."""
    told = ",".join(map(str, cpus))
    with open(log, "ab", buffering=0) as out:
        return subprocess.Popen(
            script_command(_CHILD, str(os.getpid()), told, *module_command("penstock", *command)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=cwd,
            env={**env, "PYTHONUNBUFFERED": "1"},
            process_group=0,  # a Ctrl-C in the terminal reaches the launcher alone, which passes it on
        )


STOPPED = {*(128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)), -1, -2, -15}
"""Exit codes of a run that a signal stopped, as shells and as Popen report them."""
