"""Child: one process that penstock has started, from its command line to its cause of death."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from penstock.core.machine import oom_kills
from penstock.processes.death import Death, death_of
from penstock.processes.descriptors import read_all
from penstock.processes.limits import refusal
from penstock.processes.python import module_command, one_thread_environment
from penstock.processes.stacks import stacks_of
from penstock.processes.termination import MARK, kill_group, kill_marked, new_mark
from penstock.processes.tether import Tether

REAP_S = 60.0
"""Longest wait for a killed process to end, which takes long on a busy machine."""
OUTPUT_BYTES, TAIL_BYTES = 1 << 20, 2000
"""Size above which kept output is forgotten, and size of the end of it that is shown when the process dies."""
_CRASH_BYTES = 1 << 16


class StartedProcess(Protocol):
    """A process that was started; the members of `subprocess.Popen` that a Child uses."""

    args: Any
    pid: int
    returncode: int | None

    def wait(self, timeout: float | None = None) -> int:
        """Reaps the process, once it has ended within `timeout` seconds, and returns its exit status."""
        ...


class Forks(Protocol):
    """Starts children by forking another process."""

    def fork(self, module: str, spawn_args: dict[str, Any], environment: dict[str, str]) -> StartedProcess | None:
        """Returns a process that runs `module.main()`; None where none can be forked."""
        ...


class Child:
    """A process in a group of its own, which runs `module.main()`.

    It finds its arguments as JSON in `sys.argv[1]`: `words`, `descriptors` by name, and the pid of its `parent`.

    Args:
        name: in messages, e.g. `worker 3`.
        tether: makes it die with this process; None: it outlives this process, in a session of its own.
        descriptors: those it inherits, by name; each name has one or a sequence.
        environment: its variables, without the mark; by default those of this process, with one thread for libraries.
        mark: environment mark of the process and all that it starts, by which they are found and killed; unique by
            default.
        output: `inherited`: the streams of this process; `kept`: in memory, see `tail`; or a descriptor.
        forks: process to fork it from, where possible; None: a fresh interpreter.
        cure: advice that ends the error message if the system does not start it.

    Raises:
        ConfigError: the system does not start it; the message says which limit is in the way.
        ChildProcessError, ConnectionError, TimeoutError: `forks` has died or does not answer.
    """

    def __init__(
        self,
        module: str,
        name: str,
        tether: Tether | None,
        descriptors: Mapping[str, int | Sequence[int]],
        words: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        mark: str = "",
        output: Literal["inherited", "kept"] | int = "inherited",
        forks: Forks | None = None,
        cure: str = "use fewer processes",
    ) -> None:
        self.name, self.mark = name, mark or new_mark()
        self.environment = {**(one_thread_environment() if environment is None else environment)}
        self.environment[MARK] = os.environ.get(MARK, "") + self.mark
        self._crash = os.memfd_create("penstock-crash", os.MFD_CLOEXEC)
        self._output = os.memfd_create("penstock-output", os.MFD_CLOEXEC) if output == "kept" else -1
        self._pidfd = -1
        self._oom_before = oom_kills()
        inherited = {**descriptors, "crash": self._crash} | ({} if tether is None else {"alive": tether.fd})
        spawn_args = {**words, **inherited, "parent": os.getpid(), "descriptors": list(inherited)}
        streams = -1
        try:
            if output == "kept":  # reopened to append: after `trim`, output begins at the start again
                streams = os.open(f"/proc/self/fd/{self._output}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            elif output != "inherited":
                streams = os.dup(output)
            self.process = self._start(module, spawn_args, None if streams < 0 else streams, forks, tether is None)
            self._watch()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, (ChildProcessError, ConnectionError, TimeoutError)):
                raise refusal(name, error, cure) from error
            raise
        finally:
            if streams >= 0:
                os.close(streams)

    def _start(
        self, module: str, spawn_args: dict[str, Any], streams: int | None, forks: Forks | None, session: bool
    ) -> StartedProcess:
        forked = None if forks is None else forks.fork(module, spawn_args, self.environment)
        return forked or subprocess.Popen(
            module_command("penstock.processes.tie", module, json.dumps(spawn_args), self.name),
            pass_fds=descriptors_of(spawn_args),
            process_group=None if session else 0,
            start_new_session=session,
            stdin=subprocess.DEVNULL,
            stdout=streams,
            stderr=streams,
            env=self.environment,
        )

    def _watch(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as error:  # its fork server died, so another process reaped it: no kill by pid
            kill_marked(self.mark)
            raise ChildProcessError(f"{self.name} has ended with the process that it was forked of") from error
        except OSError:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its pid, which no other process can get before this one is reaped."""
        return self.process.pid

    @property
    def exited(self) -> bool:
        """True if the process has ended; it may not be reaped yet."""
        if self.process.returncode is not None:
            return True
        poll = select.poll()
        self.register(poll)
        return bool(poll.poll(0))

    def register(self, poll: select.poll) -> None:
        """Has `poll` watch for the end of the process."""
        poll.register(self._pidfd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the process to end; returns whether it has ended."""
        poll = select.poll()
        self.register(poll)
        return bool(poll.poll(int(timeout_s * 1e3)))

    def trim(self) -> None:
        """Forgets kept output, if there is more than is ever shown."""
        if self._output >= 0 and os.fstat(self._output).st_size > OUTPUT_BYTES:
            os.ftruncate(self._output, 0)

    def tail(self) -> str:
        """The end of the kept output."""
        if self._output < 0:
            return ""
        size = os.fstat(self._output).st_size
        return read_all(self._output, TAIL_BYTES, max(size - TAIL_BYTES, 0)).decode(errors="replace").strip()

    def crash(self) -> str:
        """The output of the fault handler."""
        return os.pread(self._crash, _CRASH_BYTES, 0).decode(errors="replace").strip()

    def stacks(self, limit_s: float = 2.0) -> str:
        """The stacks of its threads now, written by its fault handler; "" if it does not write them in time."""
        return "" if self.exited else stacks_of(self.pid, f"/proc/self/fd/{self._crash}", limit_s)

    def kill(self) -> int:
        """Kills the process and all that it has started, reaps it, and returns its exit status."""
        if self.process.returncode is not None:  # reaped: another process may have this pid by now
            return self.process.returncode
        kill_group(self.pid, self._pidfd)  # also processes that it left behind, if it has ended by itself
        kill_marked(self.mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._pidfd < 0 or self.wait(REAP_S):
                return self.process.wait(timeout=REAP_S)
        warnings.warn(
            f"{self.name}, pid {self.pid}, was killed and has not ended within {REAP_S:.0f} s: it waits in the "
            "kernel, as for a device or a network disk; it is left behind",
            stacklevel=2,
        )
        return -signal.SIGKILL

    def death(self) -> Death:
        """How it ended; one that still runs is killed."""
        status = self.kill()
        said = self.tail()
        parts = [self.crash(), f"The end of its output:\n{said}" if said else ""]
        return death_of(status, self._oom_before, "\n".join(filter(None, parts)))

    def close(self) -> None:
        """Closes the descriptors. A second call does nothing."""
        for fd in (self._crash, self._output, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._crash = self._output = self._pidfd = -1


def descriptors_of(spawn_args: Mapping[str, Any]) -> list[int]:
    """The descriptors that spawn arguments name, each once."""
    found = [spawn_args[name] for name in spawn_args["descriptors"]]
    return list(dict.fromkeys(fd for x in found for fd in ([x] if isinstance(x, int) else x)))
