"""Simulators by id, `mjlab:TASK`: each is one batched environment of tensors, made by an adapter of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from penstock.core.config import import_object
from penstock.core.errors import ConfigError

_ADAPTERS = {
    "brax": "penstock.tensor_envs.sims.functional:brax",
    "isaaclab": "penstock.tensor_envs.sims.isaaclab:IsaacLab",
    "maniskill": "penstock.tensor_envs.sims.maniskill:ManiSkill",
    "mjlab": "penstock.tensor_envs.sims.mjlab:Mjlab",
    "playground": "penstock.tensor_envs.sims.functional:playground",
}


def is_simulator_id(env: str) -> bool:
    """True for `SIMULATOR:TASK`."""
    return env.partition(":")[0] in _ADAPTERS and ":" in env


def simulator_factory(env: str) -> Callable[..., Any]:
    """The callable that makes the environment of such an id; imported now, since it loads torch."""
    simulator, _, task = env.partition(":")
    if not task or ":" in task:
        raise ConfigError(f"env={env!r}; expected {simulator}:TASK, the name of one of its tasks")
    return functools.partial(import_object(_ADAPTERS[simulator]), env)
