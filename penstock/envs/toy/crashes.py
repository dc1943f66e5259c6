"""An environment that kills its process, raises or hangs at a chosen step, for tests of worker processes."""

from __future__ import annotations

import os
import time
from typing import Any, Literal

from penstock.core.errors import ConfigError, nearest
from penstock.core.noise import env_seeds
from penstock.envs.toy.faults import WAYS
from penstock.envs.toy.plumbing import SeedEcho


class CrashEnv(SeedEcho):
    """`SeedEcho` that crashes as `way` says: in its constructor, or in a chosen reset or step.

    Args:
        way: a key of `WAYS`. where: the method. seed, slot, episode, at: of the run, and of the step at fault.
        once: a file that the first crash makes and that prevents any other; None for a crash every time.
        nap_s: duration of each step.
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
