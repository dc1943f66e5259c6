"""The unit of an agent's values, which moves with the returns of each batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.agents.value_scale import value_unit
from penstock.learn.columns import batch_mean


def moved_unit(agent: Any, return_: Tensor, valid: Tensor) -> Tensor | float:
    """Moves the agent's value scale by the returns [T, B] of the batches of all learners; returns the new unit.

    Advantages in it, and value errors over its square, are of about the same size whatever the rewards.
    """
    scale = getattr(agent, "value_scale", None)
    if scale is not None:
        scale.update(batch_mean(return_.double().square(), valid), agent.value_head)
    return value_unit(agent)
