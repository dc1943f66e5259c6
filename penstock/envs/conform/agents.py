"""Environments of many agents of others with values in the form that the contract wants, and no late rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from penstock.envs.agents_wrappers import AgentsWrapper
from penstock.envs.conform.observations import conform_space, conformer
from penstock.envs.conform.values import conform_flag, conform_info, conform_reward


class ConformAgents(AgentsWrapper):
    """A Parallel or AEC environment with values in the form of the contract.

    Rewards of agents that are not there any more are left out: nobody acts who could learn from them.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._spaces: dict[Any, Any] = {}
        self._conform: dict[Any, Callable[[Any], Any]] = {}

    def observation_space(self, agent: Any) -> Any:
        """Space of an agent's observations, with text for keys."""
        if agent not in self._spaces:
            space = self.env.observation_space(agent)
            self._spaces[agent], self._conform[agent] = conform_space(space), conformer(space)
        return self._spaces[agent]

    def _shown(self, agent: Any, obs: Any) -> Any:
        if agent not in self._conform:
            self.observation_space(agent)
        return self._conform[agent](obs)

    def _paid(self, rewards: Mapping[Any, Any], there: Iterable[Any]) -> dict[Any, Any]:
        """The rewards, without those that are no 0 of agents that are not there."""
        paid = {agent: conform_reward(reward) for agent, reward in rewards.items()}
        return {agent: reward for agent, reward in paid.items() if agent in there or not np.any(reward)}


class ConformParallel(ConformAgents):
    """A Parallel environment."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As the environment's, conformed."""
        found = self.env.reset(seed=seed, options=options)
        obs, infos = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        return self._seen(obs), self._infos(infos)

    def step(self, actions: Mapping[Any, Any]) -> Any:
        """As the environment's, conformed."""
        found = self.env.step(actions)
        if not isinstance(found, tuple) or len(found) != 5 or not all(isinstance(x, Mapping) for x in found[:4]):
            return found
        obs, rewards, terminated, truncated, infos = found
        flags = (_each(x, conform_flag) for x in (terminated, truncated))
        return self._seen(obs), self._paid(rewards, actions), *flags, self._infos(infos)

    def _seen(self, obs: Any) -> Any:
        """Observations by agent; that of one that is none of `possible_agents` unchanged: the contract refuses it."""
        if not isinstance(obs, Mapping):
            return obs
        known = self.env.possible_agents
        return {agent: self._shown(agent, seen) if agent in known else seen for agent, seen in obs.items()}

    def _infos(self, infos: Any) -> Any:
        return {} if infos is None else _each(infos, conform_info)


class ConformTurns(ConformAgents):
    """An AEC environment."""

    def observe(self, agent: Any) -> Any:
        """The observation of an agent, conformed."""
        return self._shown(agent, self.env.observe(agent))

    def last(self, observe: bool = True) -> Any:
        """The turn of an agent, conformed."""
        found = self.env.last(observe=observe)
        if not isinstance(found, tuple) or len(found) != 5:
            return found
        obs, reward, terminated, truncated, info = found
        flags = conform_flag(terminated), conform_flag(truncated)
        shown = self._shown(self.env.agent_selection, obs) if observe else obs
        return shown, conform_reward(reward), *flags, conform_info(info)

    @property
    def rewards(self) -> dict[Any, Any]:
        """Rewards of the last move, conformed."""
        return self._paid(self.env.rewards, self.env.agents)

    @property
    def _cumulative_rewards(self) -> dict[Any, Any]:
        return _each(self.env._cumulative_rewards, conform_reward)

    @property
    def terminations(self) -> dict[Any, Any]:
        """Flags, conformed."""
        return _each(self.env.terminations, conform_flag)

    @property
    def truncations(self) -> dict[Any, Any]:
        """Flags, conformed."""
        return _each(self.env.truncations, conform_flag)

    @property
    def infos(self) -> dict[Any, Any]:
        """Infos, conformed."""
        return _each(self.env.infos, conform_info)


def _each(found: Any, conform: Callable[[Any], Any]) -> Any:
    """A dict by agent whose values are conformed; anything else unchanged."""
    return {agent: conform(value) for agent, value in found.items()} if isinstance(found, Mapping) else found
