"""BC, GAIL and DAgger from few episodes of one expert: mean return of 20 deterministic episodes after training.

The expert is trained first (PPO on CartPole-v1, SAC on Pendulum-v1, their presets, seed 0), then recorded. Runs that
stand in results/imitation.json are not repeated; the table is written to results/imitation.md after each.

    python benchmarks/imitation.py [--only TASK] [--who bc,gail,dagger] [--seeds 3] [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.run.recording import record

RESULTS = Path(__file__).parent / "results" / "imitation.json"
TASKS: dict[str, tuple[str, Any, int]] = {
    "CartPole-v1, 1 episode": ("CartPole-v1", ps.preset("ppo", "CartPole-v1"), 1),
    "Pendulum-v1, 5 episodes": ("Pendulum-v1", ps.preset("sac", "Pendulum-v1"), 5),
}
PENDULUM = ps.Net(normalize_obs=True)
RUNS: dict[str, dict[str, tuple[Any, Any, int]]] = {
    "CartPole-v1": {
        "bc": (ps.BC(), None, 100_000),
        "gail": (ps.GAIL(lr="linear(1e-3, 0)"), ps.SerialSampler(T=128, B=8), 50_000),
        "dagger": (ps.DAgger(), ps.SerialSampler(T=32, B=8), 5_000),
    },
    "Pendulum-v1": {
        "bc": (ps.BC(lr="linear(1e-3, 0)", net=PENDULUM), None, 2_000_000),
        "gail": (
            ps.GAIL(lr="linear(1e-3, 0)", minibatch=256, discount=0.95, net=PENDULUM),
            ps.SerialSampler(T=64, B=16),
            300_000,
        ),
        "dagger": (ps.DAgger(lr="linear(1e-3, 0)", net=PENDULUM), ps.SerialSampler(T=50, B=8), 10_000),
    },
}


def imitate(env: str, who: str, seed: int, expert: Path, data: Path) -> dict[str, Any]:
    """One run: its score, steps, and the seconds of CPU that it took."""
    algo, sampler, steps = RUNS[env][who]
    started = time.process_time()
    given = {"dagger": {"algo.expert": str(expert)}, "gail": {"algo.dataset": str(data)}}.get(who, {})
    exp = ps.Experiment(env, algo, sampler or ps.OfflineSampler(str(data)), ps.RunConfig(steps, seed, progress="off"))
    result = ps.train(ps.override(exp, {**given, "run.dir": str(expert.parent / f"{who}-{seed}")}))
    return {
        "score": result.metrics["eval/mean_reward"],
        "steps": steps,
        "cpu_s": round(time.process_time() - started, 1),
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        "# Imitation",
        "",
        "`python benchmarks/imitation.py`: mean of 20 deterministic episodes, ± deviation over seeds 1 to 3.",
        "",
    ]
    lines += ["| task | expert | BC | GAIL | DAgger |", "|---|---|---|---|---|"]
    for task, rows in found.items():
        cells = [f"{rows['expert']:.1f}"]
        for who in ("bc", "gail", "dagger"):
            runs = list(rows.get(who, {}).values())
            scores = [x["score"] for x in runs]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            of = f" ({runs[0]['steps']:,} steps, {statistics.mean(x['cpu_s'] for x in runs):.0f} s)" if runs else ""
            cells.append(f"{statistics.mean(scores):.1f} ± {spread:.1f}{of}" if runs else "")
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--who", default="bc,dagger,gail")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for task, (env, teacher, episodes) in TASKS.items():
        if args.only not in task:
            continue
        home = args.dir / env
        expert, data = home / "expert", home / "data"
        if not expert.exists():
            run = {"run.dir": str(expert), "run.progress": "off", "run.seed": 0}
            trained = ps.train(ps.override(teacher, run))
            record(expert, data, episodes)
            found.setdefault(task, {})["expert"] = trained.metrics["eval/mean_reward"]
        for who in args.who.split(","):
            rows = found[task].setdefault(who, {})
            for seed in range(1, args.seeds + 1):
                if str(seed) not in rows:
                    rows[str(seed)] = imitate(env, who, seed, expert, data)
                    print(task, who, seed, rows[str(seed)], flush=True)
                    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
                    RESULTS.with_suffix(".md").write_text(table(found))


if __name__ == "__main__":
    main()
