"""Pong with the Nature CNN: what a sampler costs beside the bare loop, what two groups gain, and PPO beside SB3.

Sampling: everything in one process with one torch thread, the contenders built side by side and measured in turns of one
batch each, A B C A B C, so that whatever else the machine does falls on all. PPO: a fresh process for each measurement,
in turns as well. The tables give medians, and medians of each round's ratio.

    python benchmarks/atari.py --peer .venv-peer/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "atari.md"
GAME, B, T = "pong", 16, 64
PPO_T, PPO_BATCHES = 128, 2
BARS = {"lockstep": 0.95, "two groups": 1.25}
PPO_BAR = 1.2


# ---- sampling: each contender is a function that takes T * B steps ----


def bare_loop(threads: int) -> Callable[[], None]:
    """`env.step` and the forward that chooses actions, and nothing else: no record is kept."""
    import torch
    from torch import nn

    from penstock.envs.atari import atari_vector

    env: Any = atari_vector(GAME, B, threads=threads)
    net = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, int(env.single_action_space.n)),
    )  # fmt: skip
    obs, _ = env.reset(seed=0)

    def turn() -> None:
        nonlocal obs
        with torch.inference_mode():
            for _ in range(T):
                logits = net(torch.from_numpy(obs).float() / 255.0)
                noise = -torch.log(-torch.log(torch.rand_like(logits)))
                obs = env.step((logits + noise).argmax(-1).numpy())[0]

    return turn


def sampled(sampler: Any, threads: int) -> Callable[[], None]:
    """`obtain_samples` of a sampler, with the agent that PPO trains."""
    import penstock as ps

    settings = {"game": GAME, "num_envs": B, "threads": threads}
    live = sampler.build(ps.EnvConfig("penstock.envs.atari:atari_vector", settings), 0)
    live.initialize(_ppo().build(live.spec, 1).agent)
    itr = 0

    def turn() -> None:
        nonlocal itr
        live.obtain_samples(itr)
        itr += 1

    return turn


def sampling(rounds: int, threads: int, groups_threads: int) -> dict[str, list[float]]:
    """Steps per second of each contender in each round."""
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    contenders = {
        "bare loop": bare_loop(threads),
        "lockstep": sampled(ps.SerialSampler(T=T, B=B), threads),
        "two groups": sampled(ps.AlternatingSampler(T=T, B=B), groups_threads),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for k in range(rounds + 2):
        for name, turn in contenders.items():
            started = time.perf_counter()
            turn()
            if k >= 2:  # the first two are for warming up
                rates[name].append(T * B / (time.perf_counter() - started))
    return rates


# ---- PPO: one measurement is one process ----


def _ppo() -> Any:
    import penstock as ps

    return ps.override(ps.preset("ppo", "penstock.envs.atari:atari").algo, {"lr": 2.5e-4, "clip": 0.1})


def ppo_penstock(name: str, threads: int) -> float:
    """Environment steps per second of `train`, without building."""
    import tempfile

    import penstock as ps

    sampler = ps.AlternatingSampler(T=PPO_T, B=B) if name == "two groups" else ps.SerialSampler(T=PPO_T, B=B)
    steps = PPO_BATCHES * PPO_T * B
    with tempfile.TemporaryDirectory() as folder:
        run = ps.RunConfig(steps=steps, dir=f"{folder}/run", checkpoint_interval=0, eval_episodes=0, progress="off")
        env = ps.EnvConfig("penstock.envs.atari:atari_vector", {"game": GAME, "num_envs": B, "threads": threads})
        return float(ps.train(ps.Experiment(env, _ppo(), sampler, run=run)).metrics["time/fps"])


def ppo_sb3(processes: bool) -> float:
    """Environment steps per second of `learn`, with the settings of the preset."""
    import ale_py
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    torch.set_num_threads(1)
    gym.register_envs(ale_py)
    kind = SubprocVecEnv if processes else DummyVecEnv
    settings = {"start_method": "fork"} if processes else {}  # other starts would not know the ids
    envs = VecFrameStack(
        make_atari_env("PongNoFrameskip-v4", n_envs=B, seed=0, vec_env_cls=kind, vec_env_kwargs=settings), 4
    )
    model = PPO("CnnPolicy", envs, n_steps=PPO_T, batch_size=256, n_epochs=4, learning_rate=2.5e-4, clip_range=0.1,
                ent_coef=0.01, device="cpu")  # fmt: skip
    started = time.perf_counter()
    model.learn(PPO_BATCHES * PPO_T * B)
    seconds = time.perf_counter() - started
    envs.close()
    return model.num_timesteps / seconds


def _measured(python: str, name: str, threads: int) -> float:
    command = [python, __file__, "--measure", name, "--threads", str(threads)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["value"])


def ppo(rounds: int, peer: str | None, threads: int, groups_threads: int) -> dict[str, list[float]]:
    """Steps per second of each contender in each round."""
    names = ["lockstep", "two groups", *(["SB3, DummyVecEnv", "SB3, SubprocVecEnv"] if peer else [])]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            python = peer if peer and name.startswith("SB3") else sys.executable
            rates[name].append(_measured(python, name, groups_threads if name == "two groups" else threads))
    return rates


# ---- the report ----


def table(rates: dict[str, list[float]], reference: str, bars: dict[str, float]) -> list[str]:
    """Medians with quartiles, and medians of each round's ratio to the reference."""
    lines = [f"| | steps/s | quartiles | of {reference} | bar |", "|---|---:|---:|---:|---|"]
    for name, values in rates.items():
        ratio = statistics.median(x / y for x, y in zip(values, rates[reference]))
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        bar = f">= {bars[name]}: {'met' if ratio >= bars[name] else 'missed'}" if name in bars else ""
        lines.append(f"| {name} | {statistics.median(values):,.0f} | {low:,.0f} to {high:,.0f} | {ratio:.2f} | {bar} |")
    return lines


def main() -> None:
    """Measures, prints the tables and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="a Python that has Stable-Baselines3, ale-py and opencv")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ppo-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of ale-py in lockstep; 0 is one for each core")
    parser.add_argument("--groups-threads", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="of each group")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        sb3 = args.measure.startswith("SB3")
        value = ppo_sb3("Subproc" in args.measure) if sb3 else ppo_penstock(args.measure, args.threads)
        print(json.dumps({"value": value}))
        return
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    lines = ["# Atari", "", f"Pong, B={B}, Nature CNN, one torch thread; {platform.machine()} with {os.cpu_count()} cores, load {load:.1f} "
             f"before the start. ale-py threads: {args.threads or 'one for each core'} in lockstep, {args.groups_threads} for "
             "each of two groups.", "", f"## Sampling, {args.rounds} rounds", ""]  # fmt: skip
    lines += table(sampling(args.rounds, args.threads, args.groups_threads), "bare loop", BARS)
    if args.ppo_rounds:
        rates = ppo(args.ppo_rounds, args.peer, args.threads, args.groups_threads)
        peers = [name for name in rates if name.startswith("SB3")]
        best = max(peers, key=lambda name: statistics.median(rates[name])) if peers else "lockstep"
        bars = dict.fromkeys(("lockstep", "two groups"), PPO_BAR) if peers else {}
        lines += ["", f"## PPO, {args.ppo_rounds} rounds of {PPO_BATCHES} batches", "", *table(rates, best, bars)]
    RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
