"""Base of batched toys on a device: seeding, resets, and the time limit."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from penstock.core.tree import Tree, tree_map


class TensorToy(gym.vector.VectorEnv[Any, Any, Any]):
    """B environments as tensors: `fresh` opens episodes, `advance` steps all, `observe` shows a state.

    A step never waits for the device: it computes the next state and a fresh one for every slot, then selects one of
    the two by whether the slot's episode has ended.

    Args:
        max_episode_steps: an episode is truncated after this many.
        same_step: resets a slot in the step of an end, as most simulators do, and puts the last observations of
            episodes into `info["final_obs"]`.
    """

    def __init__(
        self,
        num_envs: int,
        device: str,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        max_episode_steps: int,
        same_step: bool = False,
    ) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP if same_step else AutoresetMode.NEXT_STEP}
        self.num_envs, self.device = num_envs, torch.device(device)
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self.max_episode_steps, self._same_step = max_episode_steps, same_step
        self.generator = torch.Generator(self.device)

    def fresh(self) -> Tree:
        """The states [B, ...] of new episodes, drawn by `self.generator`."""
        raise NotImplementedError

    def advance(self, state: Tree, action: Tensor) -> tuple[Tree, Tensor, Tensor]:
        """The states after a step, in new memory, the reward [B] float32 and whether each terminated [B] bool."""
        raise NotImplementedError

    def observe(self, state: Tree) -> Tree:
        """The observations [B, ...] of states, in new memory."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        """The first observations of new episodes in all slots."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state = self.fresh()
        self._age = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        self._ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.observe(self.state), {}

    def step(self, actions: Tensor) -> tuple[Tree, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One step of every slot; one that has ended ignores its action and resets, unless it did so at once."""
        again = self._ended
        state, reward, terminated = self.advance(self.state, actions)
        if self._same_step:
            truncated = self._age + 1 >= self.max_episode_steps
            again, final = terminated | truncated, self.observe(state)
            self.state = _taken(again, self.fresh(), state)
            self._age = (self._age + 1).masked_fill_(again, 0)
            return self.observe(self.state), reward, terminated, truncated, {"final_obs": final}
        self.state = _taken(again, self.fresh(), state)
        self._age = (self._age + 1).masked_fill_(again, 0)
        terminated = terminated & ~again
        truncated = self._age >= self.max_episode_steps
        self._ended = terminated | truncated
        return self.observe(self.state), reward.masked_fill(again, 0.0), terminated, truncated, {}


def _taken(where: Tensor, new: Tree, old: Tree) -> Tree:
    """New leaves where [B] bool, else old ones."""
    return tree_map(lambda x, y: torch.where(where.view(-1, *[1] * (y.ndim - 1)), x, y), new, old)
