"""A task that only deep exploration solves."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.envs.toy.base import Toy, box, one_hot


class DeepSea(Toy):
    """A dive of `size` rows from the top left: right costs 0.01 / size, and 1 is paid for right in the last corner.

    bsuite has it (Osband et al. 2020, arXiv:1908.03568, deterministic). Left is free, so the only return above 0 has
    `size` moves to the right, 0.99, and V(start) = g^(size - 1) - 0.01 / size (1 + g + ... + g^(size - 1)); a policy
    that draws moves by coin finds it once in 2^size episodes. Which action is right is drawn for each place by
    `mapping_seed`, once for the environment. Observation: one-hot of row * size + column, zeros at the end.
    """

    def __init__(self, size: int = 10, mapping_seed: int = 42) -> None:
        super().__init__(box(0, 1, size * size), spaces.Discrete(2))
        self.size = size
        self.right = np.random.RandomState(mapping_seed).binomial(1, 0.5, (size, size))
        """[size, size] the action that moves right, by row and column."""
        self._column = 0

    def begin(self) -> None:
        self._column = 0

    def observe(self) -> Any:
        return one_hot(self.t * self.size + self._column, self.size**2)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        moves = action == self.right[self.t, self._column]
        paid = float(moves and self._column == self.size - 1) - 0.01 / self.size * moves
        self._column = min(max(self._column + (1 if moves else -1), 0), self.size - 1)
        return paid, self.t == self.size - 1, False
