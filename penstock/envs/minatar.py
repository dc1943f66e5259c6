"""MinAtar: five small games on a grid of 10 x 10, one function for each (Young and Tian 2019, arXiv:1903.03176)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.errors import ConfigError, MissingExtraError

Grid = npt.NDArray[np.bool_]


def asterix(*, sticky: float = 0.1, max_steps: int = 5_000) -> MinAtar:
    """Collect treasure, avoid enemies; see `MinAtar`."""
    return MinAtar("asterix", sticky, max_steps)


def breakout(*, sticky: float = 0.1, max_steps: int = 5_000) -> MinAtar:
    """A brick is a point; see `MinAtar`."""
    return MinAtar("breakout", sticky, max_steps)


def freeway(*, sticky: float = 0.1, max_steps: int = 5_000) -> MinAtar:
    """A crossing is a point; see `MinAtar`."""
    return MinAtar("freeway", sticky, max_steps)


def seaquest(*, sticky: float = 0.1, max_steps: int = 5_000) -> MinAtar:
    """Shoot, collect divers, bring them up in time; see `MinAtar`."""
    return MinAtar("seaquest", sticky, max_steps)


def space_invaders(*, sticky: float = 0.1, max_steps: int = 5_000) -> MinAtar:
    """An alien is a point; see `MinAtar`."""
    return MinAtar("space_invaders", sticky, max_steps)


class MinAtar(gym.Env[Grid, int]):
    """One game: observations [10, 10, C] bool, a channel for each kind of object; the actions that the game uses.

    With the same seed it plays as the package's own environment with `use_minimal_action_set` does. It differs in one
    thing: that has no time limit, and in Breakout a paddle at rest can return the ball for ever.

    Args:
        sticky: probability that an action is replaced by the one before; 0.1 in the paper.
        max_steps: steps after which an episode is truncated.

    Raises:
        ConfigError: a setting out of range. MissingExtraError: MinAtar is not installed.
    """

    def __init__(self, game: str, sticky: float, max_steps: int) -> None:
        if not 0.0 <= sticky <= 1.0 or max_steps < 1:
            raise ConfigError(f"sticky={sticky}, max_steps={max_steps}; expected a probability and at least 1 step")
        self._game: Any = _load(game).Env(ramping=True)
        self._random = self._game.random
        self._actions: list[int] = self._game.minimal_action_set()
        self._sticky, self._max_steps = sticky, max_steps
        self._last = self._steps = 0
        bit: Any = np.bool_  # Gymnasium's annotation takes numbers only
        self.observation_space: Any = spaces.Box(0, 1, tuple(self._game.state_shape()), bit)
        self.action_space: Any = spaces.Discrete(len(self._actions))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Grid, dict[str, Any]]:
        """The first grid of a new game."""
        super().reset(seed=seed)
        if seed is not None:
            self._random = self._game.random = np.random.RandomState(seed & 0xFFFFFFFF)
        self._game.reset()
        self._last = self._steps = 0
        return self._game.state(), {}

    def step(self, action: int) -> tuple[Grid, float, bool, bool, dict[str, Any]]:
        """(grid, reward, game over, out of time, {})."""
        if self._random.rand() >= self._sticky:
            self._last = self._actions[action]
        reward, over = self._game.act(self._last)
        self._steps += 1
        return self._game.state(), float(reward), bool(over), self._steps >= self._max_steps and not over, {}


def _load(game: str) -> Any:
    """A game's module, loaded by its file: importing the package imports seaborn, for seconds in each worker."""
    package = importlib.util.find_spec("minatar")
    if package is None or not package.submodule_search_locations:
        raise MissingExtraError("minatar", "minatar")
    path = Path(package.submodule_search_locations[0], "environments", f"{game}.py")
    spec = importlib.util.spec_from_file_location(f"minatar_{game}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
