"""Batched environments for tests: `SeedEcho` as tensors, a torch CartPole as numpy arrays, and one that misbehaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.core.batch import as_arrays
from penstock.core.tree import tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.toy import SeedEcho
from penstock.tensor_envs import CartPole
from penstock.testing.pools import echo_config


class TensorEcho(gym.vector.VectorEnv):
    """`SeedEcho` in every slot, its answers as tensors."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 1, nested: bool = False) -> None:
        self.env = SyncVectorEnv([lambda: SeedEcho(nested)] * num_envs)
        self.num_envs, self.device = num_envs, "cpu"
        self.single_observation_space = self.env.single_observation_space
        self.single_action_space = self.env.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return as_tensors(self.env.reset(seed=seed)[0]), {}

    def step(self, actions: Any) -> Any:
        *answer, info = self.env.step(as_arrays(actions))
        return *map(as_tensors, answer), {key: torch.from_numpy(np.asarray(x)) for key, x in info.items()}


def as_tensors(tree: Any) -> Any:
    return tree_map(lambda x: torch.from_numpy(np.array(x)), tree)


def echoes(nested: bool = False) -> EnvConfig:
    return replace(echo_config(nested), env=TensorEcho)


class ArrayCartPole(gym.vector.VectorEnv):
    """The torch CartPole as an environment of numpy arrays: it has no `device`."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 1, max_episode_steps: int = 500) -> None:
        self.env, self.num_envs = CartPole(num_envs, max_episode_steps=max_episode_steps), num_envs
        self.single_observation_space = self.env.single_observation_space
        self.single_action_space = self.env.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed)[0].numpy(), {}

    def step(self, actions: Any) -> Any:
        *answer, info = self.env.step(torch.from_numpy(actions))
        return *(x.numpy() for x in answer), info


class Bad(CartPole):
    """A CartPole whose answers are changed from the `since`-th step on, or that of its reset."""

    def __init__(
        self, num_envs: int, change: Callable[[list[Any]], Any], since: int = 0, in_reset: bool = False
    ) -> None:
        super().__init__(num_envs)
        self.change, self.since, self.in_reset, self.steps = change, since, in_reset, 0

    def reset(self, **kwargs: Any) -> Any:
        answer = super().reset(**kwargs)
        return self.change(list(answer)) if self.in_reset else answer

    def step(self, actions: Any) -> Any:
        answer = super().step(actions)
        self.steps += 1
        return answer if self.in_reset or self.steps <= self.since else self.change(list(answer))
