"""Episodes until deep_sea is solved by bsuite's criterion, for bootstrapped DQN, PPO with RND, PPO and DQN.

    python benchmarks/deep_sea.py boot-dqn --size 20 --seeds 5

An episode is bad if it leaves the one rewarding path. Solved at the first episode at which fewer than 80% of all episodes
were bad (Osband et al. 2020, arXiv:1908.03568, bsuite's `deep_sea/analysis.py`), within its 10,000 episodes. A run ends there.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import penstock as ps

SHARED: dict[str, Any] = {"epochs": 4, "minibatch": 256, "entropy_coef": 0.001, "normalize_value": False}
ALGOS: dict[str, tuple[Any, ps.SerialSampler]] = {
    "boot-dqn": (ps.BootDQN(), ps.SerialSampler(T=1, B=8)),
    "dqn": (ps.DQN(lr=1e-3, batch_size=128, replay_ratio=32.0, epsilon="linear(1.0, 0.05, 0.1)", target_interval=4,
                   net=ps.Net(hidden=(50, 50), activation="relu")), ps.SerialSampler(T=1, B=8)),
    "ppo-rnd": (ps.PPO(rnd=ps.RND(), **SHARED), ps.SerialSampler(T=40, B=32)),
    "ppo": (ps.PPO(**SHARED), ps.SerialSampler(T=40, B=32)),
    "ppo-normalized": (ps.PPO(**SHARED | {"normalize_value": True}), ps.SerialSampler(T=40, B=32)),
}  # fmt: skip


def solved(name: str, size: int, seed: int, episodes: int) -> tuple[int | None, int, float]:
    """Episode at which it was solved (None: not), good episodes, and seconds of CPU."""
    algo, sampling = ALGOS[name]
    started, n, good = time.process_time(), 0, 0
    env = ps.EnvConfig("penstock.envs.toy:DeepSea", {"size": size})
    sampler = sampling.build(env, seed=seed)
    policy = algo.build(sampler.spec, seed=seed, total_steps=episodes * size)
    sampler.initialize(policy.agent)
    itr, at = 0, None
    while n < episodes and at is None:
        batch, ended = sampler.obtain_samples(itr)
        itr += 1
        for return_ in ended.return_[: episodes - n]:
            n += 1
            good += bool(return_ > 0.5)
            if good > 0.2 * n:
                at = n
                break
        ps.train_one_step(policy, batch)
    sampler.shutdown()
    return at, good, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algo", choices=ALGOS)
    parser.add_argument("--size", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=10_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(args.first, args.first + args.seeds):
        at, good, seconds = solved(args.algo, args.size, seed, args.episodes)
        said = f"solved at episode {at}" if at else f"not solved in {args.episodes} episodes"
        print(
            f"{args.algo}, size {args.size}, seed {seed}: {said}, {good} good ones, {seconds:.0f} s of CPU", flush=True
        )


if __name__ == "__main__":
    main()
