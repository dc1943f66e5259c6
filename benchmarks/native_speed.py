"""What the native kernel gains: `python benchmarks/native_speed.py [CASE ...] [--rounds N]`, from the root.

Each case runs with the kernel and without it by turns, each look in a process of its own on one thread; printed are the
best looks by processor time, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import penstock as ps
from penstock.native.library import VARIABLE
from penstock.replay.sum_tree import SumTree


def _ready(env: str, sampler: Any, algo: Any) -> tuple[Any, Any]:
    live = sampler.build(env, 1)
    policy = algo.build(live.spec, seed=1)
    live.initialize(policy.agent)
    return live, policy


def _sampling(B: int) -> Callable[[int], Any]:
    sampler, _ = _ready("CartPole-v1", ps.SerialSampler(T=128, B=B), ps.PPO())
    return sampler.obtain_samples


def _learning(env: str, sampler: Any, algo: Any, before: int = 2) -> Callable[[int], Any]:
    live, policy = _ready(env, sampler, algo)

    def iteration(itr: int) -> None:
        ps.train_one_step(policy, live.obtain_samples(itr)[0])

    for itr in range(before):
        iteration(itr)
    return lambda itr: iteration(before + itr)


def _predict() -> Callable[[int], Any]:
    _, policy = _ready("CartPole-v1", ps.SerialSampler(T=1, B=1), ps.PPO())
    obs = np.zeros(4, np.float32)
    return lambda itr: policy.predict(obs)


def _tree() -> Callable[[int], Any]:
    rng = np.random.default_rng(0)
    tree = SumTree(1_000_000)
    tree.load(rng.random(1_000_000))
    index, values, shares = rng.integers(0, 1_000_000, 256), rng.random(256), np.sort(rng.random(256))

    def cycle(itr: int) -> None:
        tree.find(shares * tree.total)
        tree.set(index, values)

    return cycle


_ONE = ps.SerialSampler(T=1, B=1)
_OFF: dict[str, Any] = {"learning_starts": 300, "batch_size": 256, "replay_ratio": 256.0}
_DQN = ps.DQN(learning_starts=300, batch_size=128, replay_ratio=128.0, net=ps.Net(hidden=(256, 256), activation="relu"))
CASES: dict[str, tuple[Callable[[], Callable[[int], Any]], int]] = {
    "sample 16": (lambda: _sampling(16), 1),
    "sample 64": (lambda: _sampling(64), 1),
    "predict": (_predict, 500),
    "ppo": (lambda: _learning("CartPole-v1", ps.SerialSampler(T=128, B=16), ps.PPO(minibatch=512, epochs=4)), 1),
    "a2c": (lambda: _learning("CartPole-v1", ps.SerialSampler(T=8, B=16), ps.A2C()), 10),
    "dqn": (lambda: _learning("CartPole-v1", _ONE, _DQN, 400), 20),
    "sac": (lambda: _learning("Pendulum-v1", _ONE, ps.SAC(**_OFF), 400), 20),
    "td3": (lambda: _learning("Pendulum-v1", _ONE, ps.TD3(**_OFF), 400), 20),
    "sum tree": (_tree, 50),
}
"""What makes a case's function of the iteration, and how many iterations a look takes."""


def look(case: str) -> None:
    """Prints the best processor time of an iteration, in microseconds."""
    torch.set_num_threads(1)
    make, count = CASES[case]
    function, best, itr = make(), float("inf"), 0
    for _ in range(25):
        before = time.process_time()
        for _ in range(count):
            function(itr)
            itr += 1
        best = min(best, (time.process_time() - before) / count)
    print(best * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--look", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.look:
        look(args.look)
        return
    print("| case | torch, us | kernel, us | best looks | medians |\n|---|---|---|---|---|")
    for case in args.cases:
        found: dict[str, list[float]] = {"0": [], "1": []}
        for _ in range(args.rounds):
            for value, times in found.items():
                env = {**os.environ, VARIABLE: value}
                done = subprocess.run(
                    [sys.executable, __file__, "--look", case], env=env, capture_output=True, text=True
                )
                times.append(float(done.stdout))
        ratios = [of(found["1"]) / of(found["0"]) for of in (min, statistics.median)]
        row = [case, *(f"{min(x):,.0f}" for x in found.values()), *(f"{x:.2f}" for x in ratios)]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
