"""Run directories without a run, and trackers that tell, fail or never answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from penstock.run.log import MetricsLog
from penstock.run.tracking.sender import Sender, finish
from penstock.run.tracking.tracker import TrackedRun

HERE = "tests.run.tracking.made"


def run_dir(path: Path, rows: int = 0) -> Path:
    path.mkdir(parents=True)
    settings = {"class": "x:Y", "algo": {"lr": 1e-3, "net": {"hidden": [8, 8]}}, "run": {"steps": 5, "stop": {}}}
    (path / "config.json").write_text(json.dumps({"experiment": settings}))
    (path / "meta.json").write_text(json.dumps({"algo": "ppo", "env": "CartPole-v1", "versions": {"torch": "2"}}))
    if rows:
        write(path, range(1, rows + 1))
    return path


def write(path: Path, steps: range, resume_step: int | None = None, scale: float = 1.0) -> None:
    log = MetricsLog(path, resume_step)
    for step in steps:
        log.write(step, {"a": step * scale})
    log.close()


class Told:
    """Keeps what it is told, by run directory; `fails` has, for each call, how often it is to raise."""

    rows: ClassVar[list[tuple[int, dict[str, float]]]] = []
    files: ClassVar[list[tuple[str, str]]] = []
    runs: ClassVar[list[TrackedRun]] = []
    ended: ClassVar[list[str]] = []
    fails: ClassVar[dict[str, int]] = {}

    def start(self, run: TrackedRun) -> None:
        self._maybe("start")
        self.runs.append(run)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._maybe(f"write {step}")
        self.rows.append((step, dict(row)))

    def artifact(self, path: Path, kind: str) -> None:
        self._maybe(kind)
        self.files.append((path.name, kind))

    def close(self) -> None:
        self._maybe("close")
        self.ended.append(threading.current_thread().name)

    def _maybe(self, call: str) -> None:
        if self.fails.get(call, 0):
            self.fails[call] -= 1
            raise RuntimeError(f"no {call}")

    @classmethod
    def steps(cls) -> list[int]:
        return [step for step, _ in cls.rows]


LINE = Told._maybe.__code__.co_firstlineno + 3  # pyright: ignore[reportPrivateUsage]
"""Where `Told` raises."""


class Silent(Told):
    """Its server never answers."""

    def start(self, run: TrackedRun) -> None:
        time.sleep(30.0)


class Hanging(Told):
    """Its server stops answering at step 2."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if step == 2:
            time.sleep(30.0)
        super().write(step, row)


class Lines(Told):
    """Writes a line a row, which stays whatever kills the process."""

    def start(self, run: TrackedRun) -> None:
        self._file = (run.run_dir.parent / "lines.txt").open("a")
        self._say(f"run {run.id}")

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._say(f"row {step}")

    def artifact(self, path: Path, kind: str) -> None:
        self._say(f"file {kind}")

    def close(self) -> None:
        self._say("end")

    def _say(self, text: str) -> None:
        print(text, file=self._file, flush=True)


def not_a_tracker() -> int:
    return 3


class Lacking:
    """A tracker without `artifact`."""

    def start(self, run: TrackedRun) -> None: ...
    def write(self, step: int, row: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class WithPath(Told):
    """Takes an argument."""

    def __init__(self, path: Path) -> None: ...


class Stepless(Told):
    """Its `write` takes no step."""

    def write(self, row: Mapping[str, float]) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]


def ended(sender: Sender, **patience: Any) -> list[str]:
    """Has a sender end; returns what was said."""
    said: list[str] = []
    finish([sender], said.append, **patience)
    return said
