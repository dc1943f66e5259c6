"""The contract of environments of many agents: each function returns the first violation as (agent, text), or None.

`envs/contract.py` checks values, agent by agent, as for any environment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.envs.conform.values import NOT_YOURS
from penstock.envs.contract import describe_step_violation

Violation: TypeAlias = "tuple[str | None, str] | None"
"""Agent, None if it is about no single one, and message."""

NO_CHOICE = (
    "its action mask is all zero, so it can do nothing at all; give at least one legal action (a pass), or end its "
    "episode"
)
_RLLIB = (
    "'__all__' is of RLlib's MultiAgentEnv: PettingZoo's API, which is expected here, has a flag for each agent, and "
    "an empty env.agents once all are over"
)
_PARTS = ("observations", "rewards", "terminations", "truncations", "infos")


def parallel_reset_violation(result: Any) -> Violation:
    """The first way in which a result of a Parallel environment's `reset` breaks PettingZoo's API."""
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(x, Mapping) for x in result):
        return None, f"got {_brief(result)}, expected a tuple (observations, infos) of two dicts by agent"
    for agent, info in result[1].items():
        if not isinstance(info, Mapping):
            cure = NOT_YOURS if info is None else ""
            return agent, f"info: got {_brief(info)}, expected a dict; return {{}} if there is nothing to say{cure}"
    return None


def parallel_step_violation(result: Any, names: Sequence[str]) -> Violation:
    """The first way in which a result of `step`, but for values of observations, breaks PettingZoo's API.

    Args:
        names: the agents that acted.
    """
    if not isinstance(result, tuple) or len(result) != 5 or not all(isinstance(x, Mapping) for x in result):
        return None, f"got {_brief(result)}, expected a tuple of five dicts by agent: {', '.join(_PARTS)}"
    for part, found in zip(_PARTS[:4], result):
        for agent in names:
            if agent not in found:
                hint = f"; {_RLLIB}" if "__all__" in found else ""
                return agent, (
                    f"{part} lack it: got {sorted(map(str, found))}; return one for every agent that acted{hint}"
                )
    obs, rewards, terminations, truncations, infos = result
    for agent in names:
        values = (obs[agent], rewards[agent], terminations[agent], truncations[agent], infos.get(agent, {}))
        if message := describe_step_violation(values):
            return agent, message
    return None


def agents_violation(
    before: Sequence[str], ended: Collection[str], now: Sequence[str], gone: Collection[str], possible: Collection[str]
) -> Violation:
    """The first way in which `env.agents` after a step does not follow from those before it.

    Args:
        ended: those of `before` that terminated or were truncated. gone: that ended earlier in this episode.
    """
    for agent in now:
        if agent in ended:
            return agent, (
                "it has ended, yet it stands in env.agents and would have to act; take it out of env.agents in the "
                "step in which it ends"
            )
        if agent in gone:
            return agent, "it ended earlier in this episode and is back in env.agents; use another name for a new agent"
        if agent not in possible:
            return agent, f"it is none of possible_agents {list(possible)}; name every agent there"
    if len({*now}) != len(now):
        return None, f"env.agents is {list(now)}; expected each name once"
    for agent in before:
        if agent not in now and agent not in ended:
            return agent, (
                "it is gone from env.agents without an end; set its termination or truncation in the step after which "
                "it is not there"
            )
    return None


def turn_violation(
    result: Any, selected: Any, agents: Sequence[str], possible: Collection[str], look: bool = True
) -> Violation:
    """The first way in which a turn of an AEC environment, but for values of the observation, breaks PettingZoo's API.

    Args:
        result: of `last()`. selected: `agent_selection`. agents: `env.agents`. look: there is a result.
    """
    if selected not in possible:
        return None, f"agent_selection is {selected!r}; expected one of possible_agents {list(possible)}"
    if selected not in agents:
        return (
            selected,
            f"agent_selection names it though it is not in env.agents {list(agents)}: a dead agent must act",
        )
    if look and (message := describe_step_violation(result)):
        return selected, f"last(): {message}"
    return None


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(x).__name__ for x in value)})"
    return f"{type(value).__name__} {value!r}"[:80]
