"""Ape-X DQN and SAC that learn while two runners collect, beside SerialSampler, over seeds.

Both sides have the preset, the number of slots and the steps in common; the runners are local processes, one batch
ahead (`depth=1`). A seed's score is the best of its last five evaluations of 20 episodes, and the promise is that the
mean over seeds is not below the synchronous one by more than two standard errors of the difference.

    python benchmarks/runners_learning.py [--only apex|sac] [--seeds 5]
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import penstock as ps

RESULTS = Path(__file__).parent / "results" / "runners_learning.json"
APEX = {
    "algo.ladder": "ape-x", "algo.epsilon": 0.4, "algo.n_step": 3, "algo.replay.index": "prioritized",
    "algo.replay.fresh_priority": "agent",
}  # fmt: skip
TASKS: dict[str, tuple[str, str, int, int, int, int, dict[str, Any]]] = {
    "apex": ("dqn", "CartPole-v1", 50_000, 2_500, 16, 8, APEX),
    "sac": ("sac", "Pendulum-v1", 10_000, 1_000, 1, 2, {}),
}
"""Algorithm, environment, steps, steps between evaluations, T, slots of a runner, and what differs from the preset."""
RUNNERS = 2


def score(name: str, on_runners: bool, seed: int) -> float:
    """The best of the last five evaluations of one run."""
    algo, env, steps, interval, T, B, changes = TASKS[name]
    with tempfile.TemporaryDirectory() as folder:
        run = {
            "run.steps": steps, "run.seed": seed, "run.dir": f"{folder}/run", "run.progress": "off",
            "run.eval_interval": interval, "run.eval_episodes": 20, "run.checkpoint_interval": 0,
        }  # fmt: skip
        exp = ps.override(ps.preset(algo, env), {**changes, **run})
        inner = ps.SerialSampler(T=T, B=B)
        runners = ps.RunnerSampler(runners=RUNNERS, inner=inner, depth=1, backend="processes")
        ps.train(replace(exp, sampler=runners if on_runners else ps.SerialSampler(T=T, B=RUNNERS * B)))
        rows = Path(folder, "run", "eval", "evaluations.jsonl").read_text().splitlines()
    return max(json.loads(row)["eval/mean_reward"] for row in rows[-5:])


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "# Off-policy learning on runners",
        "",
        "`python benchmarks/runners_learning.py`: two runners in processes, one batch ahead, beside SerialSampler with as",
        "many slots; the best of the last five evaluations of 20 episodes by seed, the mean ± its standard error, and the",
        "difference in standard errors of the difference (promised: at least -2).",
        "",
        f"Of {datetime.date.today()}, torch {torch.__version__}, {os.cpu_count()} cores.",
        "",
        "| task | steps | two runners, by seed | mean | serial, by seed | mean | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        algo, env, steps, *_ = TASKS[name]
        cells: list[str] = []
        means: list[tuple[float, float]] = []
        for who in ("runners", "serial"):
            values = list(found[who].values())
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            means.append((statistics.fmean(values), error))
            cells += [" ".join(f"{x:.0f}" for x in values), f"{means[-1][0]:.1f} ± {error:.1f}"]
        (a, a_error), (b, b_error) = means
        z = (a - b) / (math.hypot(a_error, b_error) or 1.0)
        title = {"apex": "Ape-X DQN", "sac": "SAC"}[name]
        lines.append(f"| {title}, {algo} {env} | {steps:,} | {' | '.join(cells)} | {z:+.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for seed in range(1, 1 + args.seeds):
        for name in args.only.split(","):
            for who in ("runners", "serial"):
                held = results.setdefault(name, {}).setdefault(who, {})
                if str(seed) in held:
                    continue
                held[str(seed)] = score(name, who == "runners", seed)
                print(f"{name} {who} seed {seed}: {held[str(seed)]:.1f}", flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                if all(results[name].get(w) for w in ("runners", "serial")):
                    RESULTS.with_suffix(".md").write_text(table({k: v for k, v in results.items() if len(v) == 2}))


if __name__ == "__main__":
    main()
