"""RLlib 2.60 with two env runners, as a contestant of `cluster.py` (turns.py); it runs where `ray[rllib]` is installed.

`sampling` is what its PPO calls to sample: `synchronous_parallel_sample` over the group, episodes returned to the
driver. `training` is iterations of its PPO: `algo.train()`. Both on the new API stack, with the settings of `cluster.py`;
processes have one thread, the priority of any process, and the loopback interface, as penstock's own clusters have.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_DEDUP_LOGS": "0",
}

import ray
import torch
import turns
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


@contextmanager
def algorithm(seed: int) -> Iterator[Any]:
    """PPO on a cluster of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            "local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder
        )
        algo = config(seed).build_algo()
        yield algo
        algo.stop()
        ray.shutdown()


@contextmanager
def sampling(seed: int) -> Iterator[turns.Unit]:
    """A round of both runners."""
    with algorithm(seed) as algo:

        def unit() -> float:
            episodes = synchronous_parallel_sample(
                worker_set=algo.env_runner_group, max_env_steps=RUNNERS * B * T, _uses_new_env_runners=True, concat=True
            )
            return sum(len(episode) for episode in episodes)

        for _ in range(3):
            unit()
        yield unit


@contextmanager
def training(seed: int) -> Iterator[turns.Unit]:
    """An iteration."""
    with algorithm(seed) as algo:
        lifetime = 0

        def unit() -> float:
            nonlocal lifetime
            before, lifetime = lifetime, int(algo.train()["env_runners"]["num_env_steps_sampled_lifetime"])
            return lifetime - before

        for _ in range(3):
            unit()
        yield unit


if __name__ == "__main__":
    turns.child({"sampling": sampling, "training": training}, "ray", "torch")
