"""An environment of your own, checked and trained on: python examples/4_your_own_environment.py [steps]"""

import sys

import gymnasium as gym
import numpy as np

import penstock as ps


class Corridor(gym.Env):
    def __init__(self, length=10):
        self.length = length
        self.observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.t = 0
        return np.array([0], np.float32), {}

    def step(self, action):
        self.at, self.t = max(self.at + (1 if action == 1 else -1), 0), self.t + 1
        there = self.at == self.length
        obs, info = np.array([self.at / self.length], np.float32), {"cells": self.at, "is_success": there}
        return obs, float(there) - 0.01, there, self.t >= 50, info


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    print(ps.check_env(Corridor))
    result = ps.train(ps.Experiment(Corridor, ps.PPO(), info_keys=("cells",), run=ps.RunConfig(steps=steps)))
    print({key: value for key, value in result.metrics.items() if "cells" in key or "success" in key})
