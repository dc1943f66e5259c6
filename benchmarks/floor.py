"""The floor: what a hand-written loop over the same Python environments costs, with a numpy policy and nothing else.

It stores observations, actions, log-probabilities, values, rewards and ends. It has no episode statistics, no learner,
no recurrent state, no checks of what environments return and no noise that can be reproduced: a ceiling for a design
that steps Python environments in one process, not a framework.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

Layers = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


def mlp(x: np.ndarray[Any, Any], layers: Layers) -> np.ndarray[Any, Any]:
    """[N, inputs] -> [N, outputs] with tanh between layers."""
    for w, b in layers[:-1]:
        x = np.tanh(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def random_layers(rng: np.random.Generator, *sizes: int, last: float) -> Layers:
    """Weights of deviation 1/sqrt(inputs), the last layer's scaled by `last`, and zero biases."""
    scales = [1.0] * (len(sizes) - 2) + [last]
    return [
        ((s * rng.standard_normal((i, o)) / np.sqrt(i)).astype(np.float32), np.zeros(o, np.float32))
        for i, o, s in zip(sizes, sizes[1:], scales)
    ]


def floor(env_id: str, T: int, B: int, seconds: float, seed: int = 0) -> float:
    """Environment steps per second of B environments over at least `seconds`, in batches of T rows."""
    rng = np.random.default_rng(seed)
    envs = [gym.make(env_id, disable_env_checker=True) for _ in range(B)]
    obs = np.stack([env.reset(seed=seed + b)[0] for b, env in enumerate(envs)])
    actor = random_layers(rng, obs.shape[1], 64, 64, int(envs[0].action_space.n), last=0.01)
    critic = random_layers(rng, obs.shape[1], 64, 64, 1, last=1.0)
    observations, actions = np.zeros((T, B, obs.shape[1]), np.float32), np.zeros((T, B), np.int64)
    logps, values, rewards = (np.zeros((T, B), np.float32) for _ in range(3))
    dones = np.zeros((T, B), bool)
    slots, steps, batches, started = np.arange(B), 0, 0, 0.0
    while batches < 3 or time.perf_counter() - started < seconds:
        if batches == 2:  # two to warm up
            steps, started = 0, time.perf_counter()
        for t in range(T):
            logits = mlp(obs, actor)
            logits -= logits.max(1, keepdims=True)
            p = np.exp(logits)
            p /= p.sum(1, keepdims=True)
            action = (p[:, :-1].cumsum(1) < rng.random((B, 1))).sum(1)
            observations[t], actions[t], values[t] = obs, action, mlp(obs, critic)[:, 0]
            logps[t] = np.log(p[slots, action])
            for b, env in enumerate(envs):
                obs[b], rewards[t, b], terminated, truncated, _ = env.step(action[b])
                dones[t, b] = terminated or truncated
                if dones[t, b]:
                    obs[b] = env.reset()[0]
        steps, batches = steps + T * B, batches + 1
    return steps / (time.perf_counter() - started)


if __name__ == "__main__":
    for B in (16, 64):
        print(f"CartPole-v1, B={B}: {floor('CartPole-v1', 128, B, 3.0):,.0f} steps/s")
