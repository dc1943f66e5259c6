"""Returns of BC, MARWIL, CQL, IQL, TD3+BC and ReBRAC on recorded data, and of SAC and TD3 that keep the data online.

A SAC run on Pendulum-v1 plays the datasets: `medium`, one checkpoint that is half trained, and `mixed`, all ten, the first
hardly trained. Scores are means of 20 deterministic episodes at the end. Each row is written as it is measured, and those
that are there are not measured again.

    python benchmarks/offline.py [--only PART] [--seeds 1,2,3] [--work DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.datasets.reader import open_dataset
from penstock.run.recording import record

RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "offline.json"
ENV, EPISODES = "Pendulum-v1", 20
QUIET: dict[str, Any] = {"progress": "off", "learner_threads": 1, "eval_interval": 0, "eval_episodes": EPISODES}
DATA: dict[str, tuple[tuple[int, int], ...]] = {
    "mixed": tuple((1_000 * k, 20) for k in range(1, 11)),
    "medium": ((3_000, 100),),
}
"""Checkpoints of the teacher, the first at or after these steps, and episodes of each."""
DECAY = "linear(1e-3, 0)"
SCALED = ps.Net(hidden=(64, 64), activation="relu", normalize_obs=True, normalize_reward=True)
NORMED = replace(SCALED, norm="critic")
SAMPLES: dict[str, Any] = {"lr": DECAY, "batch_size": 64, "replay_ratio": 64}
STUDENTS: dict[str, tuple[Any, int]] = {
    "bc": (ps.BC(lr=DECAY, net=replace(SCALED, activation="tanh")), 400_000),
    "marwil": (ps.MARWIL(lr=DECAY, net=replace(SCALED, activation="tanh")), 400_000),
    "cql": (ps.CQL(**SAMPLES, actor_lr=1e-3, cql_alpha=0.02, alpha=0.005, sampled_actions=4, net=SCALED), 40_000),
    "iql": (ps.IQL(**SAMPLES, net=SCALED), 40_000),
    "td3-bc": (ps.TD3BC(**SAMPLES, net=SCALED), 40_000),
    "rebrac": (ps.ReBRAC(**SAMPLES, actor_bc=0.01, critic_bc=0.01, net=NORMED), 40_000),
}
"""By algorithm: settings, and steps played back, with a gradient step for each where there is a replay. Rewards are scaled,
since `cql_alpha` and `critic_bc` are in units of Q."""
STEPS = 2_000
ONLINE: dict[str, Any] = {
    "lr": 1e-3,
    "batch_size": 64,
    "replay_ratio": 64,
    "net": replace(NORMED, normalize_reward=False),
}


def taught(work: Path) -> Path:
    """The run of the teacher, trained if it is not there."""
    folder = work / "teachers" / "sac-pendulum"
    if not (folder / "done").exists():
        kept: dict[str, Any] = {
            **QUIET,
            "seed": 1,
            "dir": str(folder),
            "keep": 100,
            "keep_replays": 1,
            "eval_episodes": 5,
        }
        run = ps.RunConfig(steps=10_000, checkpoint_interval=1_000, **kept)
        algo = ps.SAC(lr=1e-3, net=ps.Net(hidden=(64, 64), activation="relu"))
        ps.train(ps.Experiment(ENV, algo, ps.SerialSampler(T=8, B=1), run))
        (folder / "done").touch()
    return folder


def recorded(name: str, work: Path) -> Path:
    """A dataset, recorded if it is not there."""
    folder = work / "data" / name
    if not (folder / "done").exists():
        run = taught(work)
        steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
        for i, (at, episodes) in enumerate(DATA[name]):
            which = str(next((step for step in steps if step >= at), steps[-1]))
            record(run, folder, episodes, which=which, deterministic=False, append=i > 0)
        (folder / "done").touch()
    return folder


def returns(folder: Path) -> list[float]:
    """Returns of a dataset's episodes."""
    source = open_dataset(folder)
    return [float(source.episode(i).reward.sum()) for i in range(len(source.lengths))]


def trained(algo: Any, sampler: Any, steps: int, seed: int, folder: Path, init: Path | None = None) -> dict[str, Any]:
    """The score of a run, and its processor seconds."""
    torch.set_num_threads(1)
    run = ps.RunConfig(steps=steps, seed=seed, dir=str(folder), **QUIET)
    started = time.process_time()
    result = ps.train(ps.Experiment(ENV, algo, sampler, run), init=None if init is None else str(init))
    seconds = time.process_time() - started
    return {"score": round(result.metrics["eval/mean_reward"], 1), "cpu_s": round(seconds, 1), "run": folder.name}


def student(name: str, algo: str, seed: int, work: Path) -> dict[str, Any]:
    """A run of `algo` on the dataset alone."""
    settings, steps = STUDENTS[algo]
    folder = recorded(name, work)
    # Several episodes in each slot: all of Pendulum's are of one length, so slots are at the same step of theirs.
    T = 512 if algo in ("bc", "marwil") else 8
    sampler = ps.OfflineSampler(str(folder), T=T, B=16, verify=False)
    return trained(settings, sampler, steps, seed, work / "runs" / f"{name}-{algo}-{seed}-{time.time_ns()}")


def learner(name: str, kind: str, seed: int, work: Path, rows: dict[str, Any]) -> dict[str, Any]:
    """A run with an environment: of SAC alone, with the dataset in replay, and of TD3 that goes on with ReBRAC so."""
    kept = ps.ReplaySettings(dataset=str(recorded(name, work)))
    init = None
    if kind == "sac":
        algo: Any = ps.SAC(**ONLINE)
    elif kind == "sac+data":
        algo = ps.SAC(**ONLINE, replay=kept)
    else:
        if (before := f"{name}/rebrac/{seed}") not in rows:
            raise SystemExit(f"{name}/{kind}/{seed} goes on from {before}, which is not measured yet: --only {before}")
        init = work / "runs" / rows[before]["run"]
        algo = replace(ps.TD3(**ONLINE), net=NORMED, learning_starts=0, replay=kept)
    folder = work / "runs" / f"{name}-{kind}-{seed}-{time.time_ns()}"
    return trained(algo, ps.SerialSampler(T=8, B=1), STEPS, seed, folder, init)


def written(rows: dict[str, Any], data: dict[str, list[float]]) -> str:
    """The tables of the results."""
    algos = [*STUDENTS, "sac", "sac+data", "rebrac, then td3+data"]
    lines = ["| dataset | return of the data | " + " | ".join(algos) + " |", "|---" * (len(algos) + 2) + "|"]
    for name, found in data.items():
        cells = [f"{statistics.mean(found):.1f} ± {statistics.pstdev(found):.1f}"]
        for algo in algos:
            scores = [row["score"] for key, row in rows.items() if key.rpartition("/")[0] == f"{name}/{algo}"]
            cells.append(f"{statistics.mean(scores):.1f} ± {statistics.pstdev(scores):.1f}" if scores else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures what is not there yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of DATASET/ALGORITHM/SEED, by comma")
    parser.add_argument("--seeds", default="1,2,3", help="by comma")
    parser.add_argument("--work", type=Path, help="keeps teacher, data and runs there, and goes on from them")
    args = parser.parse_args()
    rows: dict[str, Any] = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        work: Path = args.work or Path(temporary)
        for name in DATA:
            for seed in args.seeds.split(","):
                for algo in (*STUDENTS, "sac", "sac+data", "rebrac, then td3+data"):
                    key = f"{name}/{algo}/{seed}"
                    if key in rows or not any(part in key for part in args.only.split(",")):
                        continue
                    measure = student if algo in STUDENTS else learner
                    more = () if algo in STUDENTS else (rows,)
                    rows[key] = measure(name, algo, int(seed), work, *more)  # pyright: ignore[reportCallIssue]
                    print(key, rows[key], flush=True)
                    ROWS.write_text(json.dumps(rows, indent=1) + "\n")
        print(written(rows, {name: returns(recorded(name, work)) for name in DATA}))


if __name__ == "__main__":
    main()
