"""Options of runs that take no time, and what such a run left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHORT = (
    "--preset", "none", "--sampler.T", "16", "--sampler.B", "4", "--run.steps", "128", "--run.eval-episodes", "1",
    "--run.log-interval", "1",
)  # fmt: skip
QUIET = (*SHORT, "--run.progress", "off")
Cli = Callable[..., SimpleNamespace]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def config(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())["experiment"]
