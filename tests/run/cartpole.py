"""A short experiment, and the checkpoints that a run has saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock as ps

RUN = ps.RunConfig(steps=640, seed=1, eval_episodes=2, log_interval=1, progress="off")
CARTPOLE = ps.Experiment("CartPole-v1", ps.A2C(), ps.SerialSampler(T=16, B=4), RUN)


def at(run: Path, exp: ps.Experiment = CARTPOLE, **changes: Any) -> ps.Experiment:
    return replace(exp, run=replace(exp.run, dir=str(run), **changes))


def saved(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
