"""MLflow: a server, or a SQLite file in the run directory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param, RunStatus  # pyright: ignore[reportMissingImports]

from penstock.run.tracking.answer import require_answer
from penstock.run.tracking.tracker import TrackedRun

_TAG = "penstock.id"
_NOT_IN_NAMES = re.compile(r"[^\w./ :-]")
_MOST_PARAMS, _LONGEST = 100, 500


class MLflow:
    """A run of the experiment `penstock`, or MLFLOW_EXPERIMENT_NAME, at MLFLOW_TRACKING_URI.

    Without that variable it is in `mlflow.db` and `mlartifacts/` of the run directory. Characters that MLflow refuses
    in names of metrics become `_`.
    """

    def start(self, run: TrackedRun) -> None:
        uri, location = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder = run.run_dir.absolute()
            uri, location = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlartifacts").as_uri()
        elif uri.startswith("http"):
            require_answer(uri)
        self._client = client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "penstock")
        experiment = client.get_experiment_by_name(name)
        where = client.create_experiment(name, location) if experiment is None else experiment.experiment_id
        known = client.search_runs([where], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            client.update_run(self._id, RunStatus.to_string(RunStatus.RUNNING))
            return
        self._id = client.create_run(where, tags={_TAG: run.id}, run_name=run.name).info.run_id
        params = [Param(_named(name), str(value)[:_LONGEST]) for name, value in run.settings.items()]
        for i in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._id, params=params[i : i + _MOST_PARAMS])

    def write(self, step: int, row: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [Metric(_named(name), value, now_ms, step) for name, value in row.items()]
        for i in range(0, len(metrics), _MOST_PARAMS):
            self._client.log_batch(self._id, metrics=metrics[i : i + _MOST_PARAMS])

    def artifact(self, path: Path, kind: str) -> None:
        self._client.log_artifact(self._id, str(path), kind)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _named(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)
