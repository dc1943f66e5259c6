"""Random kill -9 of whole runs that are changed as they go; each must end as the same run that nobody killed.

    python benchmarks/run_kills.py [--kills 20] [--seed 0] [--cases serial,runners] [--out benchmarks/results/run_kills.md]

Between iterations a run changes settings (`run.set`), calls training and evaluation environments (`run.envs`), and has
evaluations played beside training (`run.eval_workers`). It is killed at a random moment, once or twice, with all that it
has started, and resumed. Compared are the rows of metrics without times and places, the evaluations, and all tensors and
counters of the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import penstock as ps
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint

NET = ps.Net(hidden=(16,))
PPO = ps.PPO(epochs=2, minibatch=64, net=NET)
LSTM = ps.PPO(epochs=1, minibatch=64, net=ps.Net(hidden=(16,), recurrent="lstm", recurrent_size=16))
DQN = ps.DQN(learning_starts=200, replay_ratio=8, batch_size=32, net=NET)
SERIAL = ps.SerialSampler(T=16, B=8)
CPU = ps.CpuSampler(T=16, B=8, workers=2)
CASES: dict[str, tuple[Any, Any]] = {
    "serial": (PPO, SERIAL),
    "serial-dqn": (DQN, SERIAL),
    "serial-lstm": (LSTM, SERIAL),
    "cpu": (PPO, CPU),
    "gpu": (PPO, ps.GpuSampler(T=16, B=8, workers=2)),
    "async": (PPO, ps.AsyncSerialSampler(SERIAL, depth=1)),
    "async-dqn": (DQN, ps.AsyncCpuSampler(CPU, depth=1)),
    "runners": (PPO, ps.RunnerSampler(2, ps.SerialSampler(T=16, B=4), backend="processes")),
    "runners-ahead": (PPO, ps.RunnerSampler(2, ps.SerialSampler(T=16, B=4), backend="processes", depth=1)),
}
STEPS, KINDS = 12_800, ("step", "train", "rollout", "replay", "eval", "settings")
RATES = (3e-4, 1e-3, 3e-3)


class Pushed(gym.Wrapper[Any, Any, Any, Any]):
    """A CartPole whose push can be changed."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def set_push(self, force: float) -> None:
        """Newtons from now on."""
        self.env.unwrapped.force_mag = force  # pyright: ignore[reportAttributeAccessIssue]


def bend(it: ps.Iteration) -> None:
    """What changes between iterations."""
    if it.itr % 7 == 0:
        it.run.set({"algo.lr": RATES[it.itr // 7 % 3], "algo.discount": 0.99 if it.itr % 2 else 0.98})
    if it.itr % 5 == 0:
        it.run.envs.call("set_push", 8.0 + it.itr % 4, slots=range(it.itr % 3, 8))
    if it.itr % 16 == 0:
        it.run.envs.call("set_push", 9.0 + it.itr % 3, evaluation=True)


def child(case: str, folder: Path) -> None:
    """Begins the run, or goes on with it."""
    if (folder / "checkpoints").exists():
        ps.resume(folder, trust=True)
        return
    shutil.rmtree(folder, ignore_errors=True)  # killed before its first checkpoint
    algo, sampler = CASES[case]
    run = ps.RunConfig(
        steps=STEPS, seed=5, dir=str(folder), each="run_kills:bend", eval_interval=1_000, eval_episodes=6, eval_workers=1,
        checkpoint_interval=500, log_interval=0, progress="off",
    )  # fmt: skip
    ps.train(ps.Experiment("run_kills:Pushed", algo, sampler, run))


def started(case: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", __file__, "--child", case, str(folder)]
    return subprocess.Popen(command, start_new_session=True)


def numbers(folder: Path) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """All that must be equal."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plain = [{k: v for k, v in row.items() if k.split("/")[0] in KINDS} for row in rows]
    evaluations = [json.loads(line) for line in (folder / "eval/evaluations.jsonl").read_text().splitlines()]
    stored = load_checkpoint(find_checkpoint(folder))
    return plain, evaluations, {**stored.policy, **leaves(stored.state["policy"])}


def leaves(tree: Any, at: str = "") -> dict[str, Any]:
    """Every leaf of a nested state by its path."""
    if isinstance(tree, dict):
        return {k: v for key, x in tree.items() for k, v in leaves(x, f"{at}/{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {k: v for i, x in enumerate(tree) for k, v in leaves(x, f"{at}/{i}").items()}
    return {at: tree}


def differences(one: Path, other: Path) -> list[str]:
    """What is not equal between two runs."""
    (rows, evaluations, state), (rows2, evaluations2, state2) = numbers(one), numbers(other)
    odd = [f"{len(rows)} and {len(rows2)} rows"] * (len(rows) != len(rows2))
    odd += [f"row {i}: {[k for k in a if a[k] != b.get(k)]}" for i, (a, b) in enumerate(zip(rows, rows2)) if a != b][:2]
    odd += ["evaluations"] * (evaluations != evaluations2)
    same = [k for k in state if k in state2 and equal(state[k], state2[k])]
    return odd + [k for k in state.keys() | state2.keys() if k not in same][:3]


def equal(a: Any, b: Any) -> bool:
    """Equal bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def main(argv: list[str]) -> int:
    """Kills and resumes runs, and prints a row for each."""
    if argv[:1] == ["--child"]:
        child(argv[1], Path(argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="runs that are killed (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    draw, cases, folder = random.Random(args.seed), args.cases.split(","), Path(tempfile.mkdtemp())
    took: dict[str, float] = {}
    lines, good = ["| case | killed after s of s | steps of the checkpoints then | same |", "|---|---|---|---|"], 0
    for n in range(args.kills):
        case = cases[n % len(cases)]
        whole, cut = folder / f"{case}-whole", folder / f"{case}-{n}"
        if case not in took:
            begun = time.monotonic()
            assert started(case, whole).wait(timeout=600) == 0
            took[case] = time.monotonic() - begun
        moments, steps = [], []
        for _ in range(draw.choice((1, 1, 2))):
            process, wait_s = started(case, cut), draw.uniform(0.15, 0.95) * took[case]
            time.sleep(wait_s)
            alive = process.poll() is None
            if alive:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            moments.append(f"{wait_s:.1f}{'' if alive else ' (over)'}")
            steps.append(next((str(int(p.name)) for p in sorted(cut.glob("checkpoints/0*"), reverse=True)), "none"))
        done = load_checkpoint(find_checkpoint(cut)).state["trainer"]["finished"] if steps[-1] != "none" else False
        failed = not done and started(case, cut).wait(timeout=600) != 0
        odd = ["it could not go on"] if failed else differences(whole, cut)
        good += not odd
        lines.append(
            f"| {case} | {', '.join(moments)} of {took[case]:.1f} | {', '.join(steps)} | {'; '.join(odd) or 'yes'} |"
        )
        print(lines[-1], flush=True)
        shutil.rmtree(cut, ignore_errors=True)
    shutil.rmtree(folder)
    text = "\n".join(
        ["# Runs killed at random", "", *lines, "", f"{good} of {args.kills} the same; {platform.machine()}"]
    )
    print(text.splitlines()[-1])
    if args.out is not None:
        args.out.write_text(text + "\n")
    return good != args.kills


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
