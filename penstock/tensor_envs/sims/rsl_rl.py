"""`from_rsl_rl`: any environment with the interface `VecEnv` of rsl_rl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.tensor_envs.sims.simulator import Groups, Simulator, box

_NEEDS = ("num_envs", "num_actions", "device", "episode_length_buf", "get_observations", "step")


class FromRslRl(Simulator):
    """A `VecEnv` of rsl_rl, with the observation before an end in place of the final one, which it does not give.

    So the value at a time limit is that of the state one step before, as rsl_rl's PPO has it. A `VecEnv` has no seeds
    of its own; its `seed` is called if there is one.

    Args:
        groups: of the observation; by default what the actor sees, `actor` or `policy`.

    Raises:
        ConfigError: it lacks a part of that interface, or an observation is no dict of tensors.
    """

    final_obs = "previous"

    def __init__(self, env: Any, groups: Groups = None) -> None:
        what = f"from_rsl_rl({type(env).__name__})"
        if lacking := [name for name in _NEEDS if not hasattr(env, name)]:
            raise ConfigError(f"{what}: it has no {', '.join(lacking)}; expected a VecEnv of rsl_rl 5")
        self.env = env
        obs = env.get_observations()
        if not hasattr(obs, "keys"):
            raise ConfigError(
                f"{what}: get_observations() is {type(obs).__name__}; expected a TensorDict of groups, of rsl_rl 3 or "
                "newer"
            )
        seen = {key: box(*obs[key].shape[1:]) for key in obs.keys()}  # noqa: SIM118 (a TensorDict iterates rows)
        super().__init__(what, env.num_envs, env.device, seen, box(env.num_actions), groups, ("actor", "policy"))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None and callable(found := getattr(self.env, "seed", None)):
            found(seed)
        if callable(again := getattr(self.env, "reset", None)):
            again()
        return self.shown(self.env.get_observations()), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One step of every slot; those that ended have been reset."""
        obs, reward, dones, extras = self.env.step(actions)
        ended = dones.bool()
        truncated = ended & extras["time_outs"].bool() if "time_outs" in extras else torch.zeros_like(ended)
        log: Any = extras.get("log", extras.get("episode"))
        info: Mapping[str, Any] = {} if log is None else {"log": log}
        return self.shown(obs), reward, ended & ~truncated, truncated, self.info(info)

    def set_ages(self, ages: Tensor) -> None:
        """Sets how many steps the episodes have lasted, [num_envs] int64."""
        self.env.episode_length_buf = ages

    def close_extras(self, **_: Any) -> None:
        if callable(found := getattr(self.env, "close", None)):
            found()


from_rsl_rl = FromRslRl
