"""`playground:TASK` and `brax:TASK`: environments of JAX, whose pure states give the final observations for nothing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from penstock.core.errors import ConfigError, nearest
from penstock.core.tree import Tree, tree_map
from penstock.tensor_envs.sims.simulator import Groups, Simulator, box, imported, require_known

_PRESERVED = "AutoResetWrapper_preserve_info"
"""Key of the info that stays when an episode ends, as Playground's own wrapper has it: the state of a curriculum."""


def playground(
    id_: str, num_envs: int = 1, device: str = "cpu", groups: Groups = None, fresh: str = "each", **settings: Any
) -> JaxEnv:
    """A task of MuJoCo Playground, with the episode length and action repeat of its settings.

    Args:
        id_: `playground:TASK`. groups: of the observation; by default what the actor sees, `state`.
        fresh: as in `JaxEnv`. settings: of the task's, by dotted path, such as `ctrl_dt`.
    """
    registry, task = _jax("mujoco_playground", id_, "pip install playground").registry, id_.partition(":")[2]
    require_known(id_, task, registry.ALL_ENVS)
    config = registry.get_default_config(task)
    known = [*config.to_dict()]
    if odd := next((x for x in settings if x.partition(".")[0] not in known), None):
        raise ConfigError(f"{id_} with env_kwargs {odd}={settings[odd]!r}: no such setting; {nearest(odd, known)}")
    config.update_from_flattened_dict(settings)
    limits = int(config.episode_length), int(config.get("action_repeat", 1))
    return JaxEnv(id_, registry.load(task, config), num_envs, device, *limits, groups, fresh)


def brax(
    id_: str,
    num_envs: int = 1,
    device: str = "cpu",
    episode_length: int = 1000,
    action_repeat: int = 1,
    fresh: str = "each",
    **settings: Any,
) -> JaxEnv:
    """An environment of Brax; arguments as those of `brax.envs.create`, and `fresh` as in `JaxEnv`."""
    try:
        env = _jax("brax.envs", id_, "pip install brax").get_environment(id_.partition(":")[2], **settings)
    except KeyError as error:
        raise ConfigError(f"unknown environment id {id_!r}: Brax has no environment {error}") from error
    return JaxEnv(id_, env, num_envs, device, episode_length, action_repeat, None, fresh)


class JaxEnv(Simulator):
    """A functional environment of Playground or Brax, compiled as a whole; arrays pass between JAX and torch uncopied.

    Args:
        env: with pure `reset(key)` and `step(state, action)` of one slot. limit: of an episode, in the environment's
            own steps, of which one here is `repeat`.
        fresh: the state in which an episode opens: `each` draws one anew, `first` is the slot's first one for good, as
            Playground and Brax have it by themselves: cheaper, where a reset is costly, and B initial states in all.

    Raises:
        ConfigError: an unknown group or `fresh`, or JAX has no such device.
    """

    def __init__(
        self, id_: str, env: Any, num_envs: int, device: str, limit: int, repeat: int, groups: Groups, fresh: str
    ) -> None:
        if fresh not in ("each", "first"):
            raise ConfigError(f"{id_} with fresh={fresh!r}; {nearest(fresh, ('each', 'first'))}")
        size = env.observation_size
        seen = {key: _box(x) for key, x in size.items()} if isinstance(size, Mapping) else _box(size)
        action = spaces.Box(-1.0, 1.0, (env.action_size,))
        super().__init__(id_, num_envs, device, seen, action, groups, ("state",))
        self._jax: Any = importlib.import_module("jax")
        try:
            kind = "gpu" if self.device.type == "cuda" else self.device.type
            self._place = self._jax.devices(kind)[self.device.index or 0]
        except (RuntimeError, IndexError) as error:
            raise ConfigError(f"{id_} with device={device!r}: {error}; JAX finds {self._jax.devices()}") from error
        training: Any = importlib.import_module("brax.envs.wrappers.training")
        self._env = training.EpisodeWrapper(training.VmapWrapper(env), limit, repeat)
        self._each = fresh == "each"
        self._open, self._advance = self._jax.jit(self._opened), self._jax.jit(self._advanced)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Tree, dict[str, Any]]:
        if seed is not None:
            self._key = self._jax.device_put(self._jax.random.PRNGKey(seed), self._place)
        self._key, drawn = self._jax.random.split(self._key)
        self._first = self._state = self._open(drawn)
        return self.shown(tree_map(torch.from_dlpack, self._state.obs)), {}

    def step(self, actions: Tensor) -> tuple[Tree, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One step of every slot; those that ended have been reset."""
        action = self._jax.dlpack.from_dlpack(actions.contiguous())
        self._state, self._key, *answer, metrics = self._advance(self._state, self._first, self._key, action)
        final, reward, terminated, truncated = (tree_map(torch.from_dlpack, x) for x in answer)
        names = [*self._state.metrics]
        log = dict(zip(names, torch.from_dlpack(metrics).unbind())) if names else None
        obs = tree_map(torch.from_dlpack, self._state.obs)
        return self.shown(obs), reward, terminated, truncated, self.info({"log": log}, final)

    def set_ages(self, ages: Tensor) -> None:
        """Sets how many steps the episodes have lasted, [num_envs] int64."""
        steps = self._jax.dlpack.from_dlpack((ages * self._env.action_repeat).float())
        self._state = self._state.replace(info={**self._state.info, "steps": steps})

    def _opened(self, key: Any) -> Any:
        return self._env.reset(self._jax.random.split(key, self.num_envs))

    def _advanced(self, state: Any, first: Any, key: Any, action: Any) -> Any:
        """The state after a step and the resets, the next key, and what the step itself has shown."""
        jax, jnp = self._jax, self._jax.numpy
        after = self._env.step(state, action)
        done, cut = after.done > 0, after.info["truncation"] > 0
        key, drawn = jax.random.split(key)
        fresh = jax.lax.cond(done.any(), self._opened, lambda _: first, drawn) if self._each else first

        def taken(new: Any, old: Any) -> Any:
            if not old.ndim or old.shape[0] != self.num_envs:
                return old  # shared by all slots, as Warp's buffers of contacts are
            return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        opened = jax.tree.map(taken, fresh, after)
        if _PRESERVED in after.info:
            opened.info[_PRESERVED] = after.info[_PRESERVED]
        metrics = jnp.stack([x.mean() for x in after.metrics.values()]) if after.metrics else None
        return opened, key, after.obs, after.reward, done & ~cut, done & cut, metrics


def _box(size: Any) -> Any:
    return box(*size) if isinstance(size, (tuple, list)) else box(int(size))


def _jax(module: str, id_: str, bring: str) -> Any:
    """A module that imports JAX, which would take most of a GPU's memory for itself."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return imported(module, id_, bring)
