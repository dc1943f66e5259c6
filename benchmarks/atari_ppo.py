"""PPO on Pong: penstock's arrangements beside SB3, CleanRL's recipe over EnvPool, and the limit that products set.

Each contender is a process with its own children. They take turns of a batch each, A B C A B C, and those whose turn it is
not are stopped, so that nothing is collected ahead for free. A turn is timed by the clock and by the processor time of the
process and its children. `limit` does the work that no arrangement can spare, one after the other: the environments'
steps, the forward that acts, and forward and backward of every minibatch, channels last, of floats that lie ready.

    python benchmarks/atari_ppo.py --peer .venv-peer/bin/python
    python benchmarks/atari_ppo.py --peer .venv-peer/bin/python --rounds 4        # under 4 minutes on two quiet cores
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "atari.md"
SECTION = "## PPO"
B, T, MINIBATCH, EPOCHS = 16, 128, 256, 4
OURS = ("lockstep", "two groups", "ahead", "ahead, two groups")
PEERS = {"SB3": "sb3", "CleanRL's recipe, EnvPool": "envpool"}
BAR, OF_LIMIT = 1.3, 0.9


# ---- the contenders: each is a function that collects batches and trains on them ----


def penstock(name: str, threads: int, folder: str, bf16: bool = False) -> Callable[[int], None]:
    """Iterations of a Trainer; `ahead`: a process collects the next batch meanwhile."""
    import penstock as ps

    preset = ps.preset("ppo", "penstock.envs.atari:atari").algo
    algo = ps.override(preset, {"lr": 2.5e-4, "clip": 0.1, "minibatch": MINIBATCH, "epochs": EPOCHS})
    kind: Any = ps.AlternatingSampler if "two groups" in name else ps.SerialSampler
    sampler = kind(T=T, B=B)
    if name.startswith("ahead"):
        sampler = ps.AsyncSampler(inner=sampler, depth=1, step_timeout_s=1e6)
    settings = {"game": "pong", "num_envs": B, "threads": 1 if "two groups" in name else threads}
    env = ps.EnvConfig("penstock.envs.atari:atari_vector", settings)
    run = ps.RunConfig(steps=1 << 40, dir=f"{folder}/run", checkpoint_interval=0, eval_episodes=0, progress="off",
                       learner_threads=threads, precision="bf16" if bf16 else "float32")  # fmt: skip
    trainer = ps.Trainer(ps.Experiment(env, algo, sampler, run=run))

    def learn(batches: int) -> None:
        for _ in range(batches):
            trainer.train()

    return learn


def limit(threads: int) -> Callable[[int], None]:
    """The parts of an iteration that no arrangement can spare."""
    import numpy as np
    import torch
    from torch import nn

    from penstock.core.machine import keep_freed_memory
    from penstock.envs.atari import atari_vector

    torch.set_num_threads(threads)
    keep_freed_memory()
    env: Any = atari_vector("pong", B, threads=threads)
    env.reset(seed=0)
    net = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(True), nn.Conv2d(32, 64, 4, 2), nn.ReLU(True), nn.Conv2d(64, 64, 3, 1), nn.ReLU(True),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(True), nn.Linear(512, 7),
    )  # fmt: skip
    rows, parameters = (
        torch.rand(MINIBATCH, 4, 84, 84).contiguous(memory_format=torch.channels_last),
        list(net.parameters()),
    )
    acted, gradient, still = torch.rand(B, 4, 84, 84), torch.rand(MINIBATCH, 7), np.zeros(B, np.int64)

    def learn(batches: int) -> None:
        for _ in range(batches):
            for _ in range(T):
                with torch.inference_mode():
                    net(acted)
                env.step(still)
            for _ in range(EPOCHS * T * B // MINIBATCH):
                torch.autograd.grad(net(rows), parameters, gradient)

    return learn


def serve(name: str, threads: int) -> None:
    """Answers each line of standard input, a number of batches, once they are done."""
    with tempfile.TemporaryDirectory() as folder:
        bf16 = name.endswith("bf16")
        learn = limit(threads) if name == "limit" else penstock(name.removesuffix(", bf16"), threads, folder, bf16)
        learn(1)
        import torch

        print(f"torch {torch.__version__}", flush=True)
        for line in sys.stdin:
            learn(int(line))
            print("done", flush=True)


# ---- turns ----


class Contender:
    """A process that answers each number of batches, stopped between its turns."""

    def __init__(self, name: str, peer: str | None, threads: int) -> None:
        script = (
            [str(HERE / "peers" / "ppo_pong.py"), "--peer", PEERS[name]]
            if name in PEERS
            else [__file__, "--serve", name]
        )
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        python = peer if peer and name in PEERS else sys.executable
        self.name, self.wall, self.cpu = name, list[float](), list[float]()
        self._live = subprocess.Popen([python, *script, "--threads", str(threads)], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True, env=env)  # fmt: skip
        self.version = self._answer()
        self._tell(signal.SIGSTOP)

    def turn(self, batches: int) -> None:
        """Batches, timed."""
        assert self._live.stdin
        before = self._processor_s()
        self._tell(signal.SIGCONT)
        started = time.perf_counter()
        self._live.stdin.write(f"{batches}\n")
        self._live.stdin.flush()
        self._answer()
        self.wall.append((time.perf_counter() - started) / batches)
        self._tell(signal.SIGSTOP)
        self.cpu.append((self._processor_s() - before) / batches)

    def close(self) -> None:
        """Ends the process and its children."""
        tree = self._tree()
        for process in tree:
            process.kill()
        self._live.wait()

    def _answer(self) -> str:
        assert self._live.stdout
        line = self._live.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._live.wait()}")
        return line

    def _tree(self) -> list[psutil.Process]:
        own = psutil.Process(self._live.pid)
        return [own, *own.children(recursive=True)]

    def _tell(self, what: signal.Signals) -> None:
        for process in self._tree():
            process.send_signal(what)

    def _processor_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._tree())


def measured(names: list[str], peer: str | None, threads: int, rounds: int, batches: int) -> list[Contender]:
    """The contenders after their turns, the first of which only warms up."""
    contenders: list[Contender] = []
    try:
        for name in names:
            contenders.append(Contender(name, peer, threads))
        for k in range(rounds + 1):
            for contender in contenders:
                contender.turn(batches)
                print(
                    f"round {k}: {contender.name} {contender.wall[-1]:.2f} s, processor {contender.cpu[-1]:.2f} s",
                    flush=True,
                )
                if k == 0:
                    contender.wall, contender.cpu = [], []
    finally:
        for contender in contenders:
            contender.close()
    return contenders


# ---- the report ----


def report(found: list[Contender]) -> list[str]:
    """Medians, and medians of each round's ratios to the better peer and to the limit."""
    by_name = {x.name: x for x in found}
    peers = [by_name[name] for name in PEERS if name in by_name]
    best = min(peers, key=lambda x: statistics.median(x.wall)) if peers else None
    floor = by_name.get("limit")

    def ratio(of: Contender | None, x: Contender, what: str) -> float | None:
        return None if of is None else statistics.median(a / b for a, b in zip(getattr(of, what), getattr(x, what)))

    of = f"of {best.name}" if best else "of a peer"
    lines = [
        f"| | steps/s | {of} | of the limit | processor s a batch | {of} | of the limit |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for x in found:
        cells = [ratio(best, x, "wall"), ratio(floor, x, "wall"), ratio(best, x, "cpu"), ratio(floor, x, "cpu")]
        text = ["" if cell is None else f"{cell:.2f}" for cell in cells]
        wall, cpu = statistics.median(x.wall), statistics.median(x.cpu)
        lines.append(f"| {x.name} | {T * B / wall:,.0f} | {text[0]} | {text[1]} | {cpu:.2f} | {text[2]} | {text[3]} |")
    lines.append("")
    for x in found:
        if x.name in OURS and best and floor:
            over, near = ratio(best, x, "wall"), ratio(floor, x, "wall")
            assert over and near
            met = over >= BAR or near >= OF_LIMIT
            lines.append(f"- {x.name}: {over:.2f} of the better peer (bar {BAR}), {near:.2f} of the limit (bar {OF_LIMIT}): "
                         f"{'met' if met else 'missed'}.")  # fmt: skip
    return lines


def main() -> None:
    """Measures, prints the table and writes it in place of the results' section on PPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has Stable-Baselines3, EnvPool, ale-py and OpenCV")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=1, help="of a turn")
    parser.add_argument(
        "--threads", type=int, default=2, help="of torch, and of the environments where they step at once"
    )
    parser.add_argument("--only", nargs="+", help="names of contenders")
    parser.add_argument("--keep", action="store_true", help="leave the results as they are")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.threads)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that no stopped process stays behind
    names = args.only or [*OURS, *(PEERS if args.peer else ()), "limit"]
    load = os.getloadavg()[0]
    found = measured(names, args.peer, args.threads, args.rounds, args.batches)
    versions = ", ".join(dict.fromkeys(part for x in found for part in x.version.split(", ")))
    waits = os.environ.get("OMP_WAIT_POLICY", "as torch comes")
    lines = [SECTION, "", f"{args.rounds} rounds by turns, {args.threads} torch threads each (waiting: {waits.lower()}); {versions}; "
             f"{platform.machine()} with {os.cpu_count()} cores, load {load:.1f} before the start.", "", *report(found)]  # fmt: skip
    print("\n".join(lines))
    if not args.keep:
        before, _, after = RESULTS.read_text().partition(SECTION)
        notes = after.partition("\n### ")
        RESULTS.write_text(before + "\n".join(lines) + "\n" + (f"\n### {notes[2]}" if notes[1] else ""))


if __name__ == "__main__":
    main()
