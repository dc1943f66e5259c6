"""Returns of BC, MARWIL and CQL that learned from data of experts, and from data of mixed quality.

Teachers are trained once, and play their datasets: PPO with its preset on CartPole, SAC on Pendulum, whose mixed data come
from ten of its checkpoints, the first hardly trained. Every student sees only its dataset; its score is the mean of 20
deterministic episodes at the end.

    python benchmarks/offline.py [--only PART] [--seeds 1,2,3] [--jobs 1] [--work DIR]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import penstock as ps
from penstock.datasets.reader import open_dataset
from penstock.run.recording import record

RESULTS = Path(__file__).parent / "results"
EPISODES = 20
QUIET: dict[str, Any] = {"progress": "off", "tensorboard": False, "learner_threads": 1}


class Data(NamedTuple):
    """Episodes of a teacher's checkpoints, the first ones at or after these steps; None: the last."""

    teacher: str
    env: str
    parts: tuple[tuple[int | None, int], ...]


DATA = {
    "cartpole-expert": Data("ppo", "CartPole-v1", ((None, 50),)),
    "cartpole-early": Data("ppo-early", "CartPole-v1", ((None, 300),)),
    "pendulum-expert": Data("sac", "Pendulum-v1", ((None, 50),)),
    "pendulum-mixed": Data("sac", "Pendulum-v1", tuple((1_000 * k, 20) for k in range(1, 11))),
}
DECAY = "linear(1e-3, 0)"
SCALED = ps.Net(normalize_obs=True)
SMALL = ps.Net(hidden=(64, 64), activation="relu")
CQL = ps.CQL(
    lr=DECAY, actor_lr=1e-3, batch_size=64, replay_ratio=16, learning_starts=8_000, sampled_actions=4, net=SMALL
)
ALGOS = ("bc", "marwil", "cql")
STUDENTS: dict[tuple[str, str], tuple[Any, int]] = {
    ("bc", "cartpole"): (ps.BC(), 300_000),
    ("marwil", "cartpole"): (ps.MARWIL(), 600_000),
    ("cql", "cartpole"): (CQL, 40_000),
    # Observations are scaled, since velocities go up to 8.
    ("bc", "pendulum"): (ps.BC(lr=DECAY, net=SCALED), 1_000_000),
    ("marwil", "pendulum"): (ps.MARWIL(lr=DECAY, net=SCALED), 1_000_000),
    # Rewards are scaled, since cql_alpha and the temperature are in units of Q.
    ("cql", "pendulum"): (
        replace(CQL, cql_alpha=0.02, alpha=0.005, net=replace(SMALL, normalize_obs=True, normalize_reward=True)),
        40_000,
    ),
}
"""By algorithm and the beginning of a dataset's name: settings, and steps played back. CQL takes a gradient step every
fourth of them, once it has seen 8,000."""


def taught(teacher: str, work: Path) -> Path:
    """The run of a teacher, trained if it is not there."""
    folder = work / "teachers" / teacher
    if not (folder / "done").exists():
        kept = {**QUIET, "seed": 1, "dir": str(folder), "keep": 100, "keep_replays": 1}
        if teacher == "sac":
            run = ps.RunConfig(steps=10_000, checkpoint_interval=1_000, **kept)
            ps.train(ps.Experiment("Pendulum-v1", ps.SAC(lr=1e-3), ps.SerialSampler(T=8, B=1), run))
        elif teacher == "ppo":
            exp = ps.preset("ppo", "CartPole-v1")
            ps.train(ps.override(exp, {f"run.{key}": value for key, value in kept.items()}))
        else:
            ps.train(
                ps.Experiment("CartPole-v1", ps.PPO(epochs=4, minibatch=512), run=ps.RunConfig(steps=12_000, **kept))
            )
        (folder / "done").touch()
    return folder


def recorded(name: str, work: Path) -> tuple[Path, float, float]:
    """A dataset, recorded if it is not there, with the mean return of its episodes and their deviation."""
    data, folder = DATA[name], work / "data" / name
    if not (folder / "dataset.json").exists():
        run = taught(data.teacher, work)
        steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
        for i, (at, episodes) in enumerate(data.parts):
            which = "last" if at is None else str(next(step for step in steps if step >= at))
            record(run, folder, episodes, which=which, deterministic=False, append=i > 0)
    source = open_dataset(folder)
    returns = [float(source.episode(i).reward.sum()) for i in range(len(source.lengths))]
    return folder, statistics.mean(returns), statistics.pstdev(returns)


def student(name: str, algo: str, seed: int, folder: Path, run_dir: Path) -> tuple[float, float]:
    """Score and processor seconds."""
    torch.set_num_threads(1)
    settings, steps = next(found for (of, data), found in STUDENTS.items() if of == algo and name.startswith(data))
    run = ps.RunConfig(steps=steps, seed=seed, dir=str(run_dir), eval_interval=0, eval_episodes=EPISODES, **QUIET)
    # Several episodes in each slot: all of Pendulum's are of one length, so slots are at the same step of theirs.
    sampler = ps.OfflineSampler(str(folder), T=128 if algo == "cql" else 512, B=16)
    started = time.process_time()
    result = ps.train(ps.Experiment(DATA[name].env, settings, sampler, run))
    return result.metrics["eval/mean_reward"], time.process_time() - started


def main(argv: list[str]) -> int:
    """Trains and evaluates; writes results/offline.md if nothing is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of DATA/STUDENT, by comma")
    parser.add_argument("--seeds", default="1,2,3", help="by comma")
    parser.add_argument("--jobs", type=int, default=1, help="students at a time")
    parser.add_argument("--work", type=Path, help="keeps teachers, data and scores there, and goes on from them")
    args = parser.parse_args(argv)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        work: Path = args.work or Path(temporary)
        scores = work / "scores.json"
        kept: dict[str, Any] = json.loads(scores.read_text()) if scores.exists() else {}
        wanted = [f"{name}/{algo}" for name in DATA for algo in ALGOS]
        chosen = [x for x in wanted if any(part in x for part in args.only.split(","))]
        data = {name: recorded(name, work) for name in dict.fromkeys(x.partition("/")[0] for x in chosen)}
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            futures: dict[str, Any] = {}
            for key in chosen:
                name, _, algo = key.partition("/")
                for seed in seeds:
                    if f"{key}/{seed}" not in kept:
                        to = work / "runs" / f"{name}-{algo}-{seed}-{time.time_ns()}"
                        futures[f"{key}/{seed}"] = pool.submit(student, name, algo, seed, data[name][0], to)
            for key, future in futures.items():
                kept[key] = future.result()
                print(f"{key}: {kept[key][0]:.1f}, {kept[key][1]:.0f} s of processor", flush=True)
                scores.parent.mkdir(parents=True, exist_ok=True)
                scores.write_text(json.dumps(kept, indent=1))
        text = table(data, kept, seeds)
        print(text)
        if chosen == wanted:
            (RESULTS / "offline.md").write_text("\n".join(["# Learning from a dataset", "", *about(seeds), text]))
    return 0


def table(data: dict[str, tuple[Path, float, float]], scores: dict[str, Any], seeds: list[int]) -> str:
    """A row for each dataset, a column for each student."""
    lines = [f"| dataset | return of the data | {' | '.join(ALGOS)} |", "|---" * (2 + len(ALGOS)) + "|"]
    for name, (_, mean, deviation) in data.items():
        cells = [name, f"{mean:.1f} ± {deviation:.1f}"]
        for algo in ALGOS:
            found = [scores[key][0] for seed in seeds if (key := f"{name}/{algo}/{seed}") in scores]
            cells.append(f"{statistics.mean(found):.1f} ± {statistics.pstdev(found):.1f}" if found else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def changed(settings: Any, plain: Any) -> str:
    """The settings that are not the defaults."""
    out: list[str] = []
    for f in fields(settings):
        value, default = getattr(settings, f.name), getattr(plain, f.name)
        if value != default:
            out.append(f"{f.name}={f'({changed(value, default)})' if is_dataclass(value) else value}")
    return ", ".join(out) or "default settings"


def about(seeds: list[int]) -> list[str]:
    """What was measured, where and with what."""
    versions = {name: importlib.metadata.version(name) for name in ("penstock", "torch", "numpy", "gymnasium")}
    return [
        f"Mean of {EPISODES} deterministic episodes after training, mean ± deviation over seeds {', '.join(map(str, seeds))}; the "
        "data's deviation is over episodes. Datasets are described in `benchmarks/offline.py`.", "",
        "- command: python benchmarks/offline.py; batches of 512 x 16 rows, CQL's of 128 x 16",
        f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        f"- machine: {platform.machine()}, {os.cpu_count()} cores, one torch thread a run; python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        *(f"- {algo} on {name}: {steps:,} steps played back, {changed(settings, type(settings)())}"
          for (algo, name), (settings, steps) in STUDENTS.items()), "",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
