"""Stands for wandb where that is not installed: the calls that penstock makes, with its arguments, kept by run id."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

RUNS: dict[str, Run] = {}


@dataclass
class Settings:
    silent: bool = False
    console: str = "auto"
    finish_timeout: float = 0.0
    mode: str = field(default_factory=lambda: os.environ.get("WANDB_MODE", "online"))
    base_url: str = field(default_factory=lambda: os.environ.get("WANDB_BASE_URL", ""))


@dataclass
class Singleton:
    settings: Settings = field(default_factory=Settings)


def setup() -> Singleton:
    return Singleton()


@dataclass
class Video:
    data_or_path: str


@dataclass
class Run:
    id: str
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[tuple[str, str, str]] = field(default_factory=list)
    metrics: list[tuple[str, str]] = field(default_factory=list)
    finished: int = 0

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, data: dict[str, Any]) -> None:
        self.rows.append(data)

    def log_artifact(self, artifact_or_path: str, name: str, type: str) -> None:
        self.artifacts.append((os.path.basename(artifact_or_path), name, type))

    def finish(self) -> None:
        self.finished += 1


def init(
    project: str,
    id: str,
    name: str,
    resume: str,
    dir: str,
    config: dict[str, Any],
    allow_val_change: bool,
    reinit: str,
    settings: Settings,
) -> Run:
    assert (resume, reinit, settings.silent, settings.console) == ("allow", "create_new", True, "off")
    return RUNS.setdefault(id, Run(id, name, config))
