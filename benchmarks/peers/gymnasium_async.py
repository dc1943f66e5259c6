"""Steps per second of Gymnasium's AsyncVectorEnv with a torch policy, as a user would write the loop; for `samplers.py`.

One process for each environment, observations in shared memory, which is its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import torch
import turns
from torch import nn

ENV, T = "CartPole-v1", 128


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


@contextmanager
def sampling(B: int, seed: int) -> Iterator[turns.Unit]:
    """Batches of T rows; like SB3's, rows in which an environment resets count."""
    torch.manual_seed(seed)
    envs = gym.vector.AsyncVectorEnv([lambda: gym.make(ENV)] * B)
    obs, _ = envs.reset(seed=seed)
    actor, critic = _mlp(4, 2), _mlp(4, 1)
    observations, actions = np.zeros((T, B, 4), np.float32), np.zeros((T, B), np.int64)
    logps, values, rewards = (np.zeros((T, B), np.float32) for _ in range(3))
    dones = np.zeros((T, B), bool)

    def unit() -> float:
        nonlocal obs
        for t in range(T):
            with torch.inference_mode():
                x = torch.as_tensor(obs)
                logp = torch.log_softmax(actor(x), -1)
                action = torch.multinomial(logp.exp(), 1)
                logps[t], values[t] = logp.gather(1, action)[:, 0].numpy(), critic(x)[:, 0].numpy()
            observations[t], actions[t] = obs, action[:, 0].numpy()
            obs, rewards[t], terminated, truncated, _ = envs.step(actions[t])
            dones[t] = terminated | truncated
        return T * B

    for _ in range(2):
        unit()
    yield unit
    envs.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    turns.child({"sampling": sampling}, "gymnasium", "torch")
