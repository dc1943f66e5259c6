"""RLlib's PPO on MPE's simple spread with the settings of penstock's preset, for `many_agents.py spread`.

    python benchmarks/peers/rllib_spread.py --seed 1 [--steps 100000]

It runs where `ray[rllib]`, `pettingzoo` and `mpe2` are installed, in one process: one shared policy, T=25, 32
environments, 10 epochs of minibatches of 400, lr from 7e-4 to 0, discount 0.9, lambda 0.95. RLlib does not normalise
rewards; its value loss is not clipped here. Prints the mean return of an agent over 100 deterministic episodes.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from typing import Any

import numpy as np
import ray
import torch
from mpe2 import simple_spread_v3
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.tune.registry import register_env

T, E, AGENTS = 25, 32, 3


def algorithm(seed: int, steps: int) -> Any:
    """PPO over one shared policy."""
    register_env("spread", lambda _: ParallelPettingZooEnv(simple_spread_v3.parallel_env()))
    net = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", head_fcnet_hiddens=[], vf_share_layers=False
    )
    return (
        PPOConfig()
        .environment("spread")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=E, rollout_fragment_length=T)
        .learners(num_learners=0)
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, episode, **_: "shared")
        .rl_module(rl_module_spec=RLModuleSpec(model_config=net))
        .training(
            lr=[[0, 7e-4], [steps, 0.0]],
            gamma=0.9,
            lambda_=0.95,
            clip_param=0.2,
            vf_clip_param=1e9,
            vf_loss_coeff=0.5,
            grad_clip=10.0,
            grad_clip_by="global_norm",
            entropy_coeff=0.01,
            use_kl_loss=False,
            train_batch_size_per_learner=T * E,
            minibatch_size=400,
            num_epochs=10,
        )
        .debugging(seed=seed, log_level="ERROR")
        .build_algo()
    )


def score(module: Any, episodes: int) -> float:
    """Mean return of an agent by likeliest moves."""
    env, total = simple_spread_v3.parallel_env(), 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=episode)
        while env.agents:
            rows = torch.as_tensor(np.stack([obs[agent] for agent in env.agents]))
            with torch.no_grad():
                moves = module.forward_inference({"obs": rows})["action_dist_inputs"].argmax(-1).tolist()
            obs, rewards, *_ = env.step(dict(zip(env.agents, moves, strict=True)))
            total += sum(rewards.values())
    return total / episodes / AGENTS


def main() -> None:
    """Trains and prints a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    started, algo = time.monotonic(), algorithm(args.seed, args.steps)
    steps = 0
    while steps < args.steps:
        steps = int(algo.train()["env_runners"]["num_env_steps_sampled_lifetime"])
    found = score(algo.get_module("shared"), 100)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"run": "spread/RLlib PPO", "seed": args.seed, "steps": steps, "score": found, "s": seconds}))
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
