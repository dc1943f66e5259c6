"""An experiment that is measured in no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import penstock as ps
from penstock.run.bench.costs import Costs

ENV = "penstock.envs.toy:Counter"
BASE = ps.SerialSampler(T=8, B=4)
QUIET = ps.RunConfig(steps=64, progress="off", tensorboard=False, eval_episodes=0)


def experiment(sampler: Any = BASE, **run: Any) -> ps.Experiment:
    return ps.Experiment(env=ENV, algo=ps.A2C(), sampler=sampler, run=replace(QUIET, **run))


def costs(step: float, forward: float, shake: float) -> Costs:
    return Costs(step, 2 * step, {4: forward, 16: forward}, shake)
