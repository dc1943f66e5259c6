"""A task with image observations that a small network learns in seconds."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from penstock.envs.toy.base import Toy

_CELLS = 8


class PixelCatch(Toy):
    """A ball falls from a random column, a paddle below moves left, stays or moves right: 1 if it is caught, else -1.

    8 x 8 cells drawn on 24 x 24 pixels, uint8: ball in channel 0, paddle in channel 1, channel 2 empty. The paddle
    starts in column 3 and can reach any column in the 7 steps of an episode, so the best return is 1; a paddle that
    never moves gets -0.75 on average.
    """

    def __init__(self, layout: Literal["chw", "hwc"] = "chw", scale: int = 3) -> None:
        side = _CELLS * scale
        self.layout, self.scale = layout, scale
        shape = (3, side, side) if layout == "chw" else (side, side, 3)
        super().__init__(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(3))

    def begin(self) -> None:
        self._ball = int(self.np_random.integers(_CELLS))
        self._paddle = 3

    def observe(self) -> Any:
        cells = np.zeros((3, _CELLS, _CELLS), np.uint8)
        cells[0, self.t, self._ball] = 255
        cells[1, _CELLS - 1, self._paddle] = 255
        pixels = cells.repeat(self.scale, axis=1).repeat(self.scale, axis=2)
        return pixels if self.layout == "chw" else np.ascontiguousarray(pixels.transpose(1, 2, 0))

    def act(self, action: Any) -> tuple[float, bool, bool]:
        self._paddle = min(max(self._paddle + int(action) - 1, 0), _CELLS - 1)
        if self.t + 1 < _CELLS - 1:
            return 0.0, False, False
        return 1.0 if self._paddle == self._ball else -1.0, True, False
