"""Backend: the Protocol between those who own runners and the place where their runners live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from penstock.core.errors import EnvWorkerError

DeathKind = Literal["exception", "exit", "signal", "oom", "timeout", "node"]
ROOM = "runners", "num_cpus"
"""Names of the settings that say how many runners there are, and how many CPUs a cluster counts for each."""


class RunnerError(EnvWorkerError):
    """A call to a runner that has no result.

    Args:
        kind: `exception`: the method raised, the runner lives; anything else: the runner is gone.
        trace: the traceback on the runner's side, or "". error_type: class name of the exception raised there.
    """

    def __init__(self, kind: DeathKind, message: str, trace: str = "", error_type: str = "") -> None:
        super().__init__(message)
        self.kind: DeathKind = kind
        self.trace, self.error_type = trace, error_type


class RunnerStatus(NamedTuple):
    """A runner as its owner sees it while a call hangs."""

    words: Sequence[int] = ()
    """The words of its note (`penstock.actors.note`); none where the note cannot be read."""
    stacks: str = ""
    """Where its threads are; "" where it does not come to say so, or was not asked."""


def cannot_travel(what: str) -> tuple[str, str]:
    """Beginning and end of the error of arguments that cannot be pickled; between them stands why."""
    return (
        f"the arguments of {what} cannot be sent to another process",
        "make files, locks, sockets and the like there, as inside an environment's factory, or use the in-process "
        "backend",
    )


class Backend(Protocol):
    """Starts objects of a class elsewhere and calls their methods.

    Calls to one runner are carried out in the order in which they were sent; a call never blocks the sender. A handle
    of a runner answers `handle.method.remote(*args)` with a call, as an actor of Ray does.
    """

    name: str

    def require_room(self, runners: int, words: tuple[str, str] = ROOM) -> None:
        """Raises ConfigError if this many runners can never live here together; called before the first is started.

        Args:
            words: names of the settings that say how many, and how large each is, for messages.
        """
        ...

    def crowded(self) -> str:
        """Possible cause, for a message, why a runner does not come up; "" if none is known."""
        ...

    def start(self, cls: type, args: Sequence[Any], name: str, **how: Any) -> Any:
        """Returns the handle of a new `cls(*args)` at once; it is made elsewhere, and calls wait for it there.

        An error of the constructor is that of every call. `name` stands in messages and process titles.
        `how`: options of this kind of backend.
        """
        ...

    def put(self, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
        """Returns a reference to these arrays [n] uint8, an argument for any number of calls: one copy a machine.

        The reference must be an argument itself, not inside one. A method receives the bytes of all parts one after the
        other, as bytes or a read-only array [n] uint8, or a list of such arrays, one for each part. The parts may be
        overwritten after this returns.
        """
        ...

    def call(self, runner: Any, method: str, *args: Any) -> Any:
        """Sends a call; returns a reference to its result."""
        ...

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Returns the calls that have ended, in the order of `calls`: at least one, or none after `timeout_s`."""
        ...

    def result(self, call: Any, timeout_s: float) -> Any:
        """Returns the result of a call; arrays in it may be read-only.

        Raises:
            RunnerError: it raised there, or the runner is gone, or (`timeout`) there is no result in time.
        """
        ...

    def look(self, runner: Any, stacks: bool = True) -> RunnerStatus:
        """Returns the runner's note and its stacks, also while a call hangs; without `stacks` the note alone."""
        ...

    def kill(self, runner: Any) -> None:
        """Kills a runner and its processes at once; calls in flight end with an error (`exit`)."""
        ...

    def close(self) -> None:
        """Kills every runner that was started here, and leaves the cluster if it was joined here."""
        ...
