"""Learning curves of penstock beside Stable-Baselines3, over 100,000 steps and three seeds.

Both get the same steps, seeds, networks and settings. Each run is added to results/curves.json as it ends (an earlier
one of the same case, library and seed is replaced); `--plot` draws results/curves-CASE.png and writes results/curves.md
from what is there.

    python benchmarks/curves.py CASE [--who penstock|sb3] [--peer PYTHON] [--seeds 1,2,3] [--only NAME] [--steps 100000]
    python benchmarks/curves.py --plot
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from penstock.run.presets import find_preset, named_preset, with_preset

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "curves.json"
PEER_SCRIPT = Path(__file__).parent / "peers" / "sb3_curves.py"
STEPS, INTERVAL = 100_000, 10_000
PLACES = STEPS // INTERVAL
Run = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One environment and what is compared on it."""

    env: str
    episodes: int
    ours: Mapping[str, tuple[str, Mapping[str, Any]]]
    """By name: algorithm, whose preset for the environment is taken, and changes to it, or `preset`, another table."""
    peer: tuple[str, Mapping[str, Any]]
    """Algorithm of Stable-Baselines3 and its settings."""
    peer_env: str = ""
    """What the peer calls the environment, if not the same."""
    note: str = ""
    """What the table says, for people."""


CASES = {
    "halfcheetah": Case(
        "HalfCheetah-v5", 10, {"penstock SAC": ("sac", {})},
        ("sac", {"learning_rate": 3e-4, "batch_size": 256, "learning_starts": 10_000, "tau": 0.005, "gamma": 0.99,
                 "train_freq": 1, "gradient_steps": 1, "policy_kwargs": {"net_arch": [256, 256]}}),
        note="The medians of the seeds' last three evaluations are equal, the mean is 6% below the peer's, which has the best of the "
             "six seeds; a run takes two thirds of the peer's processor time. With actors that start orthogonal and 8 steps between "
             "updates in the place of 1 the three seeds ended at 4,188, 4,600 and 4,239.",
    ),
    "breakout": Case(
        "penstock.envs.minatar:breakout", 20, {"penstock DQN": ("dqn", {}), "penstock Rainbow": ("dqn", {"preset": "rainbow/MinAtar"})},
        ("dqn", {"learning_rate": 2.5e-4, "batch_size": 32, "buffer_size": 100_000, "learning_starts": 1_000, "train_freq": 4,
                 "gradient_steps": 1, "gamma": 0.99, "target_update_interval": 1_000, "exploration_fraction": 0.1,
                 "exploration_final_eps": 0.01, "policy_kwargs": {"net_arch": [128], "optimizer_kwargs": {"eps": 3.125e-4}}}),
        peer_env="MinAtar/Breakout-v1",
        note="DQN, at equal settings, is below the peer, and why is not known: its updates are those of plain torch (60 in a row in "
             "tests/algos/test_dqn_plain.py; 1,500 by hand within 4e-7), what is drawn from the replay is what the game did, and 400 "
             "episodes in the peer's environment give the same mean. A DQN of 40 lines of torch ended at 5.1 over five seeds, three "
             "more seeds of the peer at 5.0, 5.2 and 5.7. Rainbow, which has settings of its own, is above the peer over most of "
             "the curve and below it at its end.",
    ),
}  # fmt: skip


def ours(case: Case, algo: str, changes: Mapping[str, Any], seed: int, steps: int) -> Run:
    """Evaluations and wall time of one run of penstock, through its preset."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = {"run.seed": seed, "run.steps": steps, "run.dir": f"{folder}/run", "run.progress": "off", "run.checkpoint_interval": 0,
               "run.eval_interval": INTERVAL, "run.eval_episodes": case.episodes}  # fmt: skip
        started, cpu = time.perf_counter(), time.process_time()
        rest = {key: value for key, value in changes.items() if key != "preset"}
        found = named_preset(f"{algo}/{changes['preset']}") if "preset" in changes else find_preset(algo, case.env)
        ps.train(ps.override(with_preset(algo, case.env, found), {**rest, **run}))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        rows = [json.loads(row) for row in Path(folder, "run", "eval", "evaluations.jsonl").read_text().splitlines()]
    return {"steps": [row["step"] for row in rows], "scores": [row["eval/mean_reward"] for row in rows],
            "wall_s": seconds, "cpu_s": cpu, "version": importlib.metadata.version("penstock")}  # fmt: skip


def peers(case: Case, python: str, seed: int, steps: int) -> Run:
    """The same of Stable-Baselines3, in its own environment."""
    algo, settings = case.peer
    words = [python, str(PEER_SCRIPT), "--algo", algo, "--env", case.peer_env or case.env, "--settings", json.dumps(settings),
             "--seed", str(seed), "--steps", str(steps), "--interval", str(INTERVAL), "--episodes", str(case.episodes)]  # fmt: skip
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=6 * 3600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    rows = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
    version = subprocess.run(
        [python, "-c", "import stable_baselines3 as s; print(s.__version__)"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return {"steps": [row["step"] for row in rows[:-1]], "scores": [row["score"] for row in rows[:-1]], **rows[-1],
            "version": version.stdout.strip()}  # fmt: skip


def keep(row: Run) -> None:
    """Adds a run to the file, which several of these scripts may write to."""
    RESULTS.mkdir(exist_ok=True)
    with FILE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        runs = json.loads(file.read() or "[]")
        same = ("case", "who", "seed")
        runs = [old for old in runs if any(old[key] != row[key] for key in same)] + [row]
        file.seek(0)
        file.truncate()
        file.write(
            "[\n"
            + ",\n".join(json.dumps(run) for run in sorted(runs, key=lambda r: [r[key] for key in same]))
            + "\n]\n"
        )


def draw(name: str, runs: list[Run]) -> Path:
    """A line for each seed, thin, and the mean of the seeds, thick."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    for colour, who in zip(("#0072B2", "#009E73", "#D55E00", "#CC79A7"), sorted({run["who"] for run in runs})):
        own = [run for run in runs if run["who"] == who]
        for run in own:
            axes.plot(run["steps"], run["scores"], color=colour, alpha=0.35, linewidth=0.9)
        # Penstock evaluates with the batch that passes an interval: within a batch of the peer's step.
        shortest = min(len(run["scores"]) for run in own)
        steps, scores = (np.mean([run[key][:shortest] for run in own], 0) for key in ("steps", "scores"))
        seeds = f"{len(own)} seed{'s' if len(own) > 1 else ''}"
        axes.plot(steps, scores, color=colour, linewidth=2.4, label=f"{who}, {seeds}")
    axes.set(
        xlabel="Environment steps",
        ylabel=f"Return, mean of {CASES[name].episodes} deterministic episodes",
        title=CASES[name].env,
    )
    axes.grid(color="#D9D9D9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = RESULTS / f"curves-{name}.png"
    figure.savefig(path)
    return path


def report(runs: list[Run]) -> str:
    """The tables as Markdown."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "numpy", "gymnasium"))
    lines = ["# Learning curves beside Stable-Baselines3", "", f"{STEPS:,} steps, one thread, {versions}, {date}. "
             "`python benchmarks/curves.py CASE --who penstock`, `--who sb3 --peer PYTHON`, then `--plot`. A score is the mean return "
             "of deterministic episodes; \"last 3\" is the mean of the last three evaluations. Settings are equal and stand in "
             "`benchmarks/curves.py` and the presets. Wall times are of a shared machine: no more than their order.", ""]  # fmt: skip
    for name, case in CASES.items():
        own = [run for run in runs if run["case"] == name]
        if not own:
            continue
        lines += [f"## {name}: {case.env}, {case.episodes} episodes", "", f"![curves](curves-{name}.png)", "",
                  "| | seed | 20,000 | 50,000 | 100,000 | last 3 | mean of all | steps/s | CPU s |",
                  "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for who in sorted({run["who"] for run in own}):
            rows = [run for run in own if run["who"] == who]
            numbers = [_numbers(run) for run in rows]
            for run, values in zip(rows, numbers):
                lines.append(f"| {who} {run['version']} | {run['seed']} | {_cells(values)} |")
            if len(rows) > 1:
                lines.append(f"| **{who}** | mean | {_cells(list(np.mean(numbers, 0)))} |")
        lines += ["", case.note, ""]
        lines += [
            f"{run['who']}, seed {run['seed']}: {run['steps'][-1]:,} steps only."
            for run in own
            if len(run["steps"]) < PLACES
        ]
        counts = {who: sum(run["who"] == who for run in own) for who in sorted({run["who"] for run in own})}
        lines += [f"Not yet run: {3 - n} of 3 seeds of {who}." for who, n in counts.items() if n < 3]
        lines.append("")
    return "\n".join(lines)


def _numbers(run: Run) -> list[float]:
    """As in the table; nan where a run is too short."""
    scores = [*run["scores"], *[math.nan] * (PLACES - len(run["scores"]))]
    means = float(np.mean(scores[-3:])), float(np.mean(scores))
    return [scores[1], scores[4], scores[-1], *means, run["steps"][-1] / run["wall_s"], run["cpu_s"]]


def _cells(values: list[float]) -> str:
    shown = ["-" if math.isnan(x) else f"{x:,.1f}" for x in values[:5]]
    return " | ".join([*shown, *(f"{x:,.0f}" for x in values[5:])])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=list(CASES), help="what to run")
    parser.add_argument("--who", default="penstock", choices=("penstock", "sb3"))
    parser.add_argument("--only", default="", help="part of the name of penstock's runs, e.g. Rainbow")
    parser.add_argument("--peer", help="the Python that has stable-baselines3, for --who sb3")
    parser.add_argument("--seeds", default="1,2,3", help="by comma")
    parser.add_argument("--steps", type=int, default=STEPS, help="environment steps; fewer are marked in the table")
    parser.add_argument("--plot", action="store_true", help="draw and write what the file holds")
    args = parser.parse_args(argv)
    if args.who == "sb3" and not args.peer:
        parser.error("--who sb3 needs --peer, the Python of the environment where it is installed")
    if args.case:
        case = CASES[args.case]
        for seed in map(int, args.seeds.split(",")):
            if args.who == "sb3":
                found = {f"SB3 {case.peer[0].upper()}": peers(case, args.peer, seed, args.steps)}
                for who, run in found.items():
                    keep({"case": args.case, "who": who, "seed": seed, **run})
                continue
            for who, (algo, changes) in case.ours.items():
                if args.only in who:
                    keep({"case": args.case, "who": who, "seed": seed, **ours(case, algo, changes, seed, args.steps)})
    if args.plot:
        runs = json.loads(FILE.read_text())
        for name in {run["case"] for run in runs}:
            print(draw(name, [run for run in runs if run["case"] == name]))
        (RESULTS / "curves.md").write_text(report(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
