"""Steps per second of a DQN in one plain file of torch, as CleanRL writes them: no library between loop and tensors.

One gradient step for each environment step of CartPole, 256 x 256, batches of 128, numpy ring buffers, torch's Adam. For
`off_policy.py` (see turns.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import torch
import turns
from torch import nn
from torch.nn import functional as F

WARM, CAPACITY, BATCH, DISCOUNT, TARGET_INTERVAL = 500, 100_000, 128, 0.99, 10_000


def network() -> nn.Sequential:
    """[N, 4] -> [N, 2]."""
    return nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))


class Learner:
    """Environment, networks and buffer, and the loop over them."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rng, self.env = np.random.default_rng(seed), gym.make("CartPole-v1")
        self.online, self.target = network(), network()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=1e-4)
        self.obs, self.next = np.zeros((2, CAPACITY, 4), np.float32)
        self.action = np.zeros((CAPACITY, 1), np.int64)
        self.reward, self.done = np.zeros((2, CAPACITY), np.float32)
        self.step, (self.now, _) = 0, self.env.reset(seed=seed)

    def learn(self, steps: int) -> None:
        """Steps of the environment, each with an update once there are `WARM` rows."""
        for _ in range(steps):
            if random.random() < max(0.05, 1.0 - self.step / 10_000):
                action = int(self.env.action_space.sample())
            else:
                with torch.no_grad():
                    action = int(self.online(torch.from_numpy(self.now)[None]).argmax(1))
            following, reward, terminated, truncated, _ = self.env.step(action)
            at = self.step % CAPACITY
            self.obs[at], self.next[at], self.action[at] = self.now, following, action
            self.reward[at], self.done[at] = float(reward), terminated
            self.now = self.env.reset()[0] if terminated or truncated else following
            self.step += 1
            if self.step > WARM:
                self.update()

    def update(self) -> None:
        """One gradient step on a batch of the buffer."""
        rows = self.rng.integers(0, min(self.step, CAPACITY), BATCH)
        obs, following, action, reward, done = (
            torch.from_numpy(x[rows]) for x in (self.obs, self.next, self.action, self.reward, self.done)
        )
        with torch.no_grad():
            target = reward + DISCOUNT * self.target(following).max(1).values * (1.0 - done)
        loss = F.mse_loss(self.online(obs).gather(1, action).squeeze(1), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.step % TARGET_INTERVAL == 0:
            self.target.load_state_dict(self.online.state_dict())


@contextmanager
def training(steps: int, seed: int) -> Iterator[turns.Unit]:
    """Steps of the environment with an update each."""
    learner = Learner(seed)
    learner.learn(WARM + 200)

    def unit() -> float:
        learner.learn(steps)
        return steps

    yield unit


if __name__ == "__main__":
    torch.set_num_threads(1)
    turns.child({"training": training}, "torch")
