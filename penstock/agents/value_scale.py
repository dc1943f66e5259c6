"""The unit of an agent's values: returns of any size are learned as numbers of about 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_RATE = 0.01


class ValueScale(nn.Module):
    """The running root mean square of returns, in which an agent gives its values and takes its rewards.

    PopArt (van Hasselt et al. 2016, arXiv:1602.07714, proposition 1; its policy gradient in the same unit: Hessel et
    al. 2018, arXiv:1809.04474, eq. 11) without its shift. Where all returns are alike, a deviation from their mean
    vanishes, and one that differs would then be huge; their root mean square does not. An agent takes part by a module
    `value_scale` beside its linear layer `value_head`, which starts at 0, as the unit is not known yet.
    """

    square: Tensor
    """Mean square of returns, float64; 0 before a return other than 0 was seen."""
    batches: Tensor
    """Batches that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("square", torch.zeros((), dtype=torch.float64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.float64))

    @property
    def unit(self) -> Tensor:
        """What a value of 1 stands for, a scalar; 1 before a return was seen."""
        return torch.where(self.square > 0.0, self.square.sqrt(), 1.0)

    def forward(self, reward: Tensor) -> Tensor:
        """Rewards in the unit."""
        return reward / self.unit.to(reward.dtype)

    @torch.no_grad()
    def update(self, mean_square: Tensor, head: nn.Linear) -> Tensor:
        """Merges the mean square of a batch's returns in the present unit; the head goes on giving the same values.

        The first batches count alike, later ones as one of a hundred. Zeros alone, and what is not finite, are passed
        over.

        Returns:
            The factor, a scalar, by which numbers in the unit before become numbers in the new one.
        """
        before = self.unit
        square = mean_square.double() * before.square()
        counts = square.isfinite() & (square > 0.0)
        self.batches += counts
        rate = (1.0 / self.batches.clamp(min=1.0)).clamp(min=_RATE)
        self.square.copy_(torch.where(counts, self.square + rate * (square - self.square), self.square))
        factor = before / self.unit
        for parameter in head.parameters():
            parameter.mul_(factor.to(parameter.dtype))
        return factor


def value_scale_of(agent: nn.Module) -> ValueScale | None:
    """The agent's value scale; None if its values are in the unit of rewards."""
    found: Any = agent._modules.get("value_scale")  # a default of the class would hide the module
    return found
