"""Team games of the literature whose best joint return is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.envs.toy.agents import ParallelToy
from penstock.envs.toy.base import box, one_hot

_PAYOFFS = np.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])


class TwoStepMatrix(ParallelToy):
    """The two-step game of Rashid et al. 2018, section 6.1. Best return 8; a sum of agents' Q (VDN) can only find 7.

    The first agent's first action chooses the game of the second step: one that always pays both 7, or one that pays 0,
    1, 1 or 8, the last if both choose 1. Each sees the step's game, and which of the two agents it is.
    """

    def __init__(self) -> None:
        super().__init__(2, box(0, 1, 5), 2)
        self.state_space: spaces.Space[Any] = box(0, 1, 3)
        self._game = 0

    def begin(self) -> None:
        self._game = 0

    def observe(self, agent: str) -> npt.NDArray[np.float32]:
        return np.concatenate([self.state(), one_hot(self.possible_agents.index(agent), 2)])

    def state(self) -> npt.NDArray[np.float32]:
        """Which game is played."""
        return one_hot(self._game, 3)

    def act(self, actions: dict[str, Any]) -> tuple[dict[str, float], dict[str, bool], dict[str, bool], list[str]]:
        first, second = (int(actions[agent]) for agent in self.agents)
        agents, over = list(self.agents), self._game > 0
        paid = float(_PAYOFFS[self._game - 1, first, second]) if over else 0.0
        if not over:
            self._game = 1 + first
        no = dict.fromkeys(agents, False)
        return dict.fromkeys(agents, paid), dict.fromkeys(agents, over), no, [] if over else agents
