"""Weights & Biases: online, or offline by WANDB_MODE=offline, in the run directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import wandb  # pyright: ignore[reportMissingImports]

from penstock.run.tracking.answer import require_answer
from penstock.run.tracking.tracker import TrackedRun

_NOT_IN_NAMES = re.compile(r"[^\w.-]")


class WeightsAndBiases:
    """A run of the project `penstock`, or WANDB_PROJECT; what WANDB_MODE, WANDB_API_KEY and others say holds.

    The x-axis is the metric `step`: W&B's own would drop rows of evaluations beside training. The terminal stays
    penstock's, and another W&B run of this process is left alone.
    """

    def start(self, run: TrackedRun) -> None:
        given = wandb.setup().settings
        if given.mode in ("online", "shared"):
            require_answer(given.base_url)
        settings = wandb.Settings(silent=True, console="off", finish_timeout=30)  # it asks for no key on the terminal
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "penstock"),
            id=run.id,
            name=run.name,
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.settings),
            allow_val_change=True,
            reinit="create_new",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log({**row, "step": step})

    def artifact(self, path: Path, kind: str) -> None:
        if kind == "video":
            self._run.log({f"videos/{path.stem}": wandb.Video(str(path))})
        else:
            self._run.log_artifact(str(path), name=_NOT_IN_NAMES.sub("-", f"{self._run.id}-{kind}"), type=kind)

    def close(self) -> None:
        self._run.finish()
