"""An environment that tells what kind of process it lives in; it imports no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from penstock.processes.termination import MARK

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

VARIABLE = "PENSTOCK_TEST_OF_FORKS"


class Where(gym.Env[Any, Any]):
    """Writes into a folder what kind of process it lives in, a file for each process."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, folder: str, dies: bool = False) -> None:
        self.dies = dies
        opened = [link_of(fd) for fd in os.listdir("/proc/self/fd")]
        environ = Path("/proc/self/environ").read_bytes()
        found = {
            "descriptors": sorted(name for name in opened if name),
            "variable": os.environ.get(VARIABLE),
            "threads of BLAS": os.environ.get("OMP_NUM_THREADS"),
            "directory": os.getcwd(),
            "leads its group": os.getpgid(0) == os.getpid(),
            "ignores Ctrl-C": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "shows its mark": os.environ[MARK].encode() in environ and b"server." not in environ,
            "arguments": len(sys.argv),
        }
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(found))

    def reset(self, **kwargs: Any) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.dies:
            os._exit(7)
        return np.zeros(1, np.float32), 0.0, True, False, {}


def link_of(fd: str) -> str:
    """What a descriptor leads to, without numbers; empty for the list of descriptors that is being read."""
    try:
        return re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{fd}"))
    except FileNotFoundError:
        return ""
