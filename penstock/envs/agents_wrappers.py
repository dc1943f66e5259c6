"""Wrappers of environments of many agents, Parallel and AEC: names as text, fewer keys, objectives as one reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.errors import ConfigError, EnvWorkerError, nearest
from penstock.envs.pettingzoo import takes_turns


class AgentsWrapper:
    """An environment of many agents whose attributes are those of the environment below."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # as while it is unpickled
            raise AttributeError(name)
        return getattr(self.env, name)


class NamedAgents(AgentsWrapper):
    """Agents that are numbers, or anything else that is no text, by `str(name)`; the environment sees its own names."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._ours = {agent: str(agent) for agent in env.possible_agents}
        self._theirs = {name: agent for agent, name in self._ours.items()}

    @property
    def possible_agents(self) -> list[str]:
        """Their names, as text."""
        return [*self._ours.values()]

    @property
    def agents(self) -> list[Any]:
        """Names of those that are there."""
        return [self._ours.get(agent, agent) for agent in self.env.agents]

    def observation_space(self, agent: str) -> gym.Space[Any]:
        """Space of an agent's observations."""
        return self.env.observation_space(self._theirs[agent])

    def action_space(self, agent: str) -> gym.Space[Any]:
        """Space of an agent's actions."""
        return self.env.action_space(self._theirs[agent])

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As the environment's, by name."""
        return self._by_name(self.env.reset(seed=seed, options=options))

    def step(self, actions: Any) -> Any:
        """As the environment's, by name."""
        return self._by_name(self.env.step({self._theirs[agent]: action for agent, action in actions.items()}))

    def _by_name(self, given: Any) -> Any:
        if isinstance(given, Mapping):
            return {self._ours.get(agent, agent): x for agent, x in given.items()}
        return tuple(map(self._by_name, given)) if isinstance(given, tuple) else given


class NamedTurns(NamedAgents):
    """The same of agents that take turns."""

    def step(self, actions: Any) -> Any:
        """The action of the agent to act, as the environment takes it."""
        return self.env.step(actions)

    def last(self, *args: Any, **kwargs: Any) -> Any:
        """As the environment's: the turn of an agent."""
        return self.env.last(*args, **kwargs)

    def observe(self, agent: str) -> Any:
        """The observation of an agent."""
        return self.env.observe(self._theirs[agent])

    @property
    def agent_selection(self) -> Any:
        """Name of the agent to act."""
        return self._ours.get(self.env.agent_selection, self.env.agent_selection)

    @property
    def rewards(self) -> Any:
        """Rewards of the last move, by name."""
        return self._by_name(self.env.rewards)

    @property
    def _cumulative_rewards(self) -> Any:
        return self._by_name(self.env._cumulative_rewards)

    @property
    def terminations(self) -> Any:
        """Flags by name."""
        return self._by_name(self.env.terminations)

    @property
    def truncations(self) -> Any:
        """Flags by name."""
        return self._by_name(self.env.truncations)

    @property
    def infos(self) -> Any:
        """Infos by name."""
        return self._by_name(self.env.infos)


class DropAgentsKeys(AgentsWrapper):
    """Shows the Dict observations of agents without some of their keys; an agent may lack some of them.

    Raises:
        ConfigError: no agent's observation has a key, or an agent's would be empty.
    """

    def __init__(self, env: Any, keys: Sequence[str]) -> None:
        super().__init__(env)
        seen = {agent: env.observation_space(agent) for agent in env.possible_agents}
        known = {key for space in seen.values() if isinstance(space, spaces.Dict) for key in space.spaces}
        for key in keys:
            if key not in known:
                raise ConfigError(
                    f"drop={tuple(keys)}: no agent's observation has {key!r}; "
                    f"{nearest(key, known) if known else f'they are {next(iter(seen.values()))!r}, and no Dicts'}"
                )
        self._keys, self._spaces = frozenset(keys), dict[Any, gym.Space[Any]]()
        for agent, space in seen.items():
            if isinstance(space, spaces.Dict):
                space = spaces.Dict(self._kept(space.spaces))
                if not space.spaces:
                    raise ConfigError(
                        f"drop={tuple(keys)} leaves nothing of the observation of agent {agent!r}; keep one of its keys"
                    )
            self._spaces[agent] = space

    def observation_space(self, agent: Any) -> gym.Space[Any]:
        """Space of an agent's observations, without the keys."""
        return self._spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As the environment's, without the keys."""
        return self._first(self.env.reset(seed=seed, options=options), self._each)

    def step(self, actions: Any) -> Any:
        """As the environment's, without the keys."""
        return self._first(self.env.step(actions), self._each)

    def _kept(self, obs: Any) -> Any:
        return {key: x for key, x in obs.items() if key not in self._keys} if isinstance(obs, Mapping) else obs

    def _each(self, obs: Any) -> Any:
        return {agent: self._kept(x) for agent, x in obs.items()} if isinstance(obs, Mapping) else obs

    def _first(self, given: Any, shown: Callable[[Any], Any]) -> Any:
        return (shown(given[0]), *given[1:]) if isinstance(given, tuple) and given else given


class DropTurnsKeys(DropAgentsKeys):
    """The same of agents that take turns."""

    def step(self, actions: Any) -> Any:
        """As the environment's."""
        return self.env.step(actions)

    def last(self, *args: Any, **kwargs: Any) -> Any:
        """The turn of an agent, its observation without the keys."""
        return self._first(self.env.last(*args, **kwargs), self._kept)

    def observe(self, agent: Any) -> Any:
        """The observation of an agent, without the keys."""
        return self._kept(self.env.observe(agent))


class WeightedAgents(AgentsWrapper):
    """Rewards of several objectives as one number for each agent, their weighted sum; see `wrappers.WeightedReward`."""

    def __init__(self, env: Any, weights: npt.NDArray[np.float64] | None) -> None:
        super().__init__(env)
        self._weights = weights

    def step(self, actions: Any) -> Any:
        """As the environment's, each reward being one number."""
        found = self.env.step(actions)
        return (found[0], self._each(found[1]), *found[2:]) if isinstance(found, tuple) and len(found) == 5 else found

    def _each(self, rewards: Any) -> Any:
        if not isinstance(rewards, Mapping):
            return rewards
        return {agent: weighted_sum(reward, self._weights) for agent, reward in rewards.items()}


class WeightedTurns(WeightedAgents):
    """The same of agents that take turns."""

    def step(self, actions: Any) -> Any:
        """As the environment's."""
        return self.env.step(actions)

    def last(self, *args: Any, **kwargs: Any) -> Any:
        """The turn of an agent, its reward being one number."""
        obs, reward, *rest = self.env.last(*args, **kwargs)
        return obs, weighted_sum(reward, self._weights), *rest

    @property
    def rewards(self) -> Any:
        """Rewards of the last move, each one number."""
        return self._each(self.env.rewards)

    @property
    def _cumulative_rewards(self) -> Any:
        return self._each(self.env._cumulative_rewards)


def weighted_sum(reward: Any, weights: npt.NDArray[np.float64] | None) -> float:
    """One number of a reward for each objective; 0 of a plain 0, as AEC environments have for who was not paid yet.

    Raises:
        EnvWorkerError: another number of rewards than of weights.
    """
    rewards = np.asarray(reward, np.float64)
    if weights is None or (rewards.ndim == 0 and rewards == 0):
        return float(rewards.sum())
    if rewards.shape != weights.shape:
        raise EnvWorkerError(f"rewards {rewards.tolist()} with weights {weights.tolist()}; make them fit")
    return float(rewards @ weights)


def shown_agents(env: Any, drop: Sequence[str] = ()) -> Any:
    """An environment of many agents whose names are text, its observations without the keys of `drop`."""
    turns, names = takes_turns(env), env.possible_agents
    if not isinstance(names, (set, frozenset)) and not all(isinstance(agent, str) for agent in names):
        env = NamedTurns(env) if turns else NamedAgents(env)
    if drop:
        env = DropTurnsKeys(env, drop) if turns else DropAgentsKeys(env, drop)
    return env
