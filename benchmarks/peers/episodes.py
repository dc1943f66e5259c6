"""CartPole-v1 that writes its episodes down, for `ways_in.py`: `gym.make("episodes:Recorded-v0")`, or the function `make`.

Each environment appends to a file of its own in $EPISODES, whose name begins with the time it was made at: the number of its steps,
and the return of the episode that ended.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

try:
    import gymnasium as gym
except ImportError:
    import gym  # of rlpyt


class Recorded(gym.Wrapper):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        handle, path = tempfile.mkstemp(prefix=f"{time.time_ns()}-", dir=os.environ["EPISODES"])
        os.close(handle)
        self._path, self._steps, self._return = path, 0, 0.0

    def reset(self, **options: Any) -> Any:
        self._return = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        made = self.env.step(action)
        self._steps += 1
        self._return += float(made[1])
        if any(made[2:-1]):  # terminated and truncated, or done
            with open(self._path, "a") as file:
                file.write(f"{self._steps} {self._return}\n")
        return made


def make(**options: Any) -> Recorded:
    return Recorded(gym.make("CartPole-v1", **options))


gym.register("Recorded-v0", entry_point=make)
