"""Probes: each isolates one part of an algorithm, and its docstring states the exact answer (g is the discount)."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.envs.toy.base import Toy, box, one_hot, vector


class Constant(Toy):
    """One action, observation 0, one step, reward 1. V = Q = 1. Shows a broken value loss or optimizer."""

    def __init__(self) -> None:
        super().__init__(box(-1, 1), spaces.Discrete(1))

    def observe(self) -> Any:
        return vector(0)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0, True, False


class Sign(Toy):
    """Observation -1 or 1 by coin, one step, reward = observation for any action. V(o) = o."""

    def __init__(self) -> None:
        super().__init__(box(-1, 1), spaces.Discrete(2))

    def begin(self) -> None:
        self._sign = self.sign()

    def observe(self) -> Any:
        return vector(self._sign)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return self._sign, True, False


class TwoStep(Toy):
    """Observation 0, then 1; reward 1 at the end, for any actions. V(0) = g, V(1) = 1. Shows a wrong discount."""

    def __init__(self) -> None:
        super().__init__(box(0, 1), spaces.Discrete(2))

    def observe(self) -> Any:
        return vector(min(self.t, 1))

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return (1.0, True, False) if self.t == 1 else (0.0, False, False)


class Bandit(Toy):
    """Observation 0, one step; action 1 pays `scale`, action 0 pays -scale. Q = (-scale, scale).

    With entropy temperature a and scale 1 the soft optimum is pi(1) = 1 / (1 + e^(-2/a)): at a = 0.5 that is 0.98201,
    and soft V = 1.00907.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(box(-1, 1), spaces.Discrete(2))
        self.scale = scale

    def observe(self) -> Any:
        return vector(0)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return self.scale if action == 1 else -self.scale, True, False


class ScaledBandit(Bandit):
    """`Bandit` with rewards of ±1000 (or ±0.001): pi(1) = 1 all the same. Shows a missing reward or value scale."""

    def __init__(self, scale: float = 1000.0) -> None:
        super().__init__(scale)


class Match(Toy):
    """Observation -1 or 1 by coin, one step; 1 if action 1 meets 1 or action 0 meets -1, else -1. V = 1, Q = ±1."""

    def __init__(self) -> None:
        super().__init__(box(-1, 1), spaces.Discrete(2))

    def begin(self) -> None:
        self._sign = self.sign()

    def observe(self) -> Any:
        return vector(self._sign)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return self._sign if action == 1 else -self._sign, True, False


class Endless(Toy):
    """Observation 0, reward 1, truncated after `limit` steps, never terminated. V = 1 / (1 - g), 10 for g = 0.9.

    With limit 10 and g = 0.9, 5.263 means truncation is treated as termination in a TD target, 4.138 in a return.
    """

    def __init__(self, limit: int = 10) -> None:
        super().__init__(box(-1, 1), spaces.Discrete(2))
        self.limit = limit

    def observe(self) -> Any:
        return vector(0)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0, False, self.t + 1 >= self.limit


class Overshoot(Toy):
    """Observation t / 4 in a space of [0, 1], truncated after 8 steps: the last four of an episode lie outside."""

    def __init__(self) -> None:
        super().__init__(box(0, 1), spaces.Discrete(2))

    def observe(self) -> Any:
        return vector(self.t / 4)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0, False, self.t == 7


class ThreeStep(Toy):
    """Observation t, reward 1 on each of three steps, then terminated. V = 1 + g + g^2, 1 + g, 1. The last obs is 3."""

    def __init__(self) -> None:
        super().__init__(box(0, 3), spaces.Discrete(2))

    def observe(self) -> Any:
        return vector(self.t)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0, self.t == 2, False


class Chain(Toy):
    """A walk over `n` one-hot states, for any actions; reward 1 on leaving the last. V_i = g^(n-1-i)."""

    def __init__(self, n: int = 5) -> None:
        super().__init__(box(0, 1, n), spaces.Discrete(2))
        self.n = n

    def observe(self) -> Any:
        return one_hot(self.t, self.n)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        end = self.t == self.n - 1
        return float(end), end, False


class ContinuousBandit(Toy):
    """Observation 0, one step, action in [-1, 1], reward -(a - 0.3)^2. The best action is 0.3, with V = 0.

    For SAC at temperature 0.02 the soft optimum has standard deviation 0.100; at 0.1 mean 0.2993, deviation 0.2226.
    """

    def __init__(self) -> None:
        super().__init__(box(-1, 1), box(-1, 1))

    def observe(self) -> Any:
        return vector(0)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return -((float(action[0]) - 0.3) ** 2), True, False


class BoundedBandit(Toy):
    """Observation 0, one step, action in [-3, 5], reward -(a - 4)^2. The best action is 4. Shows wrong rescaling."""

    def __init__(self) -> None:
        super().__init__(box(-1, 1), box(-3, 5))

    def observe(self) -> Any:
        return vector(0)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return -((float(action[0]) - 4.0) ** 2), True, False


class Coin(Toy):
    """Observation 0, one step, reward -1 or 1 by coin. V = 0; a return distribution is half at -1, half at 1."""

    def __init__(self) -> None:
        super().__init__(box(-1, 1), spaces.Discrete(2))

    def observe(self) -> Any:
        return vector(0)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return self.sign(), True, False


class HugeScale(Toy):
    """Observation (±1e6, 7), one step, reward the sign of the first. V(o) = sign(o[0]); the second never varies."""

    def __init__(self) -> None:
        super().__init__(box(-1e6, 1e6, 2), spaces.Discrete(2))

    def begin(self) -> None:
        self._sign = self.sign()

    def observe(self) -> Any:
        return vector(self._sign * 1e6, 7)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return self._sign, True, False


class Masked(Toy):
    """Dict observation with an action mask over MultiDiscrete([3, 2]); V = 1 and the illegal choice is never taken.

    `obs` is a bit b by coin. In dimension 0 the choice 2b is illegal (mask 0) and pays 10, choice 1 pays 0.5 and the
    third 0. In dimension 1 the choice b pays 0.5. The mask changes with b, so that rows cannot be mixed up unseen.
    """

    def __init__(self) -> None:
        shown = spaces.Dict({"obs": box(0, 1), "action_mask": spaces.MultiBinary(5)})
        super().__init__(shown, spaces.MultiDiscrete([3, 2]))

    def begin(self) -> None:
        self._bit = int(self.np_random.random() < 0.5)

    def observe(self) -> Any:
        mask = np.ones(5, np.int8)
        mask[2 * self._bit] = 0
        return {"obs": vector(self._bit), "action_mask": mask}

    def act(self, action: Any) -> tuple[float, bool, bool]:
        if action[0] == 2 * self._bit:
            return 10.0, True, False
        return 0.5 * float(action[0] == 1) + 0.5 * float(action[1] == self._bit), True, False
