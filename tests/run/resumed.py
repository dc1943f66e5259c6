"""Experiments of the tests that kill, resume and extend runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock as ps

Same = Callable[[Path, Path], None]
STEPS = 1_600
RUN = ps.RunConfig(
    steps=STEPS, seed=3, checkpoint_interval=160, eval_interval=600, eval_episodes=3, log_interval=1,
    progress="off",
)  # fmt: skip
SAMPLER = ps.SerialSampler(T=16, B=4)
MEMORY = ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8, prev_action=True, prev_reward=True,
                normalize_obs=True, normalize_reward=True)  # fmt: skip
EXPERIMENTS = {
    "ppo": ps.Experiment("CartPole-v1", ps.PPO(lr="linear(1e-3, 0)", epochs=2, minibatch=32), SAMPLER, RUN),
    "a2c": ps.Experiment("CartPole-v1", ps.A2C(), ps.SerialSampler(T=5, B=6, max_decorrelation_steps=20), RUN),
    "recurrent": ps.Experiment(
        "penstock.envs.toy:RepeatPrevious", ps.PPO(epochs=2, minibatch=32, net=MEMORY), SAMPLER, RUN,
        env_kwargs={"length": 23},
    ),
    "continuous": ps.Experiment(
        "Pendulum-v1", ps.PPO(epochs=2, minibatch=32, entropy_coef="cosine(0.01, 0)",
                              net=ps.Net(hidden=(16,), normalize_obs=True, normalize_reward=True)),
        ps.SerialSampler(T=16, B=4, reset="batch_end", max_decorrelation_steps=30), RUN,
    ),
}  # fmt: skip


def at(exp: ps.Experiment, run: Path, **changes: Any) -> ps.Experiment:
    return replace(exp, run=replace(exp.run, dir=str(run), **changes))


def checkpoints(run: Path) -> list[int]:
    folder = run / "checkpoints"
    return sorted(int(path.name) for path in folder.glob("0*") if path.name.isdecimal()) if folder.is_dir() else []


def logged(run: Path) -> int:
    """Rows."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


# In this process from here on: what is asked is which settings are taken.


def train(exp: ps.Experiment, run: Path, init: Path | None = None, **changes: Any) -> ps.Result:
    return ps.train(at(exp, run, **{"steps": 320, "eval_interval": 0, "eval_episodes": 0, **changes}), init=init)
