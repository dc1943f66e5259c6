"""Environments of many agents of others in the form that the contract wants: names as text, values, late rewards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from penstock.envs.conform.observations import conform_space, conformer
from penstock.envs.conform.values import conform_flag, conform_info, conform_reward


class ConformAgents:
    """A Parallel or AEC environment whose agents have text for names; all else that it has is passed on.

    What an agent is paid in a step after its last one reaches nobody, and is left out with a warning.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._own = {str(agent): agent for agent in env.possible_agents}
        self._spaces: dict[str, Any] = {}
        self._conform: dict[str, Callable[[Any], Any]] = {}
        self._told = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "env":  # of a copy that is not whole yet
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def possible_agents(self) -> list[str]:
        return list(self._own)

    @property
    def agents(self) -> list[str]:
        return [str(agent) for agent in self.env.agents]

    def observation_space(self, agent: str) -> Any:
        if agent not in self._spaces:
            space = self.env.observation_space(self._named(agent))
            self._spaces[agent], self._conform[agent] = conform_space(space), conformer(space)
        return self._spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.env.action_space(self._named(agent))

    def _named(self, agent: str) -> Any:
        """The environment's own name of an agent, which may have come after it was made."""
        if agent not in self._own:
            self._own |= {str(name): name for name in (*self.env.possible_agents, *self.env.agents)}
        return self._own[agent]

    def _shown(self, agent: str, obs: Any) -> Any:
        if agent not in self._conform:
            self.observation_space(agent)
        return self._conform[agent](obs)

    def _paid(self, rewards: Mapping[Any, Any], there: Iterable[str]) -> dict[str, Any]:
        """The rewards of those who are there."""
        paid = {str(agent): conform_reward(reward) for agent, reward in rewards.items()}
        late = {agent: reward for agent, reward in paid.items() if agent not in there and np.any(reward)}
        if late and not self._told:
            self._told = True
            warnings.warn(
                f"{type(self.env).__name__} rewards {late} after these agents' episodes: nobody acts who could learn "
                "from it, so Conform leaves such rewards out, of returns as well",
                stacklevel=2,
            )
        return {agent: reward for agent, reward in paid.items() if agent not in late}


class ConformParallel(ConformAgents):
    """A Parallel environment."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        found = self.env.reset(seed=seed, options=options)
        obs, infos = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        return self._seen(obs), self._infos(infos)

    def step(self, actions: Mapping[str, Any]) -> Any:
        found = self.env.step({self._named(agent): action for agent, action in actions.items()})
        if not isinstance(found, tuple) or len(found) != 5 or not all(isinstance(x, Mapping) for x in found[:4]):
            return found
        obs, rewards, terminated, truncated, infos = found
        flags = (_texts(x, conform_flag) for x in (terminated, truncated))
        return self._seen(obs), self._paid(rewards, actions), *flags, self._infos(infos)

    def _seen(self, obs: Any) -> Any:
        """Observations by agent; of one that is none of `possible_agents` as it is, which the contract refuses."""
        if not isinstance(obs, Mapping):
            return obs
        return {
            str(agent): self._shown(str(agent), seen) if str(agent) in self._own else seen
            for agent, seen in obs.items()
        }

    def _infos(self, infos: Any) -> Any:
        return {} if infos is None else _texts(infos, conform_info)


class ConformTurns(ConformAgents):
    """An AEC environment."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> None:
        self.env.step(action)
        if not self._told:
            self._paid(getattr(self.env, "rewards", {}), self.agents)

    @property
    def agent_selection(self) -> str:
        return str(self.env.agent_selection)

    def observe(self, agent: str) -> Any:
        return self._shown(agent, self.env.observe(self._named(agent)))

    def last(self, observe: bool = True) -> Any:
        found = self.env.last(observe=observe)
        if not isinstance(found, tuple) or len(found) != 5:
            return found
        obs, reward, terminated, truncated, info = found
        flags = conform_flag(terminated), conform_flag(truncated)
        shown = self._shown(self.agent_selection, obs) if observe else obs
        return shown, conform_reward(reward), *flags, conform_info(info)

    @property
    def rewards(self) -> dict[str, Any]:
        return self._paid(self.env.rewards, self.agents)

    @property
    def _cumulative_rewards(self) -> dict[str, Any]:
        return _texts(self.env._cumulative_rewards, conform_reward)

    @property
    def terminations(self) -> dict[str, Any]:
        return _texts(self.env.terminations, conform_flag)

    @property
    def truncations(self) -> dict[str, Any]:
        return _texts(self.env.truncations, conform_flag)

    @property
    def infos(self) -> dict[str, Any]:
        return _texts(self.env.infos, conform_info)


def _texts(found: Any, conform: Callable[[Any], Any]) -> Any:
    """A dict by agent with text for keys, its values conformed; what is no dict as it is."""
    if not isinstance(found, Mapping):
        return found
    return {str(agent): conform(value) for agent, value in found.items()}
