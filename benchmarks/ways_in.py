"""Learning curves of the two scripts on each page "Coming from": the other library's and penstock's, in one picture.

    python benchmarks/ways_in.py stable-baselines3 --peer PYTHON [--seeds 1,2,3,4,5]
    python benchmarks/ways_in.py cleanrl --peer PYTHON --folder FOLDER_OF_PPO_PY
    python benchmarks/ways_in.py --plot

The scripts are the blocks of docs/from-NAME.md, run as they stand but for the seed and for CartPole-v1, which is
`peers/episodes.py`. A score is the mean return of the last 40 episodes of all eight environments. Runs are kept in
results/ways_in.json; --plot draws docs/images/from-NAME.png and says how much of each mean is inside the other's seeds.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "results" / "ways_in.json"
B, STEPS, PLACES, LAST = 8, 30_720, 24, 40
NAMES = {"stable-baselines3": "Stable-Baselines3", "cleanrl": "CleanRL", "rllib": "RLlib", "rlpyt": "rlpyt",
         "tianshou": "Tianshou"}  # fmt: skip
FUNCTION, ID = "episodes:make", "episodes:Recorded-v0"
"""CartPole-v1 with its episodes recorded, as penstock and as the others name it."""


def blocks(name: str, language: str) -> list[str]:
    page = (ROOT / "docs" / f"from-{name}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def commands(name: str, who: str, python: str) -> list[str]:
    """What to run: a script of the page, or its line of shell."""
    ours = who == "penstock"
    if name == "cleanrl":
        lines = blocks(name, "sh")[0].replace("\\\n", "").splitlines()
        words = shlex.split(lines[ours])
        return [python, "-m", *words] if ours else [python, *words[1:]]
    return [python, "-c", blocks(name, "python" if ours else "py")[0]]


def curve(name: str, who: str, python: str, folder: str, seed: int) -> list[float]:
    """Mean return of the last episodes after each of PLACES parts of the steps."""
    words = commands(name, who, python)
    words = [re.sub(r"seed([= ]|\b)1\b", f"seed={seed}", word) for word in words]
    words = [str(seed) if old in ("--seed", "--run.seed") else word for old, word in zip(["", *words], words)]
    words = [word.replace("CartPole-v1", FUNCTION if who == "penstock" else ID) for word in words]
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as episodes:
        path = os.pathsep.join(
            [str(ROOT / "benchmarks" / "peers"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH"), folder])]
        )
        env = {**os.environ, "OMP_NUM_THREADS": "1", "EPISODES": episodes, "PYTHONPATH": path}
        if name == "cleanrl" and who != "penstock":
            words[1] = str(Path(folder, words[1]))
        done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        files = [np.loadtxt(file, ndmin=2) for file in sorted(Path(episodes).iterdir()) if file.stat().st_size]
    # Environments of evaluations are made later, and those that are looked at before the run are stepped a little.
    rows = np.concatenate([rows for rows in files if rows[-1, 0] > STEPS / B / 2][:B])
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ended, returns = rows[:, 0] * B, rows[:, 1]
    return [float(returns[ended <= place][-LAST:].mean()) for place in np.linspace(0, STEPS, PLACES + 1)[1:]]


def keep(name: str, who: str, seed: int, scores: list[float]) -> None:
    """Adds a run to the file, which several of these scripts may write to."""
    with FILE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        runs = json.loads(file.read() or "{}")
        runs.setdefault(name, {}).setdefault(who, {})[str(seed)] = [round(score, 1) for score in scores]
        file.truncate(0)
        file.write(json.dumps(runs, indent=1, sort_keys=True).replace("\n    ", " ").replace("\n   ]", "]") + "\n")


def inside(mean: np.ndarray, seeds: np.ndarray) -> float:
    """The share of places at which a mean lies between the lowest and the highest of the other's seeds."""
    return float(((seeds.min(0) <= mean) & (mean <= seeds.max(0))).mean())


def plot() -> None:
    from matplotlib.figure import Figure

    for name, runs in json.loads(FILE.read_text()).items():
        if len(runs) < 2:
            continue  # one side is not measured yet
        figure = Figure(figsize=(6.4, 3.4), dpi=120, layout="constrained")
        axes = figure.subplots()
        x = np.linspace(0, STEPS, PLACES + 1)[1:]
        curves = {
            who: np.array(list(seeds.values()))
            for who, seeds in sorted(runs.items(), key=lambda it: it[0] == "penstock")
        }
        for colour, (who, seeds) in zip(("#D55E00", "#0072B2"), curves.items()):
            label = f"{'penstock' if who == 'penstock' else NAMES[name]}, {len(seeds)} seeds"
            axes.fill_between(x, seeds.min(0), seeds.max(0), color=colour, alpha=0.18, linewidth=0)
            axes.plot(x, seeds.mean(0), color=colour, linewidth=2.2, label=label)
        axes.set(
            xlabel="Environment steps",
            ylabel=f"Mean return of the last {LAST} episodes",
            title="PPO on CartPole-v1: mean and range",
        )
        axes.grid(color="#D9D9D9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
        figure.savefig(ROOT / "docs" / "images" / f"from-{name}.png")
        (_, theirs), (_, ours) = curves.items()
        shares = inside(ours.mean(0), theirs), inside(theirs.mean(0), ours)
        ends = f"at {STEPS:,} steps {ours[:, -1].mean():.0f}, {NAMES[name]} {theirs[:, -1].mean():.0f}"
        print(
            f"{name}: {ends}; our mean is in their range at {shares[0]:.0%} of {PLACES} places, theirs in ours at {shares[1]:.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=NAMES)
    parser.add_argument("--peer", help="a Python that has the other library")
    parser.add_argument("--folder", default="", help="where CleanRL's ppo.py, or rlpyt's package, is")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--who", choices=("penstock", "peer"), help="only one of both")
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    if args.plot:
        return plot()
    for who in ("penstock", "peer"):
        if args.name and args.who in (None, who) and (who == "penstock" or args.peer):
            for seed in map(int, args.seeds.split(",")):
                scores = curve(args.name, who, sys.executable if who == "penstock" else args.peer, args.folder, seed)
                keep(args.name, who, seed, scores)
                print(args.name, who, seed, [round(score) for score in scores[5::6]], flush=True)
    return None


if __name__ == "__main__":
    main()
