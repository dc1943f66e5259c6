"""Steps per second of Stable-Baselines3's, or its JAX twin SBX's, learners with one gradient step for each environment step.

For `off_policy.py`: answers each line of standard input, a number of steps, with the seconds of wall and CPU time that they took.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import time
from typing import Any

WARM = 500
PACKAGES = {"stable_baselines3": "stable-baselines3", "sbx": "sbx-rl"}


def model(library: Any, name: str, seed: int) -> Any:
    """256 x 256 everywhere; batch 256, or 128 for DQN. PPO: 64 x 64, 16 environments, 4 epochs of minibatches of 512."""
    from stable_baselines3.common.env_util import make_vec_env

    if name == "ppo":
        return library.PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=16, seed=seed), n_steps=128, batch_size=512,
                           n_epochs=4, learning_rate=1e-3, ent_coef=0.01, seed=seed, device="cpu")  # fmt: skip
    kind = {"dqn": library.DQN, "sac": library.SAC, "td3": library.TD3}[name]
    env, batch = ("CartPole-v1", 128) if name == "dqn" else ("Pendulum-v1", 256)
    return kind("MlpPolicy", env, batch_size=batch, train_freq=1, gradient_steps=1, learning_starts=WARM,
                buffer_size=100_000, policy_kwargs={"net_arch": [256, 256]}, seed=seed, device="cpu")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=PACKAGES, default="stable_baselines3")
    parser.add_argument("--algo", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # XLA takes as many threads as the process has cores; who pins this process to one core has set this already.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    import torch

    torch.set_num_threads(1)
    learner = model(importlib.import_module(args.library), args.algo, args.seed)
    learner.learn(WARM + 200)
    print(importlib.metadata.version(PACKAGES[args.library]), flush=True)
    for line in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        learner.learn(int(line), reset_num_timesteps=False)
        print(json.dumps({"s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}), flush=True)
