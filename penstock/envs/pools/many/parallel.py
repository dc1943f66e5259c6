"""ParallelEnvs: who is there in each of E Parallel environments and where they sit, from reset to reset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from penstock.core.tree import Tree
from penstock.envs.pools.many.agent_envs import AgentEnvs
from penstock.envs.pools.many.contract import agents_violation, parallel_reset_violation, parallel_step_violation


class AgentStep(NamedTuple):
    """One agent's part of a step or reset."""

    agent: str
    policy: int
    column: int
    obs: Any
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    valid: bool = True
    """False: it came with this reset or step, so that its first observation is all there is."""


class ParallelEnvs:
    """The agents of E Parallel environments. A seat whose agent has ended is free from the step after on."""

    def __init__(self, host: AgentEnvs) -> None:
        self.host, self.seats = host, host.seating.seats
        E = len(host.envs)
        self.alive: list[list[str]] = [[] for _ in range(E)]
        """Agents of each environment, in its own order."""
        self.where: list[list[tuple[str, int, int]]] = [[] for _ in range(E)]
        """The same with their policy and column."""
        self.own: list[Callable[[Sequence[Any]], Sequence[Any]]] = [_reader([])] * E
        """Reads what belongs to each of them out of a list of the columns of all policies, one after the other."""
        self.full: list[list[Callable[[Any], Sequence[Any]]] | None] = [None] * E
        """Reads all agents of each policy, seat by seat, out of a dict; None unless every seat is taken."""
        self.gone: list[set[str]] = [set() for _ in range(E)]
        self._leaving: list[list[str]] = [[] for _ in range(E)]
        self._starts = [0, *accumulate(E * n for n in self.seats)]
        self._readers: dict[tuple[tuple[str, ...], ...], list[Callable[[Any], Sequence[Any]]]] = {}

    def open(self, e: int, result: Any) -> list[AgentStep]:
        """Seats who is there after a reset, which returned this."""
        host = self.host
        if found := parallel_reset_violation(result):
            host.refuse(e, "reset", *found)
        obs, infos = result
        self.clear(e)
        now = list(host.envs[e].agents)
        if not now:
            host.refuse(
                e, "reset", None, "env.agents is empty: the episode is over before any agent acted; let one act"
            )
        self._check_came(e, "reset", now, obs)
        return self._come(e, "reset", now, now, self.shown(e, "reset", now, obs, infos))

    def answer(self, e: int, result: Any, chosen: dict[str, Tree]) -> list[AgentStep]:
        """The checked outcome of a step for each agent; agents that end give up their seats, others may come.

        The environment's episode is over once no agent is left; `host.over` is then True.
        """
        host, names = self.host, self.alive[e]
        if found := parallel_step_violation(result, names):
            host.refuse(e, "step", *found, chosen)
        obs, reward, terminated, truncated, infos = result
        for agent, paid in reward.items() if len(reward) > len(names) else ():
            if agent not in names and np.any(paid):
                host.lose(e, agent, paid, names, chosen)
        now = list(host.envs[e].agents)
        ended = [agent for agent in names if terminated[agent] or truncated[agent]]
        if found := agents_violation(names, ended, now, self.gone[e], host.index):
            host.refuse(e, "step", *found, chosen)
        came = [agent for agent in now if agent not in names]
        self._check_came(e, "step", came, obs)
        shown = self.shown(e, "step", [*names, *came], obs, infos, ended)
        steps = [
            AgentStep(agent, p, b, shown[agent], reward[agent], terminated[agent], truncated[agent])
            for agent, p, b in self.where[e]
        ]
        for agent in self._leaving[e]:
            host.seats[e].leave(agent)
        self._leaving[e] = ended
        self.gone[e].update(ended)
        steps += self._come(e, "step", came, now, shown)
        if not now:
            host.finish(e)
        return steps

    def shown(self, e: int, phase: str, names: Sequence[str], obs: Any, infos: Any, ended: Collection[str] = ()) -> Any:
        """Observations of these agents, by agent; `ended`: those whose episode has ended."""
        host = self.host
        if not host.showing.anything:
            return obs
        state = host.state_of(e, phase, obs)
        return {
            agent: host.show(e, phase, agent, obs[agent], infos.get(agent), state, agent in ended) for agent in names
        }

    def at(self, p: int, b: int) -> tuple[int, str | None]:
        """Environment and agent of a column; None if nobody sits there, or its agent has just ended."""
        e = b // self.seats[p]
        return e, next((agent for agent, q, c in self.where[e] if (q, c) == (p, b)), None)

    def _come(self, e: int, phase: str, came: Sequence[str], now: list[str], shown: Any) -> list[AgentStep]:
        """Seats agents that come; `now` is who is there from now on."""
        places = {agent: (p, b) for agent, p, b in self.where[e]}
        steps: list[AgentStep] = []
        for agent in came:
            places[agent] = p, b = self.host.sit(e, agent, phase)
            steps.append(AgentStep(agent, p, b, shown[agent], valid=False))
        self.alive[e] = now
        self.where[e] = where = [(agent, *places[agent]) for agent in now]
        self.own[e] = _reader([self._starts[p] + b for _, p, b in where])
        self.full[e] = None
        if now and len(now) == sum(self.seats):
            names = [
                [agent for agent, q, _ in sorted(where, key=itemgetter(2)) if q == p] for p in range(len(self.seats))
            ]
            key = tuple(map(tuple, names))
            if key not in self._readers:
                self._readers[key] = [_reader(each) for each in names]
            self.full[e] = self._readers[key]
        return steps

    def _check_came(self, e: int, phase: str, came: Sequence[str], obs: Any) -> None:
        for agent in came:
            if agent not in self.host.index:
                known = list(self.host.index)
                self.host.refuse(e, phase, agent, f"it is none of possible_agents {known}; name every agent there")
            if agent not in obs:
                self.host.refuse(e, phase, agent, "it is in env.agents, but there is no observation of it; return one")

    def snapshot(self, e: int) -> dict[str, Any]:
        """Who is there and where, as plain data."""
        host = self.host
        return {
            "where": [[agent, p, b - e * self.seats[p]] for agent, p, b in self.where[e]],
            "gone": sorted(self.gone[e]),
            "leaving": [[agent, *host.seats[e].of(agent)] for agent in self._leaving[e]],
        }

    def restore(self, e: int, found: dict[str, Any]) -> None:
        """Inverse of `snapshot`, called after a reset."""
        self.clear(e)
        self.gone[e] = {*found["gone"]}
        self._leaving[e] = [agent for agent, _, _ in found["leaving"]]
        for agent, p, seat in (*found["where"], *found["leaving"]):
            self.host.seats[e].put(agent, p, seat)
        self.where[e] = [(agent, p, e * self.seats[p] + seat) for agent, p, seat in found["where"]]
        self._come(e, "reset", [], [agent for agent, _, _ in found["where"]], {})

    def clear(self, e: int) -> None:
        """Nobody is there."""
        self.alive[e], self.where[e], self.full[e] = [], [], None
        self.gone[e], self._leaving[e] = set(), []


def _reader(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """A function that reads these keys of a dict, or places in a list, in order."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda found: [found[key] for key in keys]
