"""Optimizers by agent and settings."""

from __future__ import annotations

from typing import Any

import torch

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError
from penstock.learn.algorithm import Optimizers


def adam(agent: Agent, settings: Any) -> Optimizers:
    """Adam over all parameters with `settings.lr` and epsilon 1e-5 (as OpenAI baselines' PPO; torch's is 1e-8)."""
    return {"all": torch.optim.Adam(trainable(agent), lr=settings.lr, eps=1e-5, fused=True)}


def rmsprop(agent: Agent, settings: Any) -> Optimizers:
    """RMSprop as A3C's appendix and OpenAI baselines' A2C use it: alpha 0.99, epsilon 1e-5."""
    return {"all": torch.optim.RMSprop(trainable(agent), lr=settings.lr, alpha=0.99, eps=1e-5, foreach=True)}


def trainable(agent: Agent) -> list[torch.nn.Parameter]:
    """The parameters that want gradients. Raises ConfigError if there are none."""
    parameters = [p for p in agent.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"{type(agent).__name__} has no trainable parameters; an agent must hold its networks as modules"
        )
    return parameters
