"""A task with image observations that a small network learns in seconds, on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from penstock.tensor_envs.toy import TensorToy

_CELLS = 8


class PixelCatch(TensorToy):
    """A ball falls, a paddle catches it: `penstock.envs.toy.PixelCatch` as tensors, [3, 24, 24] uint8.

    The best return is 1; a paddle that never moves gets -0.75 on average.
    """

    def __init__(self, num_envs: int = 1, device: str = "cpu", scale: int = 3) -> None:
        self.scale, side = scale, _CELLS * scale
        super().__init__(num_envs, device, spaces.Box(0, 255, (3, side, side), np.uint8), spaces.Discrete(3), _CELLS)
        self._slots = torch.arange(num_envs, device=self.device)

    def fresh(self) -> dict[str, Tensor]:
        shape, int64 = (self.num_envs,), torch.int64
        return {
            "ball": torch.randint(_CELLS, shape, generator=self.generator, device=self.device),
            "paddle": torch.full(shape, 3, dtype=int64, device=self.device),
            "row": torch.zeros(shape, dtype=int64, device=self.device),
        }

    def advance(self, state: dict[str, Tensor], action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        paddle, row = (state["paddle"] + action - 1).clamp(0, _CELLS - 1), state["row"] + 1
        landed = row >= _CELLS - 1
        caught = (paddle == state["ball"]).float() * 2 - 1
        return {"ball": state["ball"], "paddle": paddle, "row": row.clamp(max=_CELLS - 1)}, caught * landed, landed

    def observe(self, state: dict[str, Any]) -> Tensor:
        cells = torch.zeros(self.num_envs, 3, _CELLS, _CELLS, dtype=torch.uint8, device=self.device)
        cells[self._slots, 0, state["row"], state["ball"]] = 255
        cells[self._slots, 1, _CELLS - 1, state["paddle"]] = 255
        return cells.repeat_interleave(self.scale, 2).repeat_interleave(self.scale, 3)
