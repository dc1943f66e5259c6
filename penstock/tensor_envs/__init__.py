"""Batched environments of torch tensors on a device: two toys, adapters, and the pool that steps them."""

from penstock.tensor_envs.cartpole import CartPole
from penstock.tensor_envs.next_step import NextStep
from penstock.tensor_envs.pendulum import Pendulum
from penstock.tensor_envs.pixels import PixelCatch
from penstock.tensor_envs.sims.rsl_rl import from_rsl_rl
from penstock.tensor_envs.toy import TensorToy

__all__ = ["CartPole", "NextStep", "Pendulum", "PixelCatch", "TensorToy", "from_rsl_rl"]
