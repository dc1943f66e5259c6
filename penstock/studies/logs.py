"""The ends of logs and metrics of runs, and exit codes in words."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from penstock.studies.trial import PROMPT, Run

_TAIL_BYTES = 16384
_TAIL_LINES = 8
_CODES = {2: "settings", 3: "environment", 4: "learner", 5: "checkpoint", 6: "lost learner"}


def reason_of(run: Run) -> str:
    """The exit code in words."""
    code = run.code or 0
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"exit code {code}" + (f" ({_CODES[code]})" if code in _CODES else "")


def log_end(path: Path) -> list[str]:
    """The last lines of the last attempt in a log, without blank ones."""
    try:
        with open(path, "rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return [f"it cannot be read: {error.strerror}"]
    begin = max((i + 1 for i, line in enumerate(lines) if line.startswith(PROMPT)), default=0)
    return [line.rstrip() for line in lines[begin:] if line.strip()][-_TAIL_LINES:]


def last_row(run_dir: Path) -> dict[str, Any]:
    """The newest metrics of a run, {} before the first row."""
    found: dict[str, Any] = {}
    for line in log_end(run_dir / "metrics.jsonl"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found |= row
    return found
