"""Observations of many agents: each with its mask and a state for centralized critics, as one tree."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, PenstockError, nearest, words_of
from penstock.core.spec import MASK_KEY, STATE_KEY, EnvSpec, LeafSpec, choices, describe
from penstock.core.tree import Tree, is_leaf
from penstock.envs.make import EnvConfig, StateOf
from penstock.envs.pettingzoo import AgentsEnv, agents_of, is_agents_env, takes_turns
from penstock.envs.seats import AgentSpecs, Seating
from penstock.envs.shutdown import close_env
from penstock.envs.spaces import action_dtypes, leaf_spec, space_to_spec
from penstock.envs.wrappers import flat_mask

T = TypeVar("T")
OBS_KEY = "obs"
"""Key of an observation that is no Dict, where a mask or a state stands beside it."""


def read_agents(config: EnvConfig) -> AgentSpecs:
    """Describes an environment of many agents; makes, resets and closes one instance.

    Raises:
        ConfigError: it has a single agent, or see `agent_specs`. EnvWorkerError: its own code raised; the message names
            the method.
    """
    env: Any = config.make()
    try:
        if not is_agents_env(env):
            raise ConfigError(
                f"{config.name} made {type(env).__name__}, which has no `possible_agents`; expected an environment of "
                "many agents, by PettingZoo's API"
            )
        return agent_specs(env, config.name, config.state, config.mask_key or MASK_KEY)
    finally:
        close_env(env, config.name)


def agent_specs(env: AgentsEnv, name: str, state: StateOf = "", mask_key: str = MASK_KEY) -> AgentSpecs:
    """Reads what each agent is shown and does. The environment is reset, since its infos alone say if they hold masks.

    Raises:
        ConfigError: a space without a fixed-size array, no state, a key that the observation has already.
    """
    agents = _asked(name, "possible_agents", lambda: agents_of(env, name))
    plain = {
        agent: _asked(name, f"its spaces of agent {agent!r}", functools.partial(plain_spec, env, agent))
        for agent in agents
    }
    turns = takes_turns(env)
    found = _asked(name, "reset() with seed 0", lambda: env.reset(seed=0))
    infos: Any = (
        getattr(env, "infos", {}) if turns else found[1] if isinstance(found, tuple) and len(found) == 2 else {}
    )
    masked = [plain[agent].action for agent in agents if _has(infos, agent, mask_key) and not _shows(plain[agent])]
    width = _asked(name, "state_space", lambda: state_leaf(env, plain, state, name)) if state else None
    specs: dict[str, EnvSpec] = {}
    for agent, spec in plain.items():
        mask = mask_leaf(spec) if spec.action in masked and not _shows(spec) else None
        specs[agent] = EnvSpec(shown_spec(spec.obs, mask, width, name), spec.action)
    return AgentSpecs(specs, turns)


def plain_spec(env: AgentsEnv, agent: str) -> EnvSpec:
    """Observation and action of one agent by its spaces alone."""
    spaces = {}
    for kind in ("observation", "action"):
        space = getattr(env, f"{kind}_space")(agent)
        if not isinstance(space, gym.Space):
            raise ConfigError(
                f"{type(env).__name__}.{kind}_space({agent!r}) is {space!r}; expected a gymnasium space for every agent"
            )
        spaces[kind] = space_to_spec(space, kind)
    return EnvSpec(spaces["observation"], spaces["action"])


def shown_spec(obs: Tree, mask: LeafSpec | None, state: LeafSpec | None, name: str) -> Tree:
    """The observation's spec with these leaves added: a Dict keeps its keys, anything else stands under `obs`."""
    added = {key: leaf for key, leaf in ((MASK_KEY, mask), (STATE_KEY, state)) if leaf is not None}
    if not added:
        return obs
    below = dict(obs) if isinstance(obs, dict) else {OBS_KEY: obs}
    for key in added:
        if key in below:
            raise ConfigError(
                f"{name}: the observation has a key {key!r} already; rename it, or do not ask for another"
            )
    return {**below, **added}


def mask_leaf(spec: EnvSpec) -> LeafSpec:
    """The leaf of a mask over the choices of an action."""
    size = sum(map(sum, choices(spec.action)))
    if not size:
        raise ConfigError(f"infos hold an action mask, but {describe(spec.action)} has no choices to mask; drop it")
    return LeafSpec("multi_binary", (size,), "int8")


def state_leaf(env: AgentsEnv, plain: Mapping[str, EnvSpec], state: StateOf, name: str) -> LeafSpec:
    """The leaf of the state that is asked for."""
    if state == "joint":
        return LeafSpec("box", (sum(_width(spec.obs) for spec in plain.values()),), "float32")
    if state != "env":
        raise ConfigError(f"env_state={state!r}; {nearest(str(state), ('env', 'joint'))}")
    space = getattr(env, "state_space", None)
    leaf = leaf_spec(space) if isinstance(space, gym.Space) else None
    if leaf is None:
        raise ConfigError(
            f"{name} has no state_space of fixed size ({space!r}); use env_state='joint', the observations of all "
            "agents side by side"
        )
    return leaf


def with_joint_state(agents: AgentSpecs, name: str) -> AgentSpecs:
    """The specs of agents that are shown the joint state as well, as `agent_specs(..., state="joint")` finds them."""
    leaf = LeafSpec("box", (sum(_width(spec.obs) for spec in agents.specs.values()),), "float32")
    specs = {agent: replace(spec, obs=shown_spec(spec.obs, None, leaf, name)) for agent, spec in agents.specs.items()}
    return replace(agents, specs=specs)


def check_shown(env: AgentsEnv, seating: Seating, name: str) -> tuple[str, ...]:
    """Raises ConfigError unless an instance has the agents and spaces that the seating was made for."""
    agents = agents_of(env, name)
    if agents != seating.agents or takes_turns(env) != seating.turns:
        raise ConfigError(
            f"{name} has agents {list(agents)} {_way(takes_turns(env))}, the seating was made for "
            f"{list(seating.agents)} {_way(seating.turns)}; seat this environment anew (Policies.seat)"
        )
    return agents


class AgentObservations:
    """Makes the observations of the agents of one environment.

    Args:
        env: one instance, for its spaces. shown: of each agent's policy.
    """

    def __init__(self, env: AgentsEnv, shown: Mapping[str, EnvSpec], state: StateOf, mask_key: str) -> None:
        self._plain = {agent: plain_spec(env, agent) for agent in shown}
        self.dtypes = {agent: action_dtypes(env.action_space(agent)) for agent in shown}
        self.state, self._mask_key = state, mask_key
        self._from_info = {a: _shows(spec) and not _shows(self._plain[a]) for a, spec in shown.items()}
        self.anything = bool(state) or any(self._from_info.values())
        """Observations are not shown as the environment returns them."""
        self._choices = {a: shown[a].obs[MASK_KEY].size for a, from_info in self._from_info.items() if from_info}
        places = np.cumsum([0, *(_width(spec.obs) for spec in self._plain.values())]).tolist()
        self._places = {agent: slice(*ends) for agent, ends in zip(self._plain, zip(places, places[1:]))}
        self._parts = {agent: _leaf_parts(spec.obs) for agent, spec in self._plain.items()}
        self._total = places[-1]

    def fits(self, agent: str, shown: EnvSpec) -> bool:
        """True if the policy's spec is what this agent is shown, as far as its spaces say."""
        plain = self._plain[agent]
        obs = plain.obs
        if self._from_info[agent] or self.state:
            below = dict(obs) if isinstance(obs, dict) else {OBS_KEY: obs}
            added = {*([MASK_KEY] if self._from_info[agent] else []), *([STATE_KEY] if self.state else [])}
            if not isinstance(shown.obs, dict):
                return False
            obs = {**below, **{key: shown.obs.get(key) for key in added}}
        return shown.obs == obs and shown.action == plain.action

    def state_of(self, env: Any, obs: Mapping[str, Any]) -> Any:
        """The state beside these observations: the environment's own, or all of them side by side, absent ones 0."""
        if self.state == "env":
            return env.state()
        out = np.zeros(self._total, np.float32)
        for agent, seen in obs.items():
            if agent in self._places:
                out[self._places[agent]] = self._flat(agent, seen)
        return out

    def show(self, agent: str, obs: Any, info: Any, state: Any, over: bool = False) -> Any:
        """The agent's observation, mask and state. Once its episode is `over`, the mask allows all choices."""
        from_info = self._from_info[agent]
        if not from_info and not self.state:
            return obs
        out = dict(obs) if isinstance(obs, dict) else {OBS_KEY: obs}
        if from_info:
            there = isinstance(info, Mapping) and self._mask_key in info
            if not there and not over:
                raise EnvContractError(
                    f"no info[{self._mask_key!r}], which held the mask of legal actions at first; give it at every "
                    "reset and step, for every agent"
                )
            mask = info[self._mask_key] if there else np.ones(self._choices[agent], np.int8)
            out[MASK_KEY] = flat_mask(mask)
        if self.state:
            out[STATE_KEY] = state
        return out

    def _flat(self, agent: str, obs: Any) -> Any:
        parts: list[Any] = []
        for path, leaf in self._parts[agent]:
            x = obs
            for key in path:
                x = x[key]
            parts.append(_one_hot(leaf, x) if leaf.sizes else np.asarray(x, np.float32).reshape(-1))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _asked(name: str, what: str, call: Callable[[], T]) -> T:
    """The result of a call of the environment's own code. Raises EnvWorkerError that says which it was."""
    try:
        return call()
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        text = "".join(traceback.format_exception(error))
        raise EnvWorkerError(f"{name} in {what}: {words_of(error)}\n{text}") from error


def _leaf_parts(obs: Tree, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], LeafSpec]]:
    """Paths and leaves of a joint observation: everything but masks."""
    if is_leaf(obs):
        return [(path, obs)]
    pairs = obs.items() if isinstance(obs, dict) else enumerate(obs)
    return [part for key, below in pairs if key != MASK_KEY for part in _leaf_parts(below, (*path, key))]


def _width(obs: Tree) -> int:
    return sum(sum(leaf.sizes) if leaf.sizes else leaf.size for _, leaf in _leaf_parts(obs))


def _one_hot(leaf: LeafSpec, x: Any) -> Any:
    at = np.cumsum([0, *leaf.sizes[:-1]]) + np.ravel(x) - np.ravel(leaf.start)
    out = np.zeros(sum(leaf.sizes), np.float32)
    out[at.astype(np.int64)] = 1.0
    return out


def _shows(spec: EnvSpec) -> bool:
    return isinstance(spec.obs, dict) and MASK_KEY in spec.obs


def _has(infos: Any, agent: str, key: str) -> bool:
    info = infos.get(agent) if isinstance(infos, Mapping) else None
    return isinstance(info, Mapping) and key in info


def _way(turns: bool) -> str:
    return "that take turns" if turns else "that act at once"
