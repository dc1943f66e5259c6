"""Cost of an iteration besides environment, acting and learning, at several distances into one long episode.

    python benchmarks/iteration.py [--only dqn] [--steps 1000,16000,64000] [--iterations 500]

A `Trainer` trains in an environment that costs next to nothing and never ends. From the CPU time of each `train()` the
time in the environment, in `agent.act` and in post-processing and gradient steps is taken; the median of the rest is
shown, in ms, for batches of one row and of T=128, B=16, with a gradient step in each iteration and without. Another
checkout is measured by `PYTHONPATH=CHECKOUT python benchmarks/iteration.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import penstock as ps

CASES = {"dqn": "discrete", "sac": "box"}
SHAPES = {"1x1": (1, 1), "128x16": (128, 16)}
spent_ns = 0


class Endless(gym.Env[Any, Any]):
    """An episode without an end, whose observations and rewards are made beforehand."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (17,), np.float32)

    def __init__(self, action: str = "discrete") -> None:
        self.action_space = gym.spaces.Discrete(4) if action == "discrete" else gym.spaces.Box(-1.0, 1.0, (6,))
        self._rows = np.random.default_rng(0).uniform(-1, 1, (256, 17)).astype(np.float32)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._t = 0
        return self._rows[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self._rows[self._t % 256], 0.5, False, False, {}


def excluded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its CPU time counted in `spent_ns`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        global spent_ns
        started = time.thread_time_ns()
        try:
            return fn(*args, **kwargs)
        finally:
            spent_ns += time.thread_time_ns() - started

    return run


def trainer(algo: str, T: int, B: int, learns: bool) -> ps.Trainer:
    """A run whose environment, acting and learning count their own time."""
    updates = 1 / (T * B) if learns else 1e-9
    settings: Any = {"dqn": ps.DQN, "sac": ps.SAC}[algo]()
    settings = dataclasses.replace(settings, learning_starts=T * B, replay_ratio=updates * settings.batch_size)
    run = ps.RunConfig(steps=10**9, progress="off", tensorboard=False)
    env_kwargs = {"action": CASES[algo]}
    exp = ps.Experiment(Endless, settings, ps.SerialSampler(T=T, B=B), run, env_kwargs=env_kwargs)
    made = ps.Trainer(exp)
    policy: Any = made.policy
    pool: Any = made.sampler.pool  # pyright: ignore[reportAttributeAccessIssue]
    pool._steps = [excluded(step) for step in pool._steps]
    policy.agent.act = excluded(policy.agent.act)
    policy.postprocess, policy.learn_on_batch = excluded(policy.postprocess), excluded(policy.learn_on_batch)
    policy.replay_schedule.after_update = excluded(policy.replay_schedule.after_update)
    return made


def measure(algo: str, T: int, B: int, learns: bool, steps: list[int], iterations: int) -> list[float]:
    """ms of an iteration once the episode has each of these numbers of steps."""
    global spent_ns
    found: list[float] = []
    live = trainer(algo, T, B, learns)
    try:
        for distance in steps:
            while live.itr * T < distance:
                live.train()
            costs: list[int] = []
            for _ in range(iterations):
                spent_ns, started = 0, time.thread_time_ns()
                live.train()
                costs.append(time.thread_time_ns() - started - spent_ns)
            found.append(statistics.median(costs) / 1e6)
    finally:
        live.stop()
    return found


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this: dqn, 1x1, learning")
    parser.add_argument("--steps", default="1000,16000,64000", help="steps into the episode (1000,16000,64000)")
    parser.add_argument("--iterations", type=int, default=500, help="iterations of which the median is shown (500)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = [int(text) for text in args.steps.split(",")]
    print(f"{ps.__file__}\n{'ms an iteration after steps':32}" + "".join(f"{n:>10,}" for n in steps))
    for algo in CASES:
        for shape, (T, B) in SHAPES.items():
            for learns in (False, True):
                name = f"{algo} {shape}{' learning' if learns else ''}"
                if args.only in name and (B == 1 or not learns):
                    iterations = max(args.iterations // T, 25)
                    found = measure(algo, T, B, learns, steps, iterations)
                    print(f"{name:32}" + "".join(f"{ms:10.3f}" for ms in found), flush=True)


if __name__ == "__main__":
    main()
