"""Simulator: base of the adapters of simulators, which reset the slots that ended within the step."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from penstock.core.errors import ConfigError, nearest
from penstock.core.tree import Tree

Groups = str | Sequence[str] | None
"""Groups of an observation: the name of one, which is the observation then; several, in a dict; None: the actor's."""


class Simulator(gym.vector.VectorEnv[Any, Any, Any]):
    """`num_envs` slots of a simulator as tensors: resets and steps as `TensorPool` takes them, in SAME_STEP mode.

    Args:
        seen: space of one slot's observation, or of each of its groups by name.
        groups: those that are shown. actor: the group that is shown by default, the first of these that is there.
    """

    final_obs_hint = ""
    """Names the simulator's switch, for the error where an end came without its final observation."""

    def __init__(
        self,
        name: str,
        num_envs: int,
        device: Any,
        seen: spaces.Space[Any] | Mapping[str, spaces.Space[Any]],
        action_space: spaces.Space[Any],
        groups: Groups,
        actor: Sequence[str] = (),
    ) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs, self.device = num_envs, torch.device(device)
        self._groups = groups
        self._logged: tuple[Any, ...] = ()
        known: Any = seen.spaces if isinstance(seen, spaces.Dict) else seen
        if isinstance(known, Mapping):
            self._groups = groups or next((x for x in actor if x in known), None)
            asked = [self._groups] if isinstance(self._groups, str) else sorted(self._groups or ())
            unknown = [x for x in asked if x not in known]
            if unknown or not asked:
                said = f"group {unknown[0]!r}" if unknown else f"group {' or '.join(actor)}"
                raise ConfigError(
                    f"{name}: its observation has no {said}; expected env_kwargs groups= some of {sorted(known)}"
                )
            one = isinstance(self._groups, str)
            known = known[asked[0]] if one else spaces.Dict({x: known[x] for x in asked})
        elif groups is not None:
            raise ConfigError(
                f"{name} with groups={groups!r}: its observation is one array, in no groups; leave it out"
            )
        self.single_observation_space, self.single_action_space = known, action_space
        self.observation_space, self.action_space = batch_space(known, num_envs), batch_space(action_space, num_envs)

    def shown(self, obs: Any) -> Tree:
        """The groups of an observation that were asked for."""
        if self._groups is None:
            return obs
        return obs[self._groups] if isinstance(self._groups, str) else {x: obs[x] for x in self._groups}

    def info(self, extras: Mapping[str, Any], final: Any = None) -> dict[str, Any]:
        """The info of a step: final observations, if there are some, and a log, once if it stands for many steps."""
        log, before = extras.get("log") or {}, self._logged
        self._logged = tuple(log.values())  # a simulator may keep one dict and put new values in
        stands = len(before) == len(log) and all(x is y for x, y in zip(before, self._logged))
        known = {} if final is None else {"final_obs": self.shown(final)}
        return known if stands else {**known, "log": log}


def box(*shape: int, bound: float | None = None) -> spaces.Box:
    """Space of float32 from -bound to bound; None: without bounds. Raises ConfigError for one not above 0."""
    limit = np.inf if bound is None else bound
    if not limit > 0.0:
        raise ConfigError(f"action_bound={bound}; expected a number above 0, or None for actions without bounds")
    return spaces.Box(-limit, limit, shape)


def imported(module: str, name: str, bring: str) -> Any:
    """A module of a simulator's. Raises ConfigError that says what brings it if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"env={name!r}: {error}; it comes with: {bring}") from error


def require_known(name: str, task: str, known: Iterable[str]) -> None:
    """Raises ConfigError with the nearest for a task that the simulator does not have."""
    if task not in (tasks := sorted(known)):
        raise ConfigError(f"unknown environment id {name!r}; {nearest(task, tasks)}")


def configure(cfg: Any, settings: Mapping[str, Any], name: str, fixed: Mapping[str, str]) -> None:
    """Changes a simulator's settings by the dotted paths of keyword arguments, such as `sim.mujoco.timestep`.

    Raises:
        ConfigError: there is no such setting, or it is among `fixed`, whose values say why.
    """
    for path, value in settings.items():
        if path in fixed:
            raise ConfigError(f"{name} with env_kwargs {path}={value!r}: {fixed[path]}; leave it out")
        *above, last = path.split(".")
        at = cfg
        for part in above:
            at = at.get(part) if isinstance(at, Mapping) else getattr(at, part, None)
        if not hasattr(at, last):
            names = [x for x in vars(at) if not x.startswith("_")] if hasattr(at, "__dict__") else []
            raise ConfigError(
                f"{name} with env_kwargs {path}={value!r}: it has no such setting; {nearest(last, names)}"
            )
        setattr(at, last, value)
