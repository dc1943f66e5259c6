"""Pong with the Nature CNN: what a sampler costs beside the bare loop, and what two groups gain.

Everything in one process with one torch thread, the contenders built side by side and measured in turns of one batch each,
A B C A B C, so that whatever else the machine does falls on all. The table gives medians, and medians of each round's
ratio. `atari_ppo.py` measures PPO.

    python benchmarks/atari.py
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "atari.md"
GAME, B, T = "pong", 16, 64
BARS = {"lockstep": 0.95, "two groups": 1.25}


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


def _ppo() -> Any:
    import penstock as ps

    return ps.override(ps.preset("ppo", "penstock.envs.atari:atari").algo, {"lr": 2.5e-4, "clip": 0.1})


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
    """Measures, prints the table and writes it, before what `atari_ppo.py` has written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="of ale-py in lockstep; 0 is one for each core")
    parser.add_argument("--groups-threads", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="of each group")
    args = parser.parse_args()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    lines = ["# Atari", "", f"Pong, B={B}, Nature CNN, one torch thread; {platform.machine()} with {os.cpu_count()} cores, load {load:.1f} "
             f"before the start. ale-py threads: {args.threads or 'one for each core'} in lockstep, {args.groups_threads} for "
             "each of two groups.", "", f"## Sampling, {args.rounds} rounds", ""]  # fmt: skip
    lines += table(sampling(args.rounds, args.threads, args.groups_threads), "bare loop", BARS)
    _, there, after = RESULTS.read_text().partition("## PPO")
    RESULTS.write_text("\n".join([*lines, "", there + after]) if there else "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
