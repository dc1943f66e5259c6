"""Trackio: a SQLite file of this user, or a Space of Hugging Face by TRACKIO_SPACE_ID."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import trackio  # pyright: ignore[reportMissingImports]

from penstock.run.tracking.answer import require_answer
from penstock.run.tracking.tracker import TrackedRun


class Trackio:
    """A run of the project `penstock`, or TRACKIO_PROJECT; TRACKIO_DIR, TRACKIO_SPACE_ID and others hold.

    Trackio finds a run by its name, which ends with the id here.
    """

    def start(self, run: TrackedRun) -> None:
        if url := os.environ.get("TRACKIO_SERVER_URL"):
            require_answer(url)
        project = os.environ.get("TRACKIO_PROJECT", "penstock")
        self._run = trackio.init(
            project=project,
            name=f"{run.name} {run.id}",
            resume="allow",
            config=dict(run.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def artifact(self, path: Path, kind: str) -> None:
        self._run.log_artifact(path, name=f"{self._run.id}-{kind}" if kind != "video" else path.stem, type=kind)

    def close(self) -> None:
        self._run.finish()
