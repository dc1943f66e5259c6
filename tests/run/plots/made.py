"""Run directories made by hand, and the words in a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from penstock.run.log import MetricsLog
from penstock.run.plots.figure import plot_runs


def make_run(
    run_dir: Path,
    slope: float = 1.0,
    meta: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    evals: bool = False,
    time: bool = True,
    last: int = 11,
    opens: int = 1,
) -> Path:
    log = MetricsLog(run_dir)
    for i in range(opens, last):
        row = {"rollout/ep_rew_mean": slope * i}
        if time:
            row["time/time_elapsed"] = 30.0 * i
        log.write(1000 * i, row)
        if evals and i % 5 == 0:
            log.write(1000 * i, {"eval/mean_reward": slope * i + 1})
    log.close()
    if meta is not None:
        (run_dir / "meta.json").write_text(json.dumps(meta))
        (run_dir / "config.json").write_text(json.dumps({"experiment": settings or {}, "spec": None}))
    return run_dir


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


PPO_META = {"env": "CartPole-v1", "algo": "ppo"}


def settings(seed: int = 0, lr: Any = 1e-3, discount: float = 0.99, **algo: Any) -> dict[str, Any]:
    return {
        "class": "penstock.run.experiment:Experiment",
        "algo": {"class": "penstock.algos.ppo:PPO", "lr": lr, "discount": discount, **algo},
        "sampler": {"class": "penstock.samplers.serial:SerialSampler", "B": 16, "discount": discount},
        "run": {"seed": seed, "dir": f"runs/{seed}", "progress": "off" if seed else "auto",
                "trackers": ["tensorboard"] if seed else [], "steps": 1000 + seed, "keep": 3},
    }  # fmt: skip


def legend(tmp_path: Path, given: list[dict[str, Any]]) -> list[str]:
    runs = [make_run(tmp_path / f"r{i}", meta=PPO_META, settings=each) for i, each in enumerate(given)]
    return [text for text in texts(plot_runs(runs, tmp_path / "x.svg")) if text.startswith("ppo")]
