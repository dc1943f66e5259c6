"""Returns and advantages in the unit of an agent's values, which moves with the returns of each batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.agents.value_scale import value_scale_of
from penstock.learn.columns import batch_mean


def renormalized(agent: Any, advantage: Tensor, return_: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the agent's value scale by the returns [T, B] of a batch, and gives both in the new unit.

    The statistics are of the batches of all learners. An agent without a value scale keeps what it has.
    """
    scale = value_scale_of(agent)
    if scale is None:
        return advantage, return_
    factor = scale.update(batch_mean(return_.double().square(), valid), agent.value_head).to(return_.dtype)
    return advantage * factor, return_ * factor
