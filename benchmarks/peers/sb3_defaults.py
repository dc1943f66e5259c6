"""One run of Stable-Baselines3 with its default settings, for `defaults.py`; it runs where SB3 is installed.

Prints one line of JSON: returns of deterministic episodes of the final policy, the mean of the last 100 training
episodes, and the CPU seconds from the model's construction to the end of `learn`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.monitor import Monitor

ALGOS: dict[str, Any] = {"ppo": PPO, "dqn": DQN, "sac": SAC}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algo", choices=list(ALGOS))
    parser.add_argument("env")
    for name in ("steps", "seed", "episodes"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = Monitor(gym.make(args.env))
    before = time.process_time()
    model = ALGOS[args.algo]("MlpPolicy", env, seed=args.seed, device="cpu")
    model.learn(args.steps)
    cpu_s = time.process_time() - before
    other = gym.make(args.env)
    returns: list[float] = []
    for episode in range(args.episodes):
        obs, _ = other.reset(seed=10_000 + episode)
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(obs, deterministic=True)
            obs, reward, terminated, truncated, _ = other.step(action.item() if action.ndim == 0 else action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    last = env.get_episode_rewards()[-100:]
    row = {"score": statistics.fmean(returns), "train": statistics.fmean(last) if last else None, "cpu_s": cpu_s}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
