"""`isaaclab:TASK`: Isaac Lab's environments, which publish final observations since `compute_final_obs`."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.tensor_envs.sims.simulator import Groups, Simulator, box, configure, imported

_BRING = "Isaac Lab 3 and Isaac Sim: https://isaac-sim.github.io/IsaacLab"
_FIXED = {
    "compute_final_obs": "True, so that the observation after the last step of an episode is seen",
    "scene.num_envs": "it follows from sampler.B",
}


class IsaacLab(Simulator):
    """A task of Isaac Lab on a torch device; a process holds one simulation.

    Args:
        id_: `isaaclab:TASK`. groups: of the observation; by default what the actor sees, `policy`.
        settings: of the task's settings, by dotted path.
        action_bound: size of the largest action, which SAC and TD3 need to know; None: the bounds of the task.

    Raises:
        ConfigError: Isaac Lab is not installed or has no `compute_final_obs`; this process has a simulation already;
            an unknown task, group or setting.
    """

    final_obs_hint = "compute_final_obs=True in the settings of its task, which is set here"

    def __init__(
        self,
        id_: str,
        num_envs: int = 1,
        device: str = "cuda:0",
        groups: Groups = None,
        action_bound: float | None = None,
        **settings: Any,
    ) -> None:
        _launch(imported("isaaclab.app", id_, _BRING).AppLauncher, device)
        simulation = imported("isaaclab.sim", id_, _BRING).SimulationContext
        if simulation.instance() is not None:
            raise ConfigError(
                f"{id_}: this process has a simulation, and Isaac Lab can hold one; evaluate in it by "
                "run.eval_in='training', or not at all by run.eval_episodes=0"
            )
        task = id_.partition(":")[2]
        imported("isaaclab_tasks", id_, _BRING)  # registers the tasks
        try:
            cfg = imported("isaaclab_tasks.utils", id_, _BRING).parse_env_cfg(task, device=device, num_envs=num_envs)
        except gym.error.Error as error:
            raise ConfigError(f"unknown environment id {id_!r}: {error}") from error
        if not hasattr(cfg, "compute_final_obs"):
            raise ConfigError(
                f"{id_}: this Isaac Lab has no compute_final_obs, without which the observation after the last step of "
                "an episode is lost; use version 3, or a newer one than its pull request 6219 of June 2026"
            )
        cfg.seed = getattr(cfg, "seed", None) or 0
        configure(cfg, settings, id_, _FIXED)
        cfg.compute_final_obs = True
        self.env: Any = gym.make(task, cfg=cfg, disable_env_checker=True).unwrapped
        seen, action = self.env.single_observation_space, self.env.single_action_space
        action = action if action_bound is None else box(*action.shape, bound=action_bound)
        super().__init__(id_, num_envs, device, seen, action, groups, ("policy",))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.shown(self.env.reset(seed=seed)[0]), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One step of every slot; those that ended have been reset."""
        obs, reward, terminated, truncated, extras = self.env.step(actions)
        if getattr(self.env.cfg, "is_finite_horizon", False):
            terminated = terminated | truncated
        return self.shown(obs), reward, terminated, truncated & ~terminated, self.info(extras, extras.get("final_obs"))

    def set_ages(self, ages: Tensor) -> None:
        """Sets how many steps the episodes have lasted, [num_envs] int64."""
        self.env.episode_length_buf[:] = ages

    def close_extras(self, **_: Any) -> None:
        self.env.close()


@functools.cache
def _launch(launcher: Any, device: str) -> Any:
    """Isaac Sim, started once, which must come before any other import of Isaac Lab's."""
    return launcher(headless=True, device=device)
