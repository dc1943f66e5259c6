"""Prints a digest of what a short run collects and learns, and one of what torch itself computes: `one_run.py CASE`."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

import penstock as ps


class Wide(gym.Env[Any, Any]):
    """Observations of 17 numbers, actions of 6, as HalfCheetah has them; by sums and products alone."""

    observation_space = spaces.Box(-1.0, 1.0, (17,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (6,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._x = self.np_random.integers(-64, 65, 17).astype(np.float32) / 64
        self._steps = 0
        return self._x.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._x = np.roll(self._x, 1)
        self._x[:6] = np.clip(0.5 * self._x[:6] + 0.5 * action, -1.0, 1.0)
        return self._x.copy(), float(self._x[0] - self._x[1]), False, self._steps == 20, {}


CASES: dict[str, tuple[Any, Any, Any]] = {
    "ppo": ("CartPole-v1", ps.SerialSampler(T=32, B=8), ps.PPO(minibatch=64)),
    "ppo-256": ("one_run:Wide", ps.SerialSampler(T=16, B=8), ps.PPO(net=ps.Net(hidden=(256, 256)), minibatch=64)),
    "a2c": ("Pendulum-v1", ps.SerialSampler(T=16, B=8), ps.A2C(net=ps.Net(squash=True, normalize_obs=True))),
    "sac": ("Pendulum-v1", ps.SerialSampler(T=32, B=1), ps.SAC(learning_starts=32, replay_ratio=64.0, batch_size=64)),
    "td3": ("Pendulum-v1", ps.SerialSampler(T=32, B=1), ps.TD3(learning_starts=32, replay_ratio=64.0, batch_size=64)),
    "dqn": ("CartPole-v1", ps.SerialSampler(T=32, B=1), ps.DQN(learning_starts=32, replay_ratio=32.0)),
}


def by_penstock(case: str) -> str:
    """A digest of the actions of three batches and of the parameters after them."""
    env, settings, algo = CASES[case]
    sampler = settings.build(env, 1)
    policy = algo.build(sampler.spec, seed=1)
    sampler.initialize(policy.agent)
    found = hashlib.sha256()
    for itr in range(3):
        batch, _ = sampler.obtain_samples(itr)
        found.update(batch.action.tobytes())
        ps.train_one_step(policy, batch)
    sampler.shutdown()
    for p in policy.agent.parameters():
        found.update(p.detach().numpy().tobytes())
    return found.hexdigest()


def by_libraries() -> str:
    """A digest of functions, sums and products of torch and numpy, whose bits hang on the processor."""
    x = torch.linspace(-3.0, 3.0, 100_000)
    a = x[:99_856].reshape(316, 316)
    numbers = [x.exp(), x.sum(), x.softmax(0), a @ a, a[:3] @ a]
    arrays = [*(y.numpy() for y in numbers), np.exp(x.numpy()), a.numpy() @ a.numpy(), np.tanh(x.numpy())]
    return hashlib.sha256(b"".join(y.tobytes() for y in arrays)).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(by_penstock(sys.argv[1]), by_libraries())
