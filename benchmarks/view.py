"""How fast the page of `penstock view` answers: `python -m benchmarks.view [--runs 200] [--rows 1000] [--metrics 38]`.

Runs are made in a temporary folder, 5 seeds a curve. Cold: by a server that has read nothing yet (the operating system
may hold the files). Warm: the same again. Changed: after a row was appended to one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np

from penstock.run.log import JSONL
from penstock.view.server import ViewServer

SEEDS = 5
METRIC = "rollout/ep_rew_mean"


def make_runs(folder: Path, runs: int, rows: int, metrics: int) -> None:
    """Folders of runs, 5 seeds a curve, with noise in every metric; evaluations stand in every row."""
    own = [METRIC, "eval/mean_reward", "time/time_elapsed"]
    names = [*own, *(f"train/metric_of_a_usual_length_{i}" for i in range(metrics - len(own)))]
    for at in range(runs):
        group, seed = divmod(at, SEEDS)
        rng = np.random.default_rng(at)
        run = folder / f"lr{group}" / f"seed{seed}"
        run.mkdir(parents=True)
        noise = rng.normal(size=(rows, metrics))
        noise[:, 0] = 500 * (1 - np.exp(-np.arange(rows) / (100 + 9 * group))) + 9 * noise[:, 0]
        noise[:, 2] = 3.1 * np.arange(rows)
        lines = [json.dumps({"step": 1000 * (i + 1), **dict(zip(names, row))}) for i, row in enumerate(noise.tolist())]
        (run / JSONL).write_text("".join(f"{line}\n" for line in lines))
        settings = {"algo": {"class": "penstock.algos.ppo:PPO", "lr": 1e-4 * (group + 1)}, "run": {"seed": seed}}
        (run / "config.json").write_text(json.dumps({"experiment": settings}))
        (run / "meta.json").write_text(json.dumps({"env": "CartPole-v1", "algo": "ppo", "seed": seed}))


def timed(server: ViewServer, path: str) -> tuple[float, float]:
    """Seconds until the whole answer has come, and of the processor, of which this process has the only server."""
    started, cpu = time.perf_counter(), time.process_time()
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        answer.read()
    return time.perf_counter() - started, time.process_time() - cpu


def measure(folder: Path, repeats: int) -> None:
    """Prints the median and the largest time of each answer."""
    found: dict[str, list[tuple[float, float]]] = {}
    shown = f"api/chart?metric={METRIC}&x=steps"
    for _ in range(repeats):
        with ViewServer(folder) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            found.setdefault("list, cold", []).append(timed(server, "api/runs"))
            groups = [group["id"] for group in server.catalog.listing()["groups"]]
            seven = f"{shown}&groups={','.join(groups[:7])}"
            found.setdefault("chart of 7 curves, cold", []).append(timed(server, seven))
            server.shutdown()
        with ViewServer(folder) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            timed(server, "api/runs")
            found.setdefault(f"chart of all {len(groups)} curves, cold", []).append(timed(server, shown))
            for name in ("list", "chart"):
                time.sleep(0.5)
                path = "api/runs" if name == "list" else shown
                found.setdefault(f"{name}{' of all curves' * (name == 'chart')}, warm", []).append(timed(server, path))
            first = next(folder.rglob(JSONL))
            with first.open("a") as file:
                file.write(json.dumps({"step": 10**7, METRIC: 1.0}) + "\n")
            time.sleep(0.5)
            found.setdefault("list, changed", []).append(timed(server, "api/runs"))
            found.setdefault("chart of all curves, changed", []).append(timed(server, shown))
            found.setdefault("a run in full", []).append(timed(server, f"api/run?id={server.catalog.refresh()[0].id}"))
            server.shutdown()
    print(f"{'answer':<34} {'median':>8} {'largest':>8} {'of CPU':>8}")
    for name, times in found.items():
        wall, cpu = zip(*times)
        print(f"{name:<34} {statistics.median(wall):>7.3f}s {max(wall):>7.3f}s {statistics.median(cpu):>7.3f}s")


def main() -> None:
    """Makes the runs and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("runs", 200), ("rows", 1000), ("metrics", 38), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), args.runs, args.rows, args.metrics)
        size = sum(path.stat().st_size for path in Path(folder).rglob(JSONL))
        print(f"{args.runs} runs of {args.rows} rows x {args.metrics} metrics, {size / 2**20:,.0f} MiB")
        measure(Path(folder), args.repeats)


if __name__ == "__main__":
    main()
