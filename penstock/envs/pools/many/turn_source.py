"""Where an AEC environment keeps whose turn it is: past wrappers that pass attributes on, each for a microsecond."""

from __future__ import annotations

from typing import Any

_KEPT = ("agents", "agent_selection", "_cumulative_rewards", "terminations", "truncations", "infos")


def turn_source(env: Any) -> Any:
    """The layer that holds what `last()` reads besides the observation, of an environment that has been reset.

    `env` itself, unless `last` is PettingZoo's own and so is how each layer above passes the attributes on.
    """
    layer: Any = env
    if getattr(type(env).last, "__module__", "") != "pettingzoo.utils.env":
        return env
    while not any(name in getattr(layer, "__dict__", ()) for name in _KEPT):
        passes_on = getattr(getattr(type(layer), "__getattr__", None), "__module__", "")
        if not passes_on.startswith("pettingzoo.utils.wrappers.") or _overrides(layer):
            return env
        layer = layer.env
    return layer if all(name in layer.__dict__ for name in _KEPT) and not _overrides(layer) else env


def last_turn(env: Any, source: Any, agent: Any) -> tuple[Any, Any, Any, Any, Any]:
    """`env.last()`, where `source` is not the environment itself."""
    return (
        env.observe(agent),
        source._cumulative_rewards[agent],
        source.terminations[agent],
        source.truncations[agent],
        source.infos[agent],
    )


def _overrides(layer: Any) -> bool:
    """True if its class has one of the attributes, as a property or a default."""
    return any(hasattr(type(layer), name) for name in _KEPT)
