"""An independent solver of connect-3 on 6 x 2, and the share of its positions in which a policy plays the game value."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs

COLUMNS, ROWS = 6, 2
Position = tuple[tuple[int, ...], ...]
"""Of each column the pieces from the bottom up: 1 of the first player, 2 of the second."""
EMPTY: Position = ((),) * COLUMNS


def mover(at: Position) -> int:
    """Whose turn it is, 1 or 2."""
    return 1 + sum(map(len, at)) % 2


def dropped(at: Position, column: int) -> Position:
    """The position after a move of the one whose turn it is."""
    return (*at[:column], (*at[column], mover(at)), *at[column + 1 :])


def legal(at: Position) -> list[int]:
    """Columns that are not full."""
    return [i for i, column in enumerate(at) if len(column) < ROWS]


def has_won(at: Position, player: int) -> bool:
    """True for three in a row; columns and diagonals of two rows have no room for three."""
    rows = ([row < len(column) and column[row] == player for column in at] for row in range(ROWS))
    return any(all(row[i : i + 3]) for row in rows for i in range(COLUMNS - 2))


@functools.cache
def value(at: Position) -> int:
    """1, 0 or -1: the gain of the one whose turn it is, where both play best."""
    if has_won(at, 3 - mover(at)):
        return -1
    return max((-value(dropped(at, i)) for i in legal(at)), default=0)


@functools.cache
def positions() -> tuple[Position, ...]:
    """All that legal moves from the empty board lead to and in which the game goes on."""
    found, new = dict.fromkeys([EMPTY]), [EMPTY]
    while new:
        after = dict.fromkeys(dropped(at, i) for at in new for i in legal(at))
        new = [at for at in after if legal(at) and not has_won(at, 3 - mover(at))]
        found.update(dict.fromkeys(new))
    return tuple(found)


@functools.cache
def right() -> np.ndarray:
    """[positions, 6] bool: legal moves that keep the value of a position."""
    return np.array([
        [len(at[i]) < ROWS and -value(dropped(at, i)) == value(at) for i in range(COLUMNS)] for at in positions()
    ])  # fmt: skip


def shown(at: Position) -> dict[str, np.ndarray]:
    """The observation of the one whose turn it is."""
    board = np.array([[column[row] if row < len(column) else 0 for column in at] for row in range(ROWS)])
    planes = np.stack([board == mover(at), board != 0]).astype(np.float32)
    planes[1] -= planes[0]
    return {"observation": planes.reshape(-1), "action_mask": (board[-1] == 0).astype(np.int8)}


@functools.cache
def _all_shown() -> dict[str, torch.Tensor]:
    every = [shown(at) for at in positions()]
    return {key: torch.from_numpy(np.stack([x[key] for x in every])) for key in every[0]}


def share_right(agent: Agent) -> float:
    """Of all positions, those in which the likeliest legal move keeps the value; a uniform draw has 0.64."""
    n = len(positions())
    inputs: Any = Inputs(_all_shown(), torch.zeros(n, dtype=torch.int64), torch.zeros(n), torch.ones(n).bool())
    with torch.inference_mode():
        moves = agent.act(inputs, None, None)[0]
    return float(right()[np.arange(n), np.asarray(moves)].mean())
