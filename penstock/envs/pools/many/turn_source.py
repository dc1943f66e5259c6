"""Finds the object that holds `agent_selection`, below wrappers that forward attributes at a microsecond each."""

from __future__ import annotations

import functools
from typing import Any

_KEPT = frozenset(("agents", "agent_selection", "_cumulative_rewards", "terminations", "truncations", "infos"))


def turn_source(env: Any) -> Any:
    """The layer that holds what `last()` reads besides the observation, of an environment that has been reset.

    `env` itself, unless `last` is PettingZoo's own and so is how each layer above passes the attributes on.
    """
    layer: Any = env
    if not _reads_attributes(type(env)):
        return env
    while _KEPT.isdisjoint(getattr(layer, "__dict__", ())):
        if not _passes_on(type(layer)):
            return env
        layer = layer.env
    return layer if layer.__dict__.keys() >= _KEPT and not _overrides(type(layer)) else env


def last_turn(env: Any, source: Any, agent: Any) -> tuple[Any, Any, Any, Any, Any]:
    """`env.last()`, where `source` is not the environment itself."""
    return (
        env.observe(agent),
        source._cumulative_rewards[agent],
        source.terminations[agent],
        source.truncations[agent],
        source.infos[agent],
    )


@functools.lru_cache(maxsize=256)
def _reads_attributes(cls: Any) -> bool:
    """True if `last` is PettingZoo's own."""
    return getattr(cls.last, "__module__", "") == "pettingzoo.utils.env"


@functools.lru_cache(maxsize=256)
def _passes_on(cls: Any) -> bool:
    """True for a layer whose attributes are those of the layer below, by PettingZoo's `__getattr__`."""
    passes_on = getattr(getattr(cls, "__getattr__", None), "__module__", "")
    return passes_on.startswith("pettingzoo.utils.wrappers.") and not _overrides(cls)


@functools.lru_cache(maxsize=256)
def _overrides(cls: Any) -> bool:
    """True if the class has one of the attributes, as a property or a default."""
    return any(hasattr(cls, name) for name in _KEPT)
