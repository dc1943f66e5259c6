"""Agent steps per second of processor time by Stable-Baselines3 with SuperSuit or by RLlib, for `many_agents_peers.py`.

It runs where that peer is installed, and takes a turn of `--seconds` for every line on its input. `sb3` is the
`collect_rollouts` of its PPO over SuperSuit's vector environment, in one process. `rllib` is what an `EnvRunner` in the
same process samples by its PPO's module, on the new API stack. Both have two hidden layers of 64 for policy and value.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from pettingzoo import ParallelEnv
from toy_agents import Toy


class PeerToy(Toy, ParallelEnv):  # pyright: ignore
    """The toy as an instance of PettingZoo's class, which both peers ask for."""

    def __init__(self, K: int) -> None:
        super().__init__(K)
        self.observation_spaces = dict.fromkeys(self.possible_agents, self._seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, self._moves)

    observation_space, action_space = Toy.observation_space, Toy.action_space


def environment(name: str) -> ParallelEnv[Any, Any, Any]:
    """Spread, or the toy with as many agents as the name's end says."""
    if name == "spread":
        from mpe2 import simple_spread_v3

        return simple_spread_v3.parallel_env()
    return PeerToy(int(name.partition("-")[2]))


def sb3(name: str, T: int, E: int) -> Callable[[], int]:
    """A rollout of PPO, without a seed, which SuperSuit's environment does not take; returns its agent steps."""
    import supersuit
    from stable_baselines3 import PPO

    one = supersuit.pettingzoo_env_to_vec_env_v1(environment(name))
    envs: Any = supersuit.concat_vec_envs_v1(one, E, num_cpus=0, base_class="stable_baselines3")
    net = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    model: Any = PPO("MlpPolicy", envs, n_steps=T, device="cpu", policy_kwargs=net)
    _, callback = model._setup_learn(1 << 40)

    def turn() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=T)
        return T * model.env.num_envs

    return turn


def rllib(name: str, T: int, E: int) -> Callable[[], int]:
    """A sample of T steps of E environments; returns its agent steps."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.tune.registry import register_env

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    register_env(name, lambda _: ParallelPettingZooEnv(environment(name)))
    net = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", head_fcnet_hiddens=[], vf_share_layers=False
    )
    algo: Any = (
        PPOConfig()
        .environment(name)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=E, rollout_fragment_length=T)
        .learners(num_learners=0)
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, episode, **_: "shared")
        .rl_module(rl_module_spec=RLModuleSpec(model_config=net))
        .debugging(seed=1, log_level="ERROR")
        .build_algo()
    )

    def turn() -> int:
        return sum(
            episode.agent_steps() for episode in algo.env_runner.sample(num_timesteps=T * E, random_actions=False)
        )

    return turn


def main() -> None:
    """Serves turns until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("sb3", "rllib"))
    parser.add_argument("--env", required=True, help="toy-K or spread")
    parser.add_argument("--T", type=int, required=True)
    parser.add_argument("--E", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    turn = {"sb3": sb3, "rllib": rllib}[args.peer](args.env, args.T, args.E)
    for _ in sys.stdin:
        steps, started = 0, time.process_time()
        while (spent := time.process_time() - started) < args.seconds:
            steps += turn()
        print(f"rate {steps / spent}", flush=True)


if __name__ == "__main__":
    main()
