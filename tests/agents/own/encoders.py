"""Encoders as users write them: the built-in networks again, and some that are wrong."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.tree import tree_leaves
from penstock.native.elementwise import orthogonal_


def started(layer: Any) -> Any:
    orthogonal_(layer.weight, math.sqrt(2.0))
    nn.init.zeros_(layer.bias)
    return layer


class Wide(nn.Module):
    """Two layers of 32 units: what `hidden=(32, 32)` makes of a vector."""

    activation: Any = nn.ReLU
    orthogonal = False
    sizes = (32, 32)

    def __init__(self, obs: Any) -> None:
        super().__init__()
        widths = (obs.size, *self.sizes)
        layers: list[Any] = [nn.Linear(i, o) for i, o in zip(widths, widths[1:])]
        layers = [started(layer) for layer in layers] if self.orthogonal else layers
        self.features = widths[-1]
        self.layers = nn.Sequential(*(x for layer in layers for x in (layer, self.activation())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Tanh(Wide):
    """The same as policy gradients start it."""

    activation, orthogonal = nn.Tanh, True


class Pixels(nn.Module):
    """The two layers of `cnn="auto"` for an image [12, 12, 1] of bytes."""

    def __init__(self, obs: Any) -> None:
        super().__init__()
        height, width, channels = obs.shape
        first, second = started(nn.Conv2d(channels, 32, 3, 2, 1)), started(nn.Conv2d(32, 64, 3, 1, 1))
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten())
        self.features = 64 * ((height + 1) // 2) * ((width + 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.permute(0, 3, 1, 2).float() / 255)


class Everything(nn.Module):
    """One layer over all leaves of any observation, side by side."""

    def __init__(self, obs: Any) -> None:
        super().__init__()
        self.features = 7
        self.layer = nn.Linear(sum(leaf.size for leaf in tree_leaves(obs)), 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, obs: Any) -> Tensor:
        parts = [x.float().flatten(1) if x.ndim > 1 else x.float().unsqueeze(1) for x in tree_leaves(obs)]
        return self.norm(self.layer(torch.cat(parts, 1))).relu()


class Dots(gym.Env[Any, Any]):
    """An image of one bright pixel, which a box of one number moves."""

    observation_space = gym.spaces.Box(0, 255, (12, 12, 1), np.uint8)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = int(self.np_random.integers(12)), 0
        return self.obs(), {}

    def obs(self) -> Any:
        obs = np.zeros((12, 12, 1), np.uint8)
        obs[self.x, self.t % 12] = 255
        return obs

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.x = int(np.clip(self.x + np.sign(action[0]), 0, 11))
        return self.obs(), -abs(self.x - 6) / 6, False, self.t >= 20, {}
