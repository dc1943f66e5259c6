"""The unit of a value head: it learns returns of any size as numbers of about 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FIRST_GAIN = 1e-8
"""Gain of a value head before its unit is known: values of about 0 in any unit, which pass gradients all the same."""
_RATE = 0.01


class ValueScale(nn.Module):
    """Multiplies the output of a value head by the running root mean square of returns.

    PopArt (van Hasselt et al. 2016, arXiv:1602.07714, proposition 1; for policy gradients Hessel et al. 2018,
    arXiv:1809.04474) without its shift: where all returns are alike, their deviation vanishes, and one that differs
    would be huge in it; their root mean square stays. An agent takes part by a module `value_scale` behind its linear
    layer `value_head` of gain `FIRST_GAIN`.
    """

    square: Tensor
    """Mean square of returns, float64; 0 before one other than 0 was seen."""
    batches: Tensor
    """Batches that made it."""
    unit: Tensor
    """Its root, float32: what an output of 1 stands for; 1 before a return was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("square", torch.zeros((), dtype=torch.float64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unit", torch.ones(()))

    def forward(self, output: Tensor) -> Tensor:
        """Values, in the unit of rewards, of the head's output."""
        return output * self.unit

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes parameters of an agent without a value scale, too: their values are in the unit of rewards."""
        for name, start in (("square", 0.0), ("batches", 0.0), ("unit", 1.0)):
            state_dict.setdefault(prefix + name, torch.full_like(self.get_buffer(name), start))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def update(self, mean_square: Tensor, head: nn.Linear) -> None:
        """Merges the mean square of a batch's returns; the head goes on giving the same values.

        The first batches count alike, later ones as one of a hundred. Zeros alone, and what is not finite, are passed
        over.
        """
        counts = mean_square.isfinite() & (mean_square > 0.0)
        self.batches += counts
        rate = (1.0 / self.batches.clamp(min=1.0)).clamp(min=_RATE)
        moved = self.square + rate * (mean_square.double() - self.square)
        self.square.copy_(torch.where(counts, moved, self.square))
        unit = torch.where(self.square > 0.0, self.square.sqrt(), 1.0).float()
        for parameter in head.parameters():
            parameter.mul_((self.unit / unit).to(parameter.dtype))
        self.unit.copy_(unit)


def value_unit(agent: Any) -> Tensor | float:
    """What an output of 1 of the agent's value head stands for; 1 for an agent without a value scale."""
    scale: ValueScale | None = getattr(agent, "value_scale", None)
    return 1.0 if scale is None else scale.unit
