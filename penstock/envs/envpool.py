"""EnvPool's environments by id, `envpool:CartPole-v1`: C++ threads step many at once, as one batched environment."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Generator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from penstock.core.errors import ConfigError, nearest

PREFIX = "envpool:"
_SET_HERE = {
    "seed": "the seed follows from run.seed",
    "env_seed": "seeds follow from run.seed",
    "batch_size": "every step returns all environments: rows are slots",
    "gym_reset_return_info": "a reset always returns its info",
    "max_num_players": "a slot has one player",
}


def is_envpool_id(env: str) -> bool:
    """True for `envpool:TASK`."""
    return env.startswith(PREFIX)


def envpool_ids() -> list[str]:
    """The ids of all tasks of EnvPool, sorted; none if it is not installed."""
    if importlib.util.find_spec("envpool") is None:
        return []
    envpool: Any = importlib.import_module("envpool")

    return sorted(PREFIX + task for task in envpool.list_all_envs())


class EnvPoolVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """`num_envs` environments of an EnvPool task, each of which resets in the step after its end.

    EnvPool takes its seed when it is made, so every `reset` with a seed makes it anew: environment i then plays the
    episodes of seed + i, with any number of others and of threads. Observations get the dtypes and shapes of their
    space, which EnvPool's int32 choices do not have.

    Args:
        id_: `envpool:TASK`.
        settings: those of `envpool.make` but `seed`, `env_seed`, `batch_size` and what follows from the interface.

    Raises:
        ConfigError: an unknown task, one of many players, or a setting that it does not take.
        ModuleNotFoundError: EnvPool is not installed.
    """

    def __init__(self, id_: str, num_envs: int = 1, **settings: Any) -> None:
        envpool: Any = importlib.import_module("envpool")

        task = id_.removeprefix(PREFIX)
        if task not in (known := envpool.list_all_envs()):
            near = nearest(id_, [PREFIX + name for name in known])
            raise ConfigError(f"unknown environment id {id_!r}; {near} `penstock envs {PREFIX}` lists all")
        self._make, self._task, self._settings, self._pool = envpool.make_gymnasium, task, settings, None
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        with _quiet():
            takes = [name for name in envpool.make_spec(task).config._fields if name not in _SET_HERE]
            for name in settings:
                if name not in takes:
                    why = _SET_HERE.get(name) or f"it takes no {name!r}; {nearest(name, takes)}"
                    raise ConfigError(f"{id_} with env_kwargs {name}={settings[name]!r}: {why}")
            try:
                spec: Any = envpool.make_spec(task, num_envs=num_envs, **settings)
            except (AssertionError, TypeError, ValueError) as error:
                said = str(error).partition("\n")[0] or f"num_envs={num_envs}"
                raise ConfigError(f"{id_} with env_kwargs {settings}: {said}; it takes {', '.join(takes)}") from error
            self.single_observation_space = _with_lower_bounds(spec.observation_space)
            self.single_action_space = spec.action_space
        if spec.config.num_threads < 0:  # which ends the process
            raise ConfigError(
                f"{id_} with num_threads={spec.config.num_threads}; expected 1 or more, or 0 for all cores"
            )
        if spec.config.max_num_players > 1:
            raise ConfigError(
                f"{id_} is of up to {spec.config.max_num_players} players, whose rows are not those of slots; expected "
                "one player: games of many agents are made by PettingZoo's API (docs/many-agents.md)"
            )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None or self._pool is None:
            self._pool = None  # its threads end before those of the next begin
            seed = np.random.SeedSequence().generate_state(1).item() >> 1 if seed is None else seed
            self._pool = self._make(self._task, num_envs=self.num_envs, seed=seed, **self._settings)
        with _quiet():
            obs, info = self._pool.reset(options=options)
        return self._of_space(obs, self.single_observation_space), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.send(actions)
        return self.recv()

    def send(self, actions: Any) -> None:
        """Starts a step, which reads a copy of the actions."""
        assert self._pool is not None, "step before the first reset"
        self._pool.send(actions)

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Waits for the step that `send` has started."""
        assert self._pool is not None
        obs, reward, terminated, truncated, info = self._pool.recv()
        return self._of_space(obs, self.single_observation_space), reward, terminated, truncated, info

    def close_extras(self, **_: Any) -> None:
        self._pool = None

    def _of_space(self, obs: Any, space: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._of_space(obs[key], below) for key, below in space.items()}
        return np.asarray(obs, space.dtype).reshape(self.num_envs, *space.shape)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Without Gymnasium's warnings that float32 rounds the bounds of a space."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered")
        yield


def _with_lower_bounds(space: Any) -> Any:
    """A space without the lower bound 1e-38 (1e-308), the least positive number, that EnvPool has for "no bound"."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _with_lower_bounds(below) for key, below in space.items()})
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    low = np.where(space.low == np.finfo(space.dtype).tiny, -np.inf, space.low)
    return spaces.Box(low.astype(space.dtype), space.high, dtype=space.dtype.type)
