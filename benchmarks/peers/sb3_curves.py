"""Evaluations of Stable-Baselines3 over one run, for `curves.py`; it runs where SB3 is installed.

Prints one line of JSON for each evaluation, and one with the wall time at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

ALGOS: dict[str, Any] = {"sac": SAC, "dqn": DQN}


class SmallCNN(BaseFeaturesExtractor):
    """[N, H, W, C] bits -> [N, 16 * (H - 2) * (W - 2)]: the convolution of Young and Tian 2019."""

    def __init__(self, observation_space: gym.spaces.Box) -> None:
        height, width, channels = observation_space.shape
        super().__init__(observation_space, 16 * (height - 2) * (width - 2))
        self.conv = nn.Conv2d(channels, 16, 3)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(observations.permute(0, 3, 1, 2))).flatten(1)


class Evaluations(BaseCallback):
    """Plays `episodes` deterministic episodes every `interval` steps."""

    def __init__(self, env: gym.Env[Any, Any], interval: int, episodes: int) -> None:
        super().__init__()
        self._own, self._interval, self._episodes = env, interval, episodes

    def _on_step(self) -> bool:
        if self.num_timesteps % self._interval == 0:
            mean, _ = evaluate_policy(self.model, self._own, self._episodes, deterministic=True)
            print(json.dumps({"step": self.num_timesteps, "score": float(mean)}), flush=True)
        return True


def make(env: str) -> gym.Env[Any, Any]:
    """The environment; MinAtar's with bits as floats, which SB3's networks need, and penstock's limit of steps."""
    if env.startswith("MinAtar/"):
        from minatar.gym import register_envs

        if env not in gym.registry:
            register_envs()
        made = gym.make(env, max_episode_steps=5_000)
        floats = gym.spaces.Box(0.0, 1.0, made.observation_space.shape, "float32")
        return Monitor(gym.wrappers.TransformObservation(made, lambda obs: obs.astype("float32"), floats))
    return Monitor(gym.make(env))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("algo", "env", "settings"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("seed", "steps", "interval", "episodes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = json.loads(args.settings)
    if args.env.startswith("MinAtar/"):
        settings["policy_kwargs"] = {**settings.get("policy_kwargs", {}), "features_extractor_class": SmallCNN}
    started = time.perf_counter()
    model = ALGOS[args.algo]("MlpPolicy", make(args.env), seed=args.seed, device="cpu", **settings)
    other = make(args.env)
    other.reset(seed=10_000 + args.seed)
    model.learn(args.steps, callback=Evaluations(other, args.interval, args.episodes))
    print(json.dumps({"wall_s": time.perf_counter() - started, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    main()
