"""NextStep: environments that reset some of their slots on demand, as ones that reset in the step after an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.tree import Tree, tree_map

_ATTRIBUTES = ("num_envs", "device", "single_observation_space", "single_action_space")


class NextStep(gym.vector.VectorEnv[Any, Any, Any]):
    """A batched environment of tensors that does not reset by itself, with a reset in the step after each end.

    So no row of an episode is lost: what follows an end in the same step, as simulators reset, takes the place of the
    observation that the last value is of. A slot that has ended is stepped once more, which counts for nothing, and
    reset after it. Asking which have ended waits for the device at every step.

    Args:
        env: with Gymnasium's `reset(seed=)` and `step(action)` in tensors [num_envs, ...], and the attributes
            `num_envs`, `device`, `single_observation_space` and `single_action_space`, or its `unwrapped` has them.
        reset_slots: resets the slots of these numbers [n] int64; returns the observations of all [num_envs, ...], of
            which those of the others are not used.

    Raises:
        ConfigError: an attribute is missing, or it is one of mjlab, which refuses a further step after an end.
    """

    def __init__(self, env: Any, reset_slots: Callable[[Tensor], Tree]) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.env, self._reset_slots = env, reset_slots
        self.device: Any = None
        base = getattr(env, "unwrapped", env)
        if hasattr(getattr(base, "cfg", None), "auto_reset"):
            raise ConfigError(
                f"NextStep({type(env).__name__}): mjlab refuses a further step of a slot that has ended, with "
                "auto_reset=False, and resets it before it is seen with True; use its adapter, env='mjlab:TASK'"
            )
        for name in _ATTRIBUTES:
            found = getattr(env, name, getattr(base, name, None))
            if found is None:
                raise ConfigError(
                    f"NextStep({type(env).__name__}): it has no {name}; expected a batched environment with "
                    f"{', '.join(_ATTRIBUTES)}: set it on the environment before"
                )
            setattr(self, name, found)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        """The first observations of new episodes in all slots."""
        self._ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.env.reset(seed=seed)

    def step(self, actions: Tree) -> tuple[Tree, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One step of every slot; one that has ended ignores its action and resets."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        again = self._ended
        if again.any():

            def taken(new: Tensor, old: Tensor) -> Tensor:
                return torch.where(again.view(-1, *[1] * (old.ndim - 1)), new, old)

            obs = tree_map(taken, self._reset_slots(again.nonzero().flatten()), obs)
            reward, terminated, truncated = reward.masked_fill(again, 0), terminated & ~again, truncated & ~again
        self._ended = terminated | truncated
        return obs, reward, terminated, truncated, info

    def close(self, **kwargs: Any) -> None:
        """Closes the environment. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self.env.close()
