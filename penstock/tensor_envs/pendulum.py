"""Pendulum on a device: Gymnasium's dynamics, rewards and limits as tensors [B, ...]."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from penstock.core.tree import Tree
from penstock.tensor_envs.toy import TensorToy

_GRAVITY, _TAU, _FASTEST, _TORQUE = 10.0, 0.05, 8.0, 2.0


class Pendulum(TensorToy):
    """A pendulum to be swung up, as `Pendulum-v1`: costs of angle, speed and torque, truncated after 200 steps.

    A rod of mass 1 and length 1, by Euler's method with the new speed. `same_step` as in `TensorToy`. With `privileged`
    the observation is a Dict: `policy` the cosine and sine of the angle, `critic` the angular velocity.
    """

    def __init__(
        self,
        num_envs: int = 1,
        device: str = "cpu",
        max_episode_steps: int = 200,
        same_step: bool = False,
        privileged: bool = False,
    ) -> None:
        high = np.array([1.0, 1.0, _FASTEST], np.float32)
        self._privileged, whole = privileged, spaces.Box(-high, high)
        parts = spaces.Dict({"policy": spaces.Box(-high[:2], high[:2]), "critic": spaces.Box(-high[2:], high[2:])})
        torque = spaces.Box(-_TORQUE, _TORQUE, (1,), np.float32)
        super().__init__(num_envs, device, parts if privileged else whole, torque, max_episode_steps, same_step)

    def fresh(self) -> Tensor:
        unit = torch.empty(self.num_envs, 2, device=self.device).uniform_(-1.0, 1.0, generator=self.generator)
        return unit * unit.new_tensor([math.pi, 1.0])

    def advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, speed = state.unbind(1)
        torque = action.squeeze(1).clamp(-_TORQUE, _TORQUE)
        upright = (angle + math.pi).remainder(2.0 * math.pi) - math.pi
        reward = -(upright.square() + 0.1 * speed.square() + 0.001 * torque.square())
        speed = (speed + _TAU * (1.5 * _GRAVITY * angle.sin() + 3.0 * torque)).clamp(-_FASTEST, _FASTEST)
        return torch.stack((angle + _TAU * speed, speed), 1), reward, torch.zeros_like(reward, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tree:
        angle, speed = state.unbind(1)
        if self._privileged:
            return {"policy": torch.stack((angle.cos(), angle.sin()), 1), "critic": speed.unsqueeze(1)}
        return torch.stack((angle.cos(), angle.sin(), speed), 1)
