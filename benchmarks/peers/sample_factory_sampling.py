"""Steps per second of Sample Factory's sampler alone, by its SyncSamplingAPI; for `samplers.py`, where it is installed.

Its own way to the same work: worker processes step, a policy worker acts for all of them, each worker's environments in
two halves that take turns, trajectories of T steps through shared memory. Its releases so far need gymnasium<1.0 and
numpy<2, so it runs with an older Gymnasium than the others, and the sampling never waits for a learner.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import gymnasium as gym
import torch
from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
from sample_factory.algo.utils.rl_utils import samples_per_trajectory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env

ENV, T = "CartPole-v1", 128


def make_env(full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    """What Sample Factory calls in its workers."""
    return gym.make(full_env_name, render_mode=render_mode)


def measure(B: int, workers: int, seconds: float, seed: int, folder: str) -> float:
    """Steps per second, after one for every slot and a second to warm up."""
    words = [f"--env={ENV}", "--experiment=speed", f"--train_dir={folder}", f"--seed={seed}", "--device=cpu",
             f"--num_workers={workers}", f"--num_envs_per_worker={B // workers}", "--worker_num_splits=2",
             f"--rollout={T}", "--use_rnn=False", "--recurrence=1", f"--batch_size={T * B}", "--num_batches_per_epoch=1",
             "--nonlinearity=tanh", "--actor_critic_share_weights=False", "--normalize_input=False", "--with_wandb=False",
             "--batched_sampling=False", "--async_rl=True"]  # fmt: skip
    parser, _ = parse_sf_args(argv=words)
    parser.set_defaults(encoder_mlp_layers=[64, 64])
    cfg = parse_full_cfg(parser, words)
    sampler: Any = SyncSamplingAPI(cfg, obtain_env_info_in_a_separate_process(cfg))
    sampler.start()
    seen, first, started = 0, time.perf_counter(), 0.0
    while not started or time.perf_counter() - started < seconds:
        seen += samples_per_trajectory(sampler.get_trajectories_sync())
        if not started and seen >= T * B and time.perf_counter() - first > 1.0:
            seen, started = 0, time.perf_counter()
    rate = seen / (time.perf_counter() - started)
    print(json.dumps({"value": rate}), flush=True)
    sampler.stop()
    return rate


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("B", int), ("workers", int), ("seconds", float), ("seed", int)):
        arguments.add_argument(f"--{name}", type=kind, required=True)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    register_env(ENV, make_env)
    with tempfile.TemporaryDirectory() as where:
        measure(args.B, args.workers, args.seconds, args.seed, where)
