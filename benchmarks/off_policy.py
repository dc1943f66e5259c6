"""Steps per second of SAC, TD3 and DQN with one gradient step for each environment step, beside other libraries.

Peers are Stable-Baselines3, its JAX twin SBX, jitted, and for DQN one plain file of torch as CleanRL writes them. Same
networks (256 x 256), batch (256; DQN 128), one thread each. All live in one process each, pinned to one core, and take
turns, A B C, A B C, of the same number of steps; medians and the median of the turns' ratios, of wall time and of CPU
time, which neighbours on the machine disturb less. The machine's rate of matrix products, by the library that an update
uses, is measured between turns, to say what share of it an update reaches. PPO on CartPole, 16 x 128 steps and 4 epochs
of minibatches of 512, is measured in the same way, and last penstock with two threads on two cores beside one.

    python benchmarks/off_policy.py --peer PYTHON [--sbx PYTHON] [--only sac] [--turns 9] [--steps 300] [--core 0]

Each PYTHON is that of a virtual environment with stable-baselines3, or with sbx-rl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import penstock as ps
from penstock.agents.mlp import product
from penstock.run.trainer import Trainer

WARM = 500
PEERS, RESULTS = Path(__file__).parent / "peers", Path(__file__).parent / "results" / "off_policy.md"
MEMORY = ps.ReplaySettings(capacity=100_000)


class Case(NamedTuple):
    """One algorithm; `products`: [batch, 256] x [256, 256] of an update, an actor's counted by half in TD3."""

    env: str
    algo: ps.Algorithm
    batch: int
    products: int
    bars: dict[str, float]
    sampler: ps.SerialSampler | None = None


CASES = {
    "sac": Case("Pendulum-v1", ps.SAC(learning_starts=WARM, replay=MEMORY), 256, 15, {"SB3": 1.3, "SBX": 1.1}),
    "td3": Case("Pendulum-v1", ps.TD3(learning_starts=WARM, replay=MEMORY), 256, 12, {"SB3": 1.3, "SBX": 1.1}),
    "dqn": Case("CartPole-v1", ps.DQN(batch_size=128, replay_ratio=128, learning_starts=WARM, double=False, target_interval=10_000,
                                      replay=MEMORY), 128, 4, {"SB3": 1.4, "SBX": 1.3, "plain": 1.3}),
    "ppo": Case("CartPole-v1", ps.PPO(lr=1e-3, entropy_coef=0.01, value_coef=0.5, epochs=4, minibatch=512), 512, 0, {"SBX": 1.6},
                ps.SerialSampler(T=128, B=16)),
}  # fmt: skip
Turn = Callable[[int], tuple[float, float]]
"""Takes that many steps; seconds of wall and of CPU time for each."""


def own(case: Case) -> tuple[Trainer, Turn]:
    """A warm trainer, and its turn."""
    trainer = Trainer(ps.Experiment(case.env, case.algo, case.sampler, ps.RunConfig(steps=10**9)))

    def turn(steps: int) -> tuple[float, float]:
        started, cpu, before = time.perf_counter(), time.process_time(), trainer.env_steps
        while trainer.env_steps < before + steps:
            trainer.train()
        done = trainer.env_steps - before
        return (time.perf_counter() - started) / done, (time.process_time() - cpu) / done

    turn(WARM + 200)
    return trainer, turn


class Peer:
    """A peer in a process of its own, which prints its version, then answers steps with seconds."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with exit code {self._process.wait(60)}")
        return line.strip()

    def __call__(self, steps: int) -> tuple[float, float]:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        answer = json.loads(self._answer())
        return answer["s"] / steps, answer["cpu_s"] / steps

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


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


def by_turns(
    contestants: dict[str, Turn], turns: int, steps: int, between: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds a step of each turn: NAME and `NAME cpu`, and what `between` measures after each."""
    found: dict[str, list[float]] = {"between": []}
    for turn in range(turns + 1):
        for name, go in contestants.items():
            wall, cpu = go(steps)
            if turn:  # the first warms up
                found.setdefault(name, []).append(wall)
                found.setdefault(f"{name} cpu", []).append(cpu)
        found["between"].append(between())
    return found


def ratio(found: dict[str, list[float]], other: str, one: str) -> float:
    """The median over turns of another's time over one's."""
    return statistics.median(b / a for a, b in zip(found[one], found[other]))


def peers_of(name: str, args: argparse.Namespace) -> dict[str, Peer]:
    """The peers of an algorithm that a Python was given for."""
    turns, bars = str(PEERS / "turns.py"), CASES[name].bars
    commands = {
        "SB3": args.peer and [args.peer, turns, "--algo", name],
        "SBX": args.sbx and [args.sbx, turns, "--library", "sbx", "--algo", name],
        "plain": [sys.executable, str(PEERS / "plain_dqn.py")],
    }
    return {peer: Peer(command) for peer, command in commands.items() if command and peer in bars}


def measure(name: str, args: argparse.Namespace) -> list[str]:
    """The table's rows of one algorithm."""
    case = CASES[name]
    trainer, turn = own(case)
    peers = peers_of(name, args)
    steps = args.steps if case.sampler is None else 20 * 2048
    found = by_turns({"penstock": turn, **peers}, args.turns, steps, lambda: gemm_s(case.batch))
    mine = statistics.median(found["penstock"])
    share = case.products * statistics.median(found["between"]) / mine
    rows: list[str] = []
    for peer, process in peers.items():
        wall, cpu, bar = ratio(found, peer, "penstock"), ratio(found, f"{peer} cpu", "penstock cpu"), case.bars[peer]
        speeds = f"{1.0 / mine:,.0f} | {1.0 / statistics.median(found[peer]):,.0f}"
        judged = f"{bar}, {'met' if cpu >= bar else '**missed**'}"
        rows.append(
            f"| {name} {case.env} | {peer} {process.version} | {speeds} | {wall:.2f} | {cpu:.2f} | {judged} | "
            f"{f'{share:.2f}' if share else ''} |"
        )
        process.close()
    trainer.stop()
    return rows


def two_threads(name: str, args: argparse.Namespace) -> str:
    """A row: penstock with one thread and with two, on two cores."""
    case = CASES[name]
    trainer, turn = own(case)

    def with_threads(n: int) -> Turn:
        def go(steps: int) -> tuple[float, float]:
            torch.set_num_threads(n)
            return turn(steps)

        return go

    found = by_turns({"1": with_threads(1), "2": with_threads(2)}, args.turns, args.steps, lambda: 0.0)
    trainer.stop()
    torch.set_num_threads(1)
    wall = ratio(found, "1", "2")
    speeds = " | ".join(f"{1.0 / statistics.median(found[n]):,.0f}" for n in "12")
    return f"| {name} {case.env} | {speeds} | {wall:.2f} | 1.4, {'met' if wall >= 1.4 else '**missed**'} |"


def main() -> None:
    """Measures, prints and writes results/off_policy.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="python of a virtual environment with stable-baselines3")
    parser.add_argument("--sbx", help="python of a virtual environment with sbx-rl")
    parser.add_argument("--only", choices=[*CASES, "threads"])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--core", type=int, default=0, help="the core that all turns run on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    cpu = [x.partition(": ")[2] for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    given = "".join(f" --{name} PYTHON" for name in ("peer", "sbx") if getattr(args, name))
    lines = ["# Off-policy updates beside other libraries", "",
             f"- command: python benchmarks/off_policy.py{given} --turns {args.turns} --steps {args.steps}",
             f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
             f"- machine: {cpu[0]}, {len(cpu)} cores, {os.getloadavg()[0]:.1f} runnable processes at the start",
             f"- penstock {ps.__version__}, torch {torch.__version__}", "",
             "One thread on one core, by turns. One gradient step for each environment step, 256 x 256 networks, batches of 256 (DQN 128).",
             "The bar is for the ratio of CPU time, which is that of wall time where nothing else runs.", "",
             "| algorithm | peer | penstock steps/s | peer steps/s | ratio, by turns | ratio of CPU time | bar | share of GEMM rate |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    print("\n".join(lines))
    os.sched_setaffinity(0, {args.core})
    for name in CASES if args.only is None else [args.only] if args.only in CASES else []:
        for row in measure(name, args):
            lines.append(row)
            print(row, flush=True)
    os.sched_setaffinity(0, cores)
    if args.only in (None, "threads") and len(cores) > 1:
        more = ["", "| penstock alone | steps/s, one thread | two threads | ratio | bar |", "|---|---|---|---|---|"]
        print("\n".join(more))
        lines += more
        for name in ("sac", "td3", "dqn"):
            lines.append(two_threads(name, args))
            print(lines[-1], flush=True)
    if args.only is None:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
