"""Environments of tensors beside Gymnasium's CartPoleVectorEnv through SerialSampler, and what PPO learns on them.

    python benchmarks/tensor_envs.py [--device cuda] [--slots 256,4096] [--rounds 5] [--learn] [--write]

Sampling: T=64, a fresh policy of two layers of 64 tanh units, by turns. Both run on one thread of the CPU by default, where the
processor's time counts; with `--device cuda` the tensors and their agent are there, the numpy arrays and their agent stay
here, and the wall clock counts. `--learn` trains PPO on CartPole and on PixelCatch, from a seed of its own each.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

import penstock as ps
from penstock.run.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "tensor_envs.md"
TENSORS = "penstock.tensor_envs:CartPole"
T, MOST_S = 64, 4.0
LEARNING = {
    "CartPole": (TENSORS, ps.PPO(lr=1e-3, epochs=4, minibatch=2048, gae_lambda=0.9), 32, 475.0, 3_000_000),
    "PixelCatch": ("penstock.tensor_envs:PixelCatch", ps.PPO(lr=1e-3, epochs=4, minibatch=1024), 8, 0.95, 1_000_000),
}


def sampler(env: Any, device: str, B: int) -> Any:
    """A live sampler that has collected its first batch."""
    kwargs = {"device": device} if env == TENSORS else {}
    live = ps.SerialSampler(T, B).build(ps.EnvConfig(env, kwargs), 1)
    live.initialize(ps.PPO().build(live.spec, 0, device if env == TENSORS else "cpu").agent)
    live.obtain_samples(0)
    return live


def rates(device: str, B: int, rounds: int) -> dict[str, list[float]]:
    """Steps per second of both, round by round."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    both = {"tensors": sampler(TENSORS, device, B), "arrays": sampler(CartPoleVectorEnv, device, B)}
    found: dict[str, list[float]] = {name: [] for name in both}
    itr = dict.fromkeys(both, 1)
    for _ in range(rounds):
        for name, live in both.items():
            started, steps = clock(), 0
            while clock() - started < MOST_S / rounds:
                steps += live.obtain_samples(itr[name])[0].env_steps  # which waits for the device
                itr[name] += 1
            found[name].append(steps / (clock() - started))
    for live in both.values():
        live.shutdown()
    return found


def waits(device: str, B: int) -> list[str]:
    """Where the processor waits for the device in a batch's sampling and in an iteration: times, file and line of each."""
    live = sampler(TENSORS, device, B)
    exp = ps.Experiment(
        TENSORS, ps.PPO(minibatch=T * B // 8), ps.SerialSampler(T, B), ps.RunConfig(10**9, device=device)
    )
    with Trainer(replace(exp, env_kwargs={"device": device})) as trainer:
        trainer.train()
        lines = []
        for name, call in {"obtain_samples": lambda: live.obtain_samples(1), "train": trainer.train}.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                call()
                torch.cuda.set_sync_debug_mode("default")
            places = Counter(
                f"{'/'.join(Path(x.filename).parts[-2:])}:{x.lineno}" for x in caught if "synchro" in str(x.message)
            )
            most = ", ".join(f"{place} {times}" for place, times in places.most_common(6))
            lines.append(f"{name}, {T} rows of {B:,} slots: {sum(places.values())} waits ({most})")
    live.shutdown()
    return lines


def learned(name: str, device: str, B: int, seed: int) -> tuple[int, float, float]:
    """Steps and seconds until 100 episodes of an evaluation, one every 10 iterations, reach the goal; and their mean."""
    env, algo, rows, goal, most = LEARNING[name]
    run = ps.RunConfig(steps=most, seed=seed, device=device, eval_slots=100)
    exp = ps.Experiment(env, algo, ps.SerialSampler(rows, B), run, env_kwargs={"device": device})
    took, reached = 0.0, -math.inf
    with Trainer(exp) as trainer:
        while reached < goal and trainer.env_steps < most:
            started = time.perf_counter()
            for _ in range(10):
                trainer.train()
            took += time.perf_counter() - started  # training alone
            reached = trainer.evaluate(100)[1].mean_return
    return trainer.env_steps, took, reached


def main() -> None:
    """Measures and prints, and writes with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", default="256,4096", help="numbers of slots, such as 256,4096,65536")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--learn-slots", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = args.device if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    lines = [f"# Environments of tensors, {where}, torch {torch.__version__}", ""]
    lines += [
        "| slots | tensors, steps/s | numpy arrays, steps/s | ratio, median of rounds (range) |",
        "|---|---|---|---|",
    ]
    for B in map(int, args.slots.split(",")):
        found = rates(args.device, B, args.rounds)
        ratios = [a / b for a, b in zip(found["tensors"], found["arrays"])]
        medians = [f"{statistics.median(found[name]):,.0f}" for name in ("tensors", "arrays")]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {B:,} | {medians[0]} | {medians[1]} | {ratio} |")
        print(lines[-1], flush=True)
    if args.device.startswith("cuda"):
        lines += ["", *waits(args.device, 4096)]
        print(*lines[-2:], sep="\n", flush=True)
    if args.learn:
        lines += ["", "| PPO, seed | steps to the goal | seconds | evaluation |", "|---|---|---|---|"]
        for name, (*_, goal, _) in LEARNING.items():
            for seed in range(args.seeds):
                steps, took, evaluated = learned(name, args.device, args.learn_slots, seed)
                lines.append(f"| {name} to {goal:g}, {seed} | {steps:,} | {took:.1f} | {evaluated:.2f} |")
                print(lines[-1], flush=True)
    text = "\n".join([*lines, ""])
    if args.write:
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
