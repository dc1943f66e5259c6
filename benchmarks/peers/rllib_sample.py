"""Steps per second of RLlib 2.60 with two env runners, for `cluster.py`; it runs where `ray[rllib]` is installed.

`--what sampling` is what its PPO calls to sample: `synchronous_parallel_sample` over the group, episodes returned to the
driver. `--what training` is iterations of its PPO: `algo.train()`. Both on the new API stack, with the settings of
`cluster_parts.py`; processes have one thread and no niceness.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample

ENV, RUNNERS, B, T = "CartPole-v1", 2, 16, 128


def config(seed: int) -> Any:
    """PPO with the networks and settings of penstock's side."""
    steps = RUNNERS * B * T
    return (
        PPOConfig()
        .environment(ENV)
        .env_runners(num_env_runners=RUNNERS, num_envs_per_env_runner=B, rollout_fragment_length=T)
        .learners(num_learners=0)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[64, 64], fcnet_activation="tanh", head_fcnet_hiddens=[], vf_share_layers=False
            )
        )
        .training(
            lr=1e-3,
            gamma=0.99,
            lambda_=0.95,
            clip_param=0.2,
            vf_clip_param=1e9,
            vf_loss_coeff=0.5,
            grad_clip=0.5,
            grad_clip_by="global_norm",
            entropy_coeff=0.01,
            use_kl_loss=False,
            train_batch_size_per_learner=steps,
            minibatch_size=512,
            num_epochs=4,
        )
        .debugging(seed=seed, log_level="ERROR")
    )


def tree_cpu_s() -> float:
    """CPU seconds so far of this process and of all below it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def rated(iteration: Callable[[], int], seconds: float) -> dict[str, list[float]]:
    """Rate and cost after three iterations that warm up."""
    for _ in range(3):
        iteration()
    steps, cpu, started = 0, tree_cpu_s(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        steps += iteration()
    took = time.perf_counter() - started
    return {"rllib steps/s": [steps / took], "rllib CPU us": [(tree_cpu_s() - cpu) * 1e6 / steps]}


def main() -> None:
    """Prints what was measured as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("sampling", "training"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            "local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder
        )
        algo = config(args.seed).build_algo()
        group = algo.env_runner_group

        def sampled() -> int:
            episodes = synchronous_parallel_sample(
                worker_set=group, max_env_steps=RUNNERS * B * T, _uses_new_env_runners=True, concat=True
            )
            return sum(len(episode) for episode in episodes)

        lifetime = 0

        def trained() -> int:
            nonlocal lifetime
            before, lifetime = lifetime, int(algo.train()["env_runners"]["num_env_steps_sampled_lifetime"])
            return lifetime - before

        assert group is not None
        found = rated(sampled if args.what == "sampling" else trained, args.seconds)
        algo.stop()
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
