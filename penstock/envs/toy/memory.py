"""Tasks that a policy without memory cannot solve."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.envs.toy.base import Toy, box, one_hot, vector


class TMaze(Toy):
    """A cue of -1 or 1 at step 0, a corridor in which actions have no effect, a junction at step `length`.

    Observation (cue, at junction), the cue shown at step 0 only. At the junction action 1 is right for cue 1, action 0
    for cue -1; right pays 1, wrong 0, and the episode ends. Best return 1 and V(start) = g^length; without memory 0.5.
    """

    def __init__(self, length: int = 8) -> None:
        super().__init__(box(-1, 1, 2), spaces.Discrete(2))
        self.length = length

    def begin(self) -> None:
        self._cue = self.sign()

    def observe(self) -> Any:
        return vector(self._cue if self.t == 0 else 0.0, float(self.t == self.length))

    def act(self, action: Any) -> tuple[float, bool, bool]:
        if self.t < self.length:
            return 0.0, False, False
        return float((action == 1) == (self._cue > 0)), True, False


class RepeatPrevious(Toy):
    """A random symbol each step, one-hot; 1 if the action names the symbol of `delay` steps ago. Truncated at `length`.

    The first `delay` steps pay nothing. Best return length - delay; without memory (length - delay) / symbols.
    """

    def __init__(self, delay: int = 2, symbols: int = 4, length: int = 16) -> None:
        super().__init__(box(0, 1, symbols), spaces.Discrete(symbols))
        self.delay, self.symbols, self.length = delay, symbols, length

    def begin(self) -> None:
        self._shown = self.np_random.integers(self.symbols, size=self.length + 1)

    def observe(self) -> Any:
        return one_hot(int(self._shown[self.t]), self.symbols)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        right = self.t >= self.delay and action == self._shown[self.t - self.delay]
        return float(right), False, self.t + 1 >= self.length


class HideVelocity(gym.ObservationWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Shows only some elements of a vector observation; by default position and angle of CartPole."""

    def __init__(self, env: gym.Env[Any, Any], keep: tuple[int, ...] = (0, 2)) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, keep=keep)
        super().__init__(env)
        space: Any = env.observation_space
        self._keep = list(keep)
        self.observation_space = spaces.Box(space.low[self._keep], space.high[self._keep], dtype=space.dtype)

    def observation(self, observation: Any) -> npt.NDArray[Any]:
        """The kept elements, in new memory."""
        return np.asarray(observation)[self._keep]


def cartpole_positions() -> gym.Env[Any, Any]:
    """CartPole-v1 that shows position and angle, and no velocity."""
    return HideVelocity(gym.make("CartPole-v1", disable_env_checker=True))
