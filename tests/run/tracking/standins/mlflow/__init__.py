"""Stands for MLflow where that is not installed: the calls that penstock makes, with its arguments, kept by run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlflow.entities import Metric, Param  # pyright: ignore

RUNS: dict[str, Kept] = {}
EXPERIMENTS: dict[str, Any] = {}


@dataclass
class Kept:
    tags: dict[str, str]
    name: str
    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    artifacts: list[tuple[str, str]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)


class MlflowClient:
    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> Any:
        return EXPERIMENTS.get(name)

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        EXPERIMENTS[name] = SimpleNamespace(experiment_id="7", location=artifact_location)
        return "7"

    def search_runs(self, experiment_ids: list[str], filter_string: str, max_results: int) -> list[Any]:
        found = [key for key, run in RUNS.items() if f"'{run.tags['penstock.id']}'" in filter_string]
        return [SimpleNamespace(info=SimpleNamespace(run_id=key)) for key in found[:max_results]]

    def create_run(self, experiment_id: str, tags: dict[str, str], run_name: str) -> Any:
        key = f"run{len(RUNS)}"
        RUNS[key] = Kept(tags, run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=key))

    def update_run(self, run_id: str, status: str) -> None:
        RUNS[run_id].states.append(status)

    def log_batch(self, run_id: str, metrics: list[Metric] = [], params: list[Param] = []) -> None:  # noqa: B006
        assert len(metrics) <= 1000 and len(params) <= 100
        RUNS[run_id].metrics.extend(metrics)
        RUNS[run_id].params.update({param.key: param.value for param in params})

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str) -> None:
        RUNS[run_id].artifacts.append((os.path.basename(local_path), artifact_path))

    def set_terminated(self, run_id: str) -> None:
        RUNS[run_id].states.append("FINISHED")
