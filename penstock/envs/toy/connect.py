"""Connect-3 on 6 x 2: a board game of 19,944 positions, few enough that play from each of them can be judged."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.envs.toy.agents import TurnToy
from penstock.envs.toy.base import box

_COLUMNS, _ROWS = 6, 2


class Connect3(TurnToy):
    """Two agents in turn drop a piece into one of 6 columns of 2; three in a row win 1, and the other loses 1.

    A full board is 0 for both, which neither can keep the other from. The observation is the board of the agent's own
    pieces, then that of the other's, row by row from the bottom; the mask shows the columns that are not full.

    Args:
        opening_moves: an episode opens with 0 to this many random moves, equally likely, none of which ends it.
    """

    def __init__(self, opening_moves: int = 0) -> None:
        if not 0 <= opening_moves < _ROWS * _COLUMNS:
            raise ValueError(f"opening_moves={opening_moves}; expected 0 to {_ROWS * _COLUMNS - 1}")
        pieces, mask = box(0, 1, 2 * _ROWS * _COLUMNS), spaces.MultiBinary(_COLUMNS)
        super().__init__(2, spaces.Dict({"observation": pieces, "action_mask": mask}), _COLUMNS)
        self._opening_moves = opening_moves
        self.board = np.zeros((_ROWS, _COLUMNS), np.int8)
        """[rows, columns] 1 and 2: a piece of the first agent or of the second; 0: empty."""

    def begin(self) -> None:
        for agent in self.possible_agents:
            self.enter(agent)
        moves = int(self.rng.integers(self._opening_moves + 1)) if self._opening_moves else 0
        while not self._opened(moves):
            pass
        self.select(self.possible_agents[moves % 2])

    def observe(self, agent: str) -> Any:
        own = self.possible_agents.index(agent) + 1
        pieces = np.stack([self.board == own, self.board == 3 - own])
        mask = self.board[-1] == 0
        return {"observation": pieces.reshape(-1).astype(np.float32), "action_mask": mask.astype(np.int8)}

    def play(self, agent: str, action: Any) -> None:
        (other,) = (each for each in self.agents if each != agent)
        self.select(other)
        won = self._drop(int(action), self.possible_agents.index(agent) + 1)
        if won:
            self.rewards.update({agent: 1.0, other: -1.0})
        if won or self.board.all():
            self.end(agent)
            self.end(other)

    def _opened(self, moves: int) -> bool:
        """Plays random moves on an empty board; False if one of them ended the game."""
        self.board[...] = 0
        for k in range(moves):
            column = int(self.rng.choice(np.flatnonzero(self.board[-1] == 0)))
            if self._drop(column, 1 + k % 2):
                return False
        return True

    def _drop(self, column: int, piece: int) -> bool:
        """True if the piece, in a column that is not full, completes three in a row."""
        self.board[int(self.board[0, column] != 0), column] = piece
        own = self.board == piece
        return bool((own[:, :-2] & own[:, 1:-1] & own[:, 2:]).any())
