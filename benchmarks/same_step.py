"""What a reset in the step of an end costs: `python benchmarks/same_step.py`, from the root.

CartPole of tensors with episodes of at most 50 steps, once with a reset in the step of an end and `SampleBatch.final`, once
with a reset in the next step, which takes a row. They take turns in one process; processor time of one thread, env steps.
"""

from __future__ import annotations

import functools
import statistics
import time

import torch

import penstock as ps
from penstock.tensor_envs import CartPole

T, B, TURNS = 24, 2048, 12


def main() -> None:
    torch.set_num_threads(1)
    live = []
    for same_step in (True, False):
        env = functools.partial(CartPole, max_episode_steps=50, same_step=same_step)
        sampler = ps.SerialSampler(T=T, B=B).build(env, seed=0)
        policy = ps.PPO(minibatch=T * B // 4, epochs=5).build(sampler.spec)
        sampler.initialize(policy.agent)
        live.append((sampler, policy))
    sampled: list[float] = []
    iterated: list[float] = []
    for turn in range(TURNS + 1):
        rates = []
        for sampler, policy in live:
            start = time.process_time()
            batch, _ = sampler.obtain_samples(turn)
            middle = time.process_time()
            ps.train_one_step(policy, batch)
            end = time.process_time()
            rates.append((batch.env_steps / (middle - start), batch.env_steps / (end - start)))
        if turn:  # the first warms up
            (one, whole), (other, other_whole) = rates
            sampled.append(one / other)
            iterated.append(whole / other_whole)
    for name, found in (("sampling", sampled), ("an iteration of PPO", iterated)):
        print(
            f"{name}, valid steps/s, same step / next step: {statistics.median(found):.3f}",
            [round(x, 2) for x in found],
        )


if __name__ == "__main__":
    main()
