"""An experiment that is measured in no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import penstock as ps

ENV = "penstock.envs.toy:Counter"
BASE = ps.SerialSampler(T=8, B=4)
QUIET = ps.RunConfig(steps=64, progress="off", eval_episodes=0)


def experiment(sampler: Any = BASE, **run: Any) -> ps.Experiment:
    return ps.Experiment(env=ENV, algo=ps.A2C(), sampler=sampler, run=replace(QUIET, **run))
