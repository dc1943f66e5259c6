"""Two learners against one: PPO on 84 x 84 frames, by turns, and what the all-reduce of a gradient step takes.

    taskset -c 0,1 python benchmarks/learners.py [--net nature|impala|both] [--rounds 5] [--batches 6] [--kills 10]

Environments draw frames at next to no cost, so that the networks are what is timed. Each measurement is a fresh process:
after two batches to warm up, env steps a second over `--batches` iterations of one learner with one thread, one learner
with two, and two learners with one thread each, in turns, so that whatever else the machine does hits all three. The
all-reduce is timed in rank 0 of the third: all of it (with the wait for the slower rank), and right after a barrier (the
exchange alone), as shares of the seconds that training took. `--kills N` instead kills a rank of a small run at N random
moments, and compares the policy and the log with those of a run that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch

import penstock as ps
from penstock.core import VERSION
from penstock.run.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
LIMIT_S = 900.0
T, B = 64, 16
MODES = {"one thread": (1, 1), "two threads": (1, 2), "two learners": (2, 1)}
"""Learners, and threads of each."""
BARS = {"one thread": 1.7, "two threads": 1.1}
REDUCE_BAR = 0.05


class Frames(gym.Env[Any, Any]):
    """84 x 84 frames, four in a stack, drawn from a few that were made beforehand; an episode has 500 steps."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def __init__(self) -> None:
        self._frames = np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84), np.uint8)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._frames[0], {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._frames[self._t % 8], float(action == self._t % 6), False, self._t >= 500, {}


def experiment(net: str, learners: int, threads: int) -> ps.Experiment:
    algo: Any = ps.PPO(epochs=2, minibatch=256, net=ps.Net(hidden=(512,), activation="relu", cnn=net))  # pyright: ignore
    run = ps.RunConfig(steps=10**9, learners=learners, learner_threads=threads, progress="off")
    return ps.Experiment(Frames, algo, ps.SerialSampler(T=T, B=B), run)


def measured(net: str, mode: str, batches: int) -> dict[str, float]:
    """Env steps a second, and for several learners the shares of the all-reduce, in this process."""
    learners, threads = MODES[mode]
    with Trainer(experiment(net, learners, threads)) as trainer:
        for _ in range(2):
            trainer.train()
        comm: Any = trainer.policy.comm
        spent = [0.0]
        if learners > 1:
            plain = comm.all_reduce

            def timed(x: torch.Tensor) -> torch.Tensor:
                started = time.perf_counter()
                try:
                    return plain(x)
                finally:
                    spent[0] += time.perf_counter() - started

            comm.all_reduce = timed
        started, steps = time.perf_counter(), trainer.env_steps
        results = [trainer.train() for _ in range(batches)]
        took_s = time.perf_counter() - started
        found = {"steps/s": (trainer.env_steps - steps) / took_s}
        if learners > 1:
            learning = sum(1.0 - result["time/sample_frac"] for result in results) / batches * took_s
            found |= {"waiting": spent[0] / learning, "updates": float(trainer.policy.updates), "learning": learning}
            found["parameters"] = float(sum(p.numel() for p in trainer.policy.agent.parameters()))
        return found


def exchange(path: str, rank: int, numbers: int) -> float:
    """Median seconds of an all-reduce of so many numbers between two ranks that come to it at once."""
    from penstock.learn.comm import GroupComm, meet

    torch.set_num_threads(1)
    comm = GroupComm(meet(path, rank, 2))
    x, found = torch.ones(numbers), list[float]()
    for _ in range(40):
        comm.barrier()
        started = time.perf_counter()
        comm.all_reduce(x)
        found.append(time.perf_counter() - started)
    return statistics.median(found[10:])


def apart(*arguments: str, wait: bool = True) -> Any:
    """Runs a part of this file in a fresh process."""
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    return json.loads(process.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) if wait else process


def speed(nets: list[str], rounds: int, batches: int) -> tuple[list[str], bool]:
    lines, good = [], True
    for net in nets:
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for k in range(rounds):
            for mode in MODES:
                found[mode].append(apart("--measure", net, mode, str(batches)))
                print(f"{net} {k + 1}/{rounds} {mode}: {found[mode][-1]['steps/s']:,.0f} steps/s", flush=True)
        two = found["two learners"]
        with tempfile.TemporaryDirectory() as folder:
            place = [f"{folder}/meeting", str(int(two[0]["parameters"]))]
            other = apart("--exchange", "1", *place, wait=False)
            alone_s = apart("--exchange", "0", *place)
            other.wait(timeout=LIMIT_S)
        steps = batches * 2 * round(T * B / 256)
        share = statistics.median(alone_s * steps / x["learning"] for x in two)
        waiting = statistics.median(x["waiting"] for x in two)
        lines += [
            f"\n## {net}, {int(two[0]['parameters']):,} parameters\n",
            "| | steps/s (median, least, most) |",
            "|---|---|",
        ]
        for mode, rows in found.items():
            rates = [x["steps/s"] for x in rows]
            lines.append(f"| {mode} | {statistics.median(rates):,.0f} ({min(rates):,.0f}, {max(rates):,.0f}) |")
        for mode, bar in BARS.items():
            ratio = statistics.median(y["steps/s"] / x["steps/s"] for x, y in zip(found[mode], two))
            good &= ratio >= bar
            lines.append(f"\nTwo learners against {mode}, by turns: {ratio:.2f} times (bar {bar}).")
        good &= share <= REDUCE_BAR
        lines.append(
            f"\nAll-reduce: {alone_s * 1e3:.1f} ms, {share:.1%} of training (bar {REDUCE_BAR:.0%}); with the wait for the "
            f"other rank {waiting:.1%}."
        )
    return lines, good


def small(folder: str, learners: int) -> ps.Experiment:
    algo: Any = ps.PPO(epochs=2, minibatch=64, net=ps.Net(hidden=(32,), normalize_obs=True))
    run = ps.RunConfig(
        steps=20_000, seed=1, dir=folder, learners=learners, progress="off", eval_episodes=4, checkpoint_interval=2_000,
        log_interval=0, tensorboard=False,
    )  # fmt: skip
    return ps.Experiment("CartPole-v1", algo, ps.SerialSampler(T=32, B=8), run)


def trained(folder: str, kills: int, seed: int) -> tuple[list[Any], list[bytes], int]:
    """The log without times, the bits of the policy, and how many ranks were killed on the way."""
    killed, over = [0], threading.Event()

    def strike() -> None:
        rng, known = random.Random(seed), set[int]()
        while killed[0] < kills and not over.wait(rng.uniform(0.0, 4.0)):
            ranks = [p for p in psutil.Process().children() if "penstock.run.gang.rank" in " ".join(p.cmdline())]
            for process in [p for p in ranks if p.pid not in known][:1]:
                known.add(process.pid)
                process.send_signal(signal.SIGKILL)
                killed[0] += 1

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = ps.train(small(folder, 2))
    over.set()
    thread.join(10.0)
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not k.startswith("time/") and "wait" not in k} for row in rows]
    return kept, [x.detach().numpy().tobytes() for x in result.policy.agent.state_dict().values()], killed[0]


def kills(count: int) -> tuple[list[str], bool]:
    with tempfile.TemporaryDirectory() as folder:
        rows, bits, _ = trained(f"{folder}/whole", 0, 0)
        lines, equal, done, k = ["\n## kill -9 of a rank\n"], 0, 0, 0
        while done < count:
            k += 1
            found, other, killed = trained(f"{folder}/{k}", min(count - done, 2), k)
            done += killed
            same = (found, other) == (rows, bits)
            equal += same
            print(f"run {k}: {killed} killed, {done} of {count}; {'same' if same else 'DIFFERENT'} bits", flush=True)
        lines.append(
            f"{done} kills at random moments in {k} runs of two learners: {equal} of {k} ended with the same bits."
        )
    return lines, equal == k


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--net", choices=("nature", "impala", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--exchange", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        net, mode, batches = args.measure
        print(json.dumps(measured(net, mode, int(batches))))
        return
    if args.exchange:
        rank, path, numbers = args.exchange
        print(json.dumps(exchange(path, int(rank), int(numbers))))
        return
    name = "learners-kills.md" if args.kills else "learners.md"
    nets = ["nature", "impala"] if args.net == "both" else [args.net]
    lines, good = kills(args.kills) if args.kills else speed(nets, args.rounds, args.batches)
    head = f"# Many learners\n\npenstock {VERSION}, torch {torch.__version__}, {os.cpu_count()} CPUs; `{Path(__file__).name}`"
    (RESULTS / name).write_text("\n".join([head, *lines]) + "\n")
    print("\n".join(lines))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
