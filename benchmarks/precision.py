"""What bfloat16 products do to learning: presets trained in float32 and in bf16, over the same seeds.

    python benchmarks/precision.py [--seeds 1,2,3] [--only ppo] [--write]

The first evaluation of 20 deterministic episodes that reaches the return of `learning.py`, in environment steps, and the
mean return of the final policy. What an update costs in either precision is measured by `gpu.py updates`, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

import penstock as ps

RESULTS = Path(__file__).parent / "results"
TASKS = {"ppo": ("CartPole-v1", 50_000, 475.0), "sac": ("Pendulum-v1", 5_000, -200.0)}
PRECISIONS = ("float32", "bf16")


def trained(algo: str, precision: str, seed: int) -> tuple[int | None, float]:
    """Steps to the first evaluation that reaches the return, None if none does, and the final mean return."""
    env, steps, threshold = TASKS[algo]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        changes = {
            "run.steps": steps, "run.seed": seed, "run.precision": precision, "run.eval_interval": steps // 20,
            "run.dir": str(run), "run.progress": "off", "run.tensorboard": False, "run.checkpoint_interval": 0,
        }  # fmt: skip
        ps.train(ps.override(ps.preset(algo, env), changes))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(int(row["time/total_timesteps"]), row["eval/mean_reward"]) for row in rows if "eval/mean_reward" in row]
    return next((at for at, score in found if score >= threshold), None), found[-1][1]


def main() -> None:
    """Trains, prints a table, and writes it to results/precision.md if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", choices=TASKS)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    seeds = [int(x) for x in args.seeds.split(",")]
    lines = [
        "| task | steps | seeds | precision | first evaluation that reaches it, steps | final mean return |",
        "|---|---|---|---|---|---|",
    ]
    for algo in [args.only] if args.only else TASKS:
        env, steps, threshold = TASKS[algo]
        found: dict[str, list[tuple[int | None, float]]] = {name: [] for name in PRECISIONS}
        for seed in seeds:
            for name in PRECISIONS:
                found[name].append(trained(algo, name, seed))
                print(algo, seed, name, found[name][-1], flush=True)
        for name, results in found.items():
            at = ", ".join("-" if x is None else f"{x:,}" for x, _ in results)
            final = f"{statistics.mean(y for _, y in results):.1f} ({', '.join(f'{y:.1f}' for _, y in results)})"
            lines.append(f"| {algo} {env} to {threshold:g} | {steps:,} | {args.seeds} | {name} | {at} | {final} |")
    table = "\n".join(lines)
    print(table)
    if args.write:
        head = f"# Precision of products\n\n`python benchmarks/precision.py`, torch {torch.__version__}.\n\n"
        path = RESULTS / "precision.md"
        others = "".join(path.read_text().partition("\n## ")[1:]) if path.exists() else ""  # what updates cost
        path.write_text(f"{head}{table}\n{others}")


if __name__ == "__main__":
    main()
