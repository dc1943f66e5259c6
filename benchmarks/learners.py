"""Two learners against one: PPO on 84 x 84 frames, by turns (turns.py), and what the all-reduce of a gradient step takes.

    taskset -c 0,1 python benchmarks/learners.py [--only nature] [--rounds 5] [--write]
    python benchmarks/learners.py --kills 10

Environments draw frames at next to no cost, so that the networks are what is timed. One learner with one thread, one with two,
and two with one thread each: env steps a second of wall time. The all-reduce is timed in rank 0 of the third: all of it, with the
wait for the slower rank, and the exchange alone, right after a barrier, as shares of the seconds that training took. `--kills N`
instead kills a rank of a small run at N random moments, and compares the policy and the log with those of a run that
nobody disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch
import turns
from turns import Bar, Case, Who

import penstock as ps
from penstock.core import VERSION
from penstock.run.trainer import Trainer

T, B, EPOCHS, MINIBATCH = 64, 16, 2, 256


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
    algo: Any = ps.PPO(epochs=EPOCHS, minibatch=MINIBATCH, net=ps.Net(hidden=(512,), activation="relu", cnn=net))  # pyright: ignore
    run = ps.RunConfig(steps=10**9, learners=learners, learner_threads=threads, progress="off")
    return ps.Experiment(Frames, algo, ps.SerialSampler(T=T, B=B), run)


@contextmanager
def training(net: str, learners: int, threads: int, seed: int) -> Iterator[turns.Unit]:
    """Iterations, and with several learners the seconds of training and of each of its all-reduces."""
    with Trainer(experiment(net, learners, threads)) as trainer:
        trainer.train()
        comm: Any = trainer.policy.comm
        spent = timed_all_reduce(comm) if learners > 1 else [0.0]

        def unit() -> turns.Look:
            started, steps, spent[0] = time.perf_counter(), trainer.env_steps, 0.0
            result = trainer.train()
            learning = (1.0 - result["time/sample_frac"]) * (time.perf_counter() - started)
            more = {"s of training": learning, "s of all-reduces": spent[0]} if learners > 1 else {}
            return {"work": trainer.env_steps - steps, **more}

        yield unit


def timed_all_reduce(comm: Any) -> list[float]:
    """Seconds that all-reduces take from now on, with the wait for the slower rank."""
    plain, spent = comm.all_reduce, [0.0]

    def timed(x: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        try:
            return plain(x)
        finally:
            spent[0] += time.perf_counter() - started

    comm.all_reduce = timed
    return spent


@contextmanager
def exchange(net: str, seed: int) -> Iterator[turns.Unit]:
    """All-reduces of so many numbers as the net has parameters, between two ranks that come to each at once."""
    from penstock.learn.comm import GroupComm, meet

    torch.set_num_threads(1)
    with Trainer(experiment(net, 1, 1)) as trainer:
        numbers = sum(p.numel() for p in trainer.policy.agent.parameters())
    with tempfile.TemporaryDirectory() as folder:
        rank = 0 if (other := os.fork()) else 1
        comm, x = GroupComm(meet(f"{folder}/meeting", rank, 2)), torch.ones(numbers)

        def unit() -> turns.Look:
            comm.barrier()
            started = time.perf_counter()
            comm.all_reduce(x)
            return {"work": 1.0, "wall": time.perf_counter() - started}

        if rank:
            while True:
                unit()
        yield unit
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def small(folder: str, learners: int) -> ps.Experiment:
    algo: Any = ps.PPO(epochs=2, minibatch=64, net=ps.Net(hidden=(32,), normalize_obs=True))
    run = ps.RunConfig(
        steps=20_000, seed=1, dir=folder, learners=learners, progress="off", eval_episodes=4, checkpoint_interval=2_000,
        log_interval=0,
    )  # fmt: skip
    return ps.Experiment("CartPole-v1", algo, ps.SerialSampler(T=32, B=8), run)


def trained(folder: str, kills: int, seed: int) -> tuple[list[Any], list[bytes], int]:
    """The log without times, the bits of the policy, and how many ranks were killed on the way."""
    killed, over = [0], threading.Event()

    def strike() -> None:
        rng, known = random.Random(seed), set[int]()
        while killed[0] < kills and not over.wait(rng.uniform(0.0, 4.0)):
            ranks = [p for p in psutil.Process().children() if p.cmdline()[-1:] == ["rank 1"]]
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


def case(net: str) -> Case:
    """The three ways of a net, and the exchange alone."""
    who = {
        name: Who("training", {"net": net, "learners": learners, "threads": threads})
        for name, learners, threads in (("two learners", 2, 1), ("one thread", 1, 1), ("two threads", 1, 2))
    }

    def share(found: turns.Found) -> list[str]:
        one = statistics.median(x["wall"] for x in found["exchange"])
        updates = EPOCHS * T * B // MINIBATCH
        training = statistics.median(x["s of training"] for x in found["two learners"])
        with_wait = statistics.median(x["s of all-reduces"] / x["s of training"] for x in found["two learners"])
        kept = "" if one * updates <= 0.05 * training else ", **missed**"
        return [
            f"all-reduce: {one * 1e3:.1f} ms, {one * updates / training:.1%} of training (bar 5%{kept}); with the wait for "
            f"the other rank {with_wait:.1%}"
        ]

    bars = Bar("two learners", 1.7, ("one thread",)), Bar("two learners", 1.1, ("two threads",))
    return Case(f"{net} CNN", "steps/s", {**who, "exchange": Who("exchange", {"net": net})}, bars, "wall", 0.0, 15,
                one_core=False, notes=share)  # fmt: skip


def main() -> None:
    """Kills ranks, or measures."""
    if "--kills" not in sys.argv:
        turns.main(
            __doc__, {net: case(net) for net in ("nature", "impala")}, {"training": training, "exchange": exchange}, {}
        )
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, required=True)
    lines, good = kills(parser.parse_args().kills)
    head = f"# Many learners\n\npenstock {VERSION}, torch {torch.__version__}, {os.cpu_count()} CPUs; `{Path(__file__).name}`"
    (Path(__file__).parent / "results" / "learners-kills.md").write_text("\n".join([head, *lines]) + "\n")
    print("\n".join(lines))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
