"""Environments that take their process along, or hang, at a chosen place: for tests of worker processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from penstock.core.errors import ConfigError, nearest
from penstock.core.noise import env_seeds
from penstock.envs.toy.faults import OddError
from penstock.envs.toy.plumbing import SeedEcho


def _raise(error: BaseException) -> Any:
    raise error


def _busy() -> None:
    while True:
        pass


def _orphan() -> None:
    subprocess.Popen(["sleep", "1000"])
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: dict[str, Callable[[], Any]] = {
    "raise": lambda: _raise(ValueError("the arm fell off")),
    "odd_error": lambda: _raise(OddError(3, "two arguments")),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "exit": lambda: sys.exit(7),
    "os_exit": lambda: os._exit(0),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "null": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "orphan": _orphan,
    "sleep": lambda: time.sleep(3600),
    "busy": _busy,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
"""What `CrashEnv` can do; `orphan` leaves a child that lives on, the last three hang."""


class CrashEnv(SeedEcho):
    """`SeedEcho` that crashes in `where`: in its construction, or on step or in the reset of an episode.

    Args:
        seed, slot: of the run and of the slot that is at fault. episode, at: which episode of it, and which step.
        once: a file that is made by the first crash and prevents any other; None: it crashes every time.
        nap_s: seconds that every step takes.
    """

    def __init__(
        self,
        way: str = "raise",
        where: Literal["init", "reset", "step", "never"] = "step",
        seed: int = 0,
        slot: int = 0,
        episode: int = 1,
        at: int = 0,
        once: str | None = None,
        nap_s: float = 0.0,
    ) -> None:
        if way not in WAYS:
            raise ConfigError(f"way={way!r}; {nearest(way, WAYS)}")
        super().__init__()
        self._way, self._where, self._at, self._once, self._nap_s = way, where, at, once, nap_s
        self._fatal = env_seeds(seed, slot, episode, 1)[0]
        if where == "init":
            self._crash()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._where == "reset" and seed == self._fatal:
            self._crash()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self._nap_s:
            time.sleep(self._nap_s)
        if self._where == "step" and self.seed == self._fatal and self.t == self._at:
            self._crash()
        return super().step(action)

    def _crash(self) -> None:
        if self._once is not None:
            try:
                os.close(os.open(self._once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        WAYS[self._way]()
