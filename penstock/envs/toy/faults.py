"""An environment that misbehaves once, in a way chosen by name, for tests of checks and fault handling."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.errors import ConfigError, nearest
from penstock.envs.toy.base import Toy, box

Array = npt.NDArray[Any]


class OddError(Exception):
    """An exception that cannot be rebuilt from its text alone, and does not survive pickling."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"odd {code}: {detail}")
        self.hook = lambda: detail


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
"""Ways not to return; `orphan` kills the process and leaves a child that lives on, the last three hang."""

OBS_FAULTS: dict[str, Callable[[Array], Any]] = {
    "nan_obs": lambda obs: np.array([obs[0], np.nan, obs[2]], np.float32),
    "inf_obs": lambda obs: np.array([obs[0], np.inf, obs[2]], np.float32),
    "wrong_shape": lambda obs: np.concatenate([obs, obs[:1]]),
    "wrong_dtype": lambda obs: obs.astype(np.float64),
    "out_of_space": lambda obs: np.array([obs[0], 7.0, obs[2]], np.float32),
    "scalar_obs": lambda obs: np.float32(0.5),
    "list_obs": lambda obs: obs.tolist(),
    "none_obs": lambda obs: None,
}
"""Faults of one observation array."""

DICT_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "extra_key": lambda obs: {**obs, "surprise": np.zeros(1, np.float32)},
    "missing_key": lambda obs: {"mode": obs["mode"]},
    "not_a_dict": lambda obs: obs["sensor"],
}
"""Faults of a Dict observation; they need `dict_obs=True`."""

RESULT_FAULTS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "short_tuple": lambda r: (r[0], r[1], r[2], r[4]),
    "inf_reward": lambda r: (r[0], np.inf, *r[2:]),
    "nan_reward": lambda r: (r[0], float("nan"), *r[2:]),
    "str_reward": lambda r: (r[0], "abc", *r[2:]),
    "none_reward": lambda r: (r[0], None, *r[2:]),
    "array_reward": lambda r: (r[0], np.zeros(2), *r[2:]),
    "non_bool": lambda r: (r[0], r[1], 0, *r[3:]),
    "none_info": lambda r: (*r[:4], None),
}
"""Faults of the result of `step`."""

CRASHES = {
    f"{way}_in_step": WAYS[way] for way in ("raise", "odd_error", "interrupt", "exit", "os_exit", "sigkill", "sigsegv")
} | {"hang_in_step": WAYS["sleep"]}
"""Faults in which `step` does not return; from `os_exit` on they kill the process or hang."""

LASTING = ("none", "raise_in_init", "raise_in_reset", "reused_buffer", "unseeded")
FAULTS = (*LASTING, *OBS_FAULTS, *DICT_FAULTS, *RESULT_FAULTS, *CRASHES)
"""All faults of `FaultEnv` by name."""


class FaultEnv(Toy):
    """Observation: 3 uniform numbers; reward 1; terminated after `length` steps. It misbehaves as `fault` says.

    The fault comes on step number `at` of the instance, counted from 0 over all its episodes; `raise_in_reset` on reset
    number `at`; `raise_in_init` at once. `reused_buffer` returns one array for ever; `unseeded` draws from outside the
    seed. With `dict_obs` the observation is {"sensor": the 3 numbers, "mode": 0} and the sensor is at fault. `slot`
    together with `only_slot` confines the fault to one slot.
    """

    def __init__(
        self,
        fault: str = "none",
        at: int = 3,
        length: int = 10,
        dict_obs: bool = False,
        slot: int = 0,
        only_slot: int | None = None,
    ) -> None:
        if fault not in FAULTS:
            raise ConfigError(f"fault={fault!r}; {nearest(fault, FAULTS)}")
        if fault in DICT_FAULTS and not dict_obs:
            raise ConfigError(f"fault={fault!r} needs a Dict observation: dict_obs=True")
        sensor = box(-1, 1, 3)
        shown = spaces.Dict({"sensor": sensor, "mode": spaces.Discrete(2)}) if dict_obs else sensor
        super().__init__(shown, spaces.Discrete(2))
        self.fault = fault if only_slot is None or slot == only_slot else "none"
        self.at, self.length, self.dict_obs = at, length, dict_obs
        self.steps = self.resets = 0
        self._buffer = np.zeros(3, np.float32)
        if self.fault == "raise_in_init":
            raise RuntimeError("no simulator licence")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        if self.fault == "raise_in_reset" and self.resets - 1 == self.at:
            raise RuntimeError("the door is locked")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.steps += 1
        now = self.steps - 1 == self.at
        if now and self.fault in CRASHES:
            CRASHES[self.fault]()
        result = super().step(action)
        return RESULT_FAULTS[self.fault](result) if now and self.fault in RESULT_FAULTS else result

    def observe(self) -> Any:
        rng: Any = np.random.default_rng() if self.fault == "unseeded" else self.np_random
        values: Any = rng.uniform(-1, 1, 3).astype(np.float32)
        if self.fault == "reused_buffer":
            self._buffer[:] = values
            values = self._buffer
        now = self.t > 0 and self.steps - 1 == self.at
        if now and self.fault in OBS_FAULTS:
            values = OBS_FAULTS[self.fault](values)
        if not self.dict_obs:
            return values
        obs = {"sensor": values, "mode": np.int64(0)}
        return DICT_FAULTS[self.fault](obs) if now and self.fault in DICT_FAULTS else obs

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0, self.t + 1 >= self.length, False
