"""Batched environments for tests that reset in the step of an end, and their twins that do so in the next."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

DISCOUNT = 0.9
VALUES = [DISCOUNT**2 / (1 - DISCOUNT**3), DISCOUNT / (1 - DISCOUNT**3), 1 / (1 - DISCOUNT**3)]
"""Of the three states of `Ring`, in closed form."""


class _Batched(gym.vector.VectorEnv[Any, Any, Any]):
    def __init__(self, num_envs: int, device: str, obs: gym.Space[Any], same_step: bool) -> None:
        mode = AutoresetMode.SAME_STEP if same_step else AutoresetMode.NEXT_STEP
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self.device, self.same_step = num_envs, torch.device(device), same_step
        self.single_observation_space, self.single_action_space = obs, gym.spaces.Discrete(2)
        self.observation_space = batch_space(obs, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)


class Ring(_Batched):
    """Three states in a ring; leaving the last pays 1. Nothing ends but the time, after `limit` steps."""

    def __init__(self, num_envs: int = 8, device: str = "cpu", limit: int = 4, given: str = "always") -> None:
        super().__init__(num_envs, device, gym.spaces.Box(0, 1, (3,), np.float32), True)
        self.limit, self.given = limit, given
        if given == "previous":
            self.final_obs = "previous"

    def observed(self) -> torch.Tensor:
        return torch.nn.functional.one_hot(self.at, 3).float()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.at = torch.zeros(self.num_envs, dtype=torch.long)
        self.age = torch.arange(self.num_envs) % self.limit
        return self.observed(), {}

    def step(self, actions: Any) -> Any:
        reward = (self.at == 2).float()
        self.at, self.age = (self.at + 1) % 3, self.age + 1
        cut, final = self.age >= self.limit, self.observed()
        self.at, self.age = self.at.masked_fill(cut, 0), self.age.masked_fill(cut, 0)
        shown = {"final_obs": final} if self.given == "always" or (self.given == "at ends" and cut.any()) else {}
        return self.observed(), reward, torch.zeros_like(cut), cut, shown


class Counting(_Batched):
    """Observations [slot, episode, age, what the actions summed to]; episodes end by their length, some terminated."""

    def __init__(self, num_envs: int = 5, device: str = "cpu", same_step: bool = True, groups: bool = False) -> None:
        box = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        super().__init__(num_envs, device, gym.spaces.Dict(a=box, b=box) if groups else box, same_step)
        self.groups = groups

    def observed(self) -> Any:
        x = torch.stack([torch.arange(self.num_envs), self.episode, self.age, self.total], -1).float()
        return {"a": x, "b": -x} if self.groups else x

    def opened(self, slots: torch.Tensor) -> None:
        self.episode = self.episode + slots
        self.age, self.total = self.age.masked_fill(slots, 0), self.total.masked_fill(slots, 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.age, self.total = (torch.zeros(self.num_envs, dtype=torch.long) for _ in range(3))
        self.ended = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.observed(), {}

    def step(self, actions: Any) -> Any:
        acted = ~self.ended
        self.age, self.total = self.age + acted, self.total + acted * (actions + 1)
        slots = torch.arange(self.num_envs)
        ended = acted & (self.age >= 1 + (slots + 2 * self.episode) % 4)
        terminated = ended & (self.episode % 3 == 0)
        reward = torch.where(acted, self.total.float() + 0.5, 0.0)
        final = self.observed()
        if self.same_step:
            self.opened(ended)
        else:
            self.opened(self.ended)
            self.ended = ended
        info = {"final_obs": final} if self.same_step and bool(ended.any()) else {}
        return self.observed(), reward, terminated, ended & ~terminated, info
