"""`mjlab:TASK`: mjlab's environments, which do not reset by themselves here, so that final observations are seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.core.tree import tree_map
from penstock.tensor_envs.sims.simulator import Groups, Simulator, box, configure, imported, require_known

_BRING = "pip install mjlab (1.6 or newer, and not beside playground, which needs another MuJoCo)"
_FIXED = {
    "auto_reset": "False, so that the observation after the last step of an episode is seen",
    "scene.num_envs": "it follows from sampler.B",
}


class Mjlab(Simulator):
    """A task of mjlab on a torch device.

    mjlab draws from torch's and NumPy's global generators, which a reset with a seed sets.

    Args:
        id_: `mjlab:TASK`. groups: of the observation; by default what the actor sees, `actor`.
        settings: of the task's `ManagerBasedRlEnvCfg`, by dotted path. Its `seed`, which what is drawn once at the
            start follows from, is 0 if it has none.
        action_bound: size of the largest action, which SAC and TD3 need to know; None: actions have no bounds.

    Raises:
        ConfigError: mjlab is not installed; an unknown task, group or setting.
    """

    def __init__(
        self,
        id_: str,
        num_envs: int = 1,
        device: str = "cpu",
        groups: Groups = None,
        action_bound: float | None = None,
        **settings: Any,
    ) -> None:
        tasks, envs = imported("mjlab.tasks.registry", id_, _BRING), imported("mjlab.envs", id_, _BRING)
        task = id_.partition(":")[2]
        require_known(id_, task, tasks.list_tasks())
        cfg = tasks.load_env_cfg(task)
        cfg.seed = cfg.seed or 0
        configure(cfg, settings, id_, _FIXED)
        cfg.scene.num_envs, cfg.auto_reset = num_envs, False
        self.env = envs.ManagerBasedRlEnv(cfg, device=device)
        seen = _space(self.env.single_observation_space)
        action = box(*self.env.single_action_space.shape, bound=action_bound)
        super().__init__(id_, num_envs, device, seen, action, groups, ("actor",))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.shown(self.env.reset(seed=seed)[0]), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One step of every slot, and a reset of those that ended, for which it waits for the device."""
        obs, reward, terminated, truncated, extras = self.env.step(actions)
        ended = terminated | truncated
        if self.env.cfg.is_finite_horizon:
            terminated = ended
        final, slots = None, ended.nonzero().flatten()
        if len(slots):
            final = tree_map(torch.clone, obs)  # the reset computes those of the others anew, with other noise
            new, extras = self.env.reset(env_ids=slots)
            obs = tree_map(lambda x, y: torch.where(ended.view(-1, *[1] * (y.ndim - 1)), x, y), new, final)
        return self.shown(obs), reward, terminated, truncated & ~terminated, self.info(extras, final)

    def set_ages(self, ages: Tensor) -> None:
        """Sets how many steps the episodes have lasted, [num_envs] int64."""
        self.env.episode_length_buf[:] = ages

    def export_metadata(self, run: str = "") -> dict[str, Any]:
        """What mjlab writes into its ONNX files for a controller, of a task whose action is `joint_pos`."""
        return dict(imported("mjlab.rl.exporter_utils", "mjlab", _BRING).get_base_metadata(self.env, run))

    def close_extras(self, **_: Any) -> None:
        self.env.close()


def _space(space: Any) -> Any:
    """The space of Gymnasium's that is like one of mjlab's."""
    below = getattr(space, "spaces", None)
    return box(*space.shape) if below is None else {key: _space(x) for key, x in below.items()}
