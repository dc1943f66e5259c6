"""Steps per second of Stable-Baselines3's SAC, TD3 or DQN with one gradient step for each environment step.

For `off_policy.py`: answers each line of standard input, a number of steps, with the seconds of wall and CPU time that they took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm

WARM = 500


def model(name: str, seed: int) -> BaseAlgorithm:
    """256 x 256 everywhere; batch 256, or 128 for DQN."""
    if name == "dqn":
        return DQN("MlpPolicy", "CartPole-v1", batch_size=128, train_freq=1, gradient_steps=1, learning_starts=WARM,
                   buffer_size=100_000, policy_kwargs={"net_arch": [256, 256]}, seed=seed, device="cpu")  # fmt: skip
    kind = {"sac": SAC, "td3": TD3}[name]
    return kind("MlpPolicy", "Pendulum-v1", batch_size=256, train_freq=1, gradient_steps=1, learning_starts=WARM,
                buffer_size=100_000, policy_kwargs={"net_arch": [256, 256]}, seed=seed, device="cpu")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    learner = model(args.algo, args.seed)
    learner.learn(WARM + 200)
    for line in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        learner.learn(int(line), reset_num_timesteps=False)
        print(json.dumps({"s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}), flush=True)
