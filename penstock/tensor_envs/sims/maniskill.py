"""`maniskill:TASK`: ManiSkill's environments by its own batched one, with the final observations that it gives."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.tensor_envs.sims.simulator import Groups, Simulator, imported

_BRING = "pip install mani-skill (3), and a GPU with Vulkan"


class ManiSkill(Simulator):
    """A task of ManiSkill on a CUDA device; on the CPU it can step one slot alone.

    Args:
        id_: `maniskill:TASK`. groups: of the observation, where `obs_mode` makes it a dict.
        settings: keyword arguments of `gymnasium.make`, such as `control_mode`; `obs_mode` is "state" by default.

    Raises:
        ConfigError: ManiSkill is not installed, or an unknown task.
    """

    final_obs_hint = "auto_reset=True of ManiSkillVectorEnv, which is set here"

    def __init__(
        self, id_: str, num_envs: int = 1, device: str = "cuda:0", groups: Groups = None, **settings: Any
    ) -> None:
        imported("mani_skill.envs", id_, _BRING)  # registers the tasks
        batched = imported("mani_skill.vector.wrappers.gymnasium", id_, _BRING).ManiSkillVectorEnv
        given: dict[str, Any] = {"obs_mode": "state", "sim_backend": device, **settings}
        try:
            env = gym.make(id_.partition(":")[2], num_envs=num_envs, disable_env_checker=True, **given)
        except gym.error.Error as error:
            raise ConfigError(f"unknown environment id {id_!r}: {error}") from error
        self.env = batched(env, auto_reset=True, ignore_terminations=False)
        spaces = self.env.single_observation_space, self.env.single_action_space
        super().__init__(id_, num_envs, self.env.device, *spaces, groups)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.shown(self.env.reset(seed=seed)[0]), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One step of every slot; those that ended have been reset, and `is_success` is that of their last step."""
        obs, reward, terminated, truncated, extras = self.env.step(actions)
        info = self.info({}, extras.get("final_observation"))
        last = extras.get("final_info", extras)
        if "success" in last:
            info["is_success"] = last["success"]
        return self.shown(obs), reward, terminated, truncated & ~terminated, info

    def close_extras(self, **_: Any) -> None:
        self.env.close()
