"""Steps per second of SAC, TD3 and DQN with one gradient step for each environment step, beside Stable-Baselines3.

Same networks (256 x 256), batch (256; DQN 128), one thread each. Both sides live in one process each and take turns,
A B A B, of the same number of steps; medians and the median of the turns' ratios, of wall time and of CPU time, which
neighbours on the machine disturb less. The machine's rate of matrix products, by the library that an update uses, is
measured between turns, to say what share of it an update reaches.

    python benchmarks/off_policy.py --peer .venv-peer/bin/python [--only sac] [--turns 9] [--steps 300]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch

import penstock as ps
from penstock.agents.mlp import product
from penstock.run.trainer import Trainer

WARM = 500
PEER = Path(__file__).parent / "peers" / "sb3_off_policy.py"
MEMORY = ps.ReplaySettings(capacity=100_000)
ALGOS = {
    "sac": ("Pendulum-v1", ps.SAC(learning_starts=WARM, replay=MEMORY), 256, 1.3),
    "td3": ("Pendulum-v1", ps.TD3(learning_starts=WARM, replay=MEMORY), 256, 1.3),
    "dqn": ("CartPole-v1", ps.DQN(batch_size=128, replay_ratio=128, learning_starts=WARM, double=False, target_interval=10_000,
                                  replay=MEMORY), 128, 1.4),
}  # fmt: skip
PRODUCTS = {"sac": 15, "td3": 12, "dqn": 4}
"""[batch, 256] x [256, 256] products of an update, those of an actor's step counted by half in TD3 (every other one)."""


def gemm_s(batch: int) -> float:
    """Seconds of one [batch, 256] x [256, 256] product."""
    x, w = torch.randn(batch, 256), torch.randn(256, 256)
    times: list[float] = []
    for _ in range(30):
        started = time.perf_counter()
        for _ in range(10):
            product(x, w)
        times.append((time.perf_counter() - started) / 10)
    return min(times)


def measure(name: str, peer: str, turns: int, steps: int) -> str:
    """A row of the table."""
    env, algo, batch, bar = ALGOS[name]
    trainer = Trainer(ps.Experiment(env, algo, None, ps.RunConfig(steps=10**9)))
    other = subprocess.Popen(
        [peer, str(PEER), "--algo", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    while trainer.env_steps < WARM + 200:
        trainer.train()
    ours, theirs, cpu, gemms = [], [], [], []
    for turn in range(turns + 1):
        started, cpu_started, before = time.perf_counter(), time.process_time(), trainer.env_steps
        while trainer.env_steps < before + steps:
            trainer.train()
        done = trainer.env_steps - before
        mine, my_cpu = done / (time.perf_counter() - started), done / (time.process_time() - cpu_started)
        print(steps, file=other.stdin, flush=True)
        answer = json.loads(other.stdout.readline())
        if turn:  # the first warms up
            ours.append(mine)
            theirs.append(steps / answer["s"])
            cpu.append(my_cpu / (steps / answer["cpu_s"]))
            gemms.append(gemm_s(batch))
    other.stdin.close()
    other.wait(60)
    trainer.stop()
    ratio = statistics.median(a / b for a, b in zip(ours, theirs))
    share = PRODUCTS[name] * statistics.median(gemms) * statistics.median(ours)
    speeds = f"{statistics.median(ours):.0f} | {statistics.median(theirs):.0f}"
    ratios = f"{ratio:.2f} | {statistics.median(cpu):.2f}"
    return f"| {name} {env} | {speeds} | {ratios} | {bar}, {'met' if ratio >= bar else '**missed**'} | {share:.2f} |"


def main() -> None:
    """Measures, prints and writes results/off_policy.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="python of a venv with stable-baselines3")
    parser.add_argument("--only", choices=ALGOS)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu = [x.partition(": ")[2] for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    lines = ["# Off-policy updates beside Stable-Baselines3", "",
             f"- command: python benchmarks/off_policy.py --peer PYTHON --turns {args.turns} --steps {args.steps}",
             f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
             f"- machine: {cpu[0]}, {len(cpu)} cores, one thread each, {os.getloadavg()[0]:.1f} runnable processes at the start",
             f"- penstock {ps.__version__}, torch {torch.__version__}, stable-baselines3 2.9.2", "",
             "One gradient step for each environment step, 256 x 256 networks, batches of 256 (DQN: 128).", "",
             "| algorithm | penstock steps/s | SB3 steps/s | ratio, median of turns | ratio of CPU time | bar | share of GEMM rate |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    print("\n".join(lines))
    for name in [args.only] if args.only else ALGOS:
        lines.append(measure(name, args.peer, args.turns, args.steps))
        print(lines[-1], flush=True)
    if not args.only:
        (Path(__file__).parent / "results" / "off_policy.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
