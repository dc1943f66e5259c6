"""Steps per second of Sample Factory's sampler alone, by its SyncSamplingAPI; for `samplers.py`, where it is installed.

Its own way to the same work: worker processes step, a policy worker acts for all of them, each worker's environments in
two halves that take turns, trajectories of T steps through shared memory. Its releases so far need gymnasium<1.0 and
numpy<2, so it runs with an older Gymnasium than the others, and the sampling never waits for a learner.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import torch
import turns
from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
from sample_factory.algo.utils.rl_utils import samples_per_trajectory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env

ENV, T = "CartPole-v1", 128


def make_env(full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    """What Sample Factory calls in its workers."""
    return gym.make(full_env_name, render_mode=render_mode)


@contextmanager
def sampling(B: int, workers: int, seed: int) -> Iterator[turns.Unit]:
    """Trajectories, after one for every slot and a second to warm up."""
    register_env(ENV, make_env)
    folder = tempfile.TemporaryDirectory()
    words = [f"--env={ENV}", "--experiment=speed", f"--train_dir={folder.name}", f"--seed={seed}", "--device=cpu",
             f"--num_workers={workers}", f"--num_envs_per_worker={B // workers}", "--worker_num_splits=2",
             f"--rollout={T}", "--use_rnn=False", "--recurrence=1", f"--batch_size={T * B}", "--num_batches_per_epoch=1",
             "--nonlinearity=tanh", "--actor_critic_share_weights=False", "--normalize_input=False", "--with_wandb=False",
             "--batched_sampling=False", "--async_rl=True"]  # fmt: skip
    parser, _ = parse_sf_args(argv=words)
    parser.set_defaults(encoder_mlp_layers=[64, 64])
    cfg = parse_full_cfg(parser, words)
    sampler: Any = SyncSamplingAPI(cfg, obtain_env_info_in_a_separate_process(cfg))
    sampler.start()

    def unit() -> float:
        return samples_per_trajectory(sampler.get_trajectories_sync())

    seen, first = 0.0, time.perf_counter()
    while seen < T * B or time.perf_counter() - first < 1.0:
        seen += unit()
    yield unit
    sampler.stop()
    folder.cleanup()


if __name__ == "__main__":
    torch.set_num_threads(1)
    turns.child({"sampling": sampling}, "sample-factory", "torch", "numpy", "gymnasium")
