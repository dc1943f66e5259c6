"""CartPole on a device: Gymnasium's dynamics, rewards and limits as tensors [B, ...]."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from penstock.tensor_envs.toy import TensorToy

_GRAVITY, _MASS_POLE, _MASS, _HALF_POLE, _FORCE, _TAU = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
_FAR, _STEEP = 2.4, 12 * 2 * math.pi / 360


class CartPole(TensorToy):
    """A pole on a cart, as `CartPole-v1`: 1 for every step, an end beyond 2.4 or 12 degrees, truncated after 500.

    Equations of motion as Gymnasium has them, of Barto, Sutton and Anderson 1983, corrected by Florian 2007
    (https://coneural.org/florian/papers/05_cart_pole.pdf, eq. 23 and 24), by Euler's method. `same_step` as in
    `TensorToy`.
    """

    def __init__(
        self, num_envs: int = 1, device: str = "cpu", max_episode_steps: int = 500, same_step: bool = False
    ) -> None:
        high = np.array([2 * _FAR, np.inf, 2 * _STEEP, np.inf], np.float32)
        super().__init__(num_envs, device, spaces.Box(-high, high), spaces.Discrete(2), max_episode_steps, same_step)

    def fresh(self) -> Tensor:
        return torch.empty(self.num_envs, 4, device=self.device).uniform_(-0.05, 0.05, generator=self.generator)

    def advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, x_dot, theta, theta_dot = state.unbind(1)
        cos, sin = theta.cos(), theta.sin()
        force = action * (2 * _FORCE) - _FORCE
        temp = (force + _MASS_POLE * _HALF_POLE * theta_dot.square() * sin) / _MASS
        theta_acc = (_GRAVITY * sin - cos * temp) / (_HALF_POLE * (4 / 3 - _MASS_POLE / _MASS * cos.square()))
        x_acc = temp - _MASS_POLE * _HALF_POLE / _MASS * theta_acc * cos
        after = state + _TAU * torch.stack((x_dot, x_acc, theta_dot, theta_acc), 1)
        terminated = (after[:, 0].abs() > _FAR) | (after[:, 2].abs() > _STEEP)
        return after, torch.ones_like(x), terminated

    def observe(self, state: Tensor) -> Tensor:
        return state.clone()
