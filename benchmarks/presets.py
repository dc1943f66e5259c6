"""What a preset's last policy reaches: `python benchmarks/presets.py ppo LunarLander-v3 --seeds 1 2 3`, from the root.

Trains the preset whole, then plays 20 deterministic episodes by a loop of its own, without the library's evaluation. It
prints a line of JSON for each seed. A mean of 20 episodes of Pendulum has a standard error of about 22, of LunarLander
20, of Acrobot 4.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import penstock as ps
from penstock.run.presets import find_preset, named_preset, with_preset

EPISODES = 20


def returns(policy: Any, env: gym.Env[Any, Any], seed: int) -> list[float]:
    """Of `EPISODES` deterministic episodes."""
    found: list[float] = []
    for episode in range(EPISODES):
        obs, _ = env.reset(seed=100_000 + 1_000 * seed + episode)
        state, start, over, total = None, True, False, 0.0
        while not over:
            action = policy.predict(obs, state, start)
            if isinstance(action, tuple):  # with memory
                action, state = action
            obs, reward, terminated, truncated, _ = env.step(action)
            start, over, total = False, terminated or truncated, total + float(reward)
        found.append(total)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algo")
    parser.add_argument("env")
    parser.add_argument("--table", help="a preset of another name, such as quantile/CartPole-v1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    preset = named_preset(f"{args.algo}/{args.table}") if args.table else find_preset(args.algo, args.env)
    quiet: dict[str, Any] = {"run.eval_episodes": 0, "run.progress": "off"}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            run = str(Path(folder) / "run")
            exp = with_preset(args.algo, args.env, preset)
            exp = ps.override(exp, {**quiet, "run.seed": seed, "run.dir": run})
            before = time.process_time()
            ps.train(exp)
            seconds = time.process_time() - before
            env = exp.env_config.make()
            found = returns(ps.load(run), env, seed)
            env.close()
        row = {"algo": args.algo, "env": args.env, "preset": args.table, "seed": seed, "steps": exp.run.steps}
        print(json.dumps({**row, "mean": np.mean(found), "std": np.std(found), "cpu_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
