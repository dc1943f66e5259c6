"""The seam of algorithms: which members a run asks for, and an iteration that an algorithm brings itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.learn.algorithm import TrainingStep
from penstock.learn.train_ops import train_one_step, training_step
from penstock.run.trainer import Trainer


@dataclass(frozen=True)
class TwiceAnIteration(ps.A2C):
    """Two batches an iteration, of which the second trains twice."""

    calls: Any = field(default_factory=list[int])

    def training_step(self, policy: ps.Policy, sampler: Any, itr: int) -> TrainingStep:
        self.calls.append(itr)
        started = time.perf_counter()
        first = training_step(policy, sampler, 2 * itr)
        batch, episodes = sampler.obtain_samples(2 * itr + 1)
        metrics = train_one_step(policy, batch) and train_one_step(policy, batch)
        steps = first.env_steps + batch.env_steps
        return TrainingStep(
            metrics | {"train/own": 7.0}, episodes, steps, first.sample_s, time.perf_counter() - started
        )


def trainer(algo: Any) -> Trainer:
    return Trainer(ps.Experiment("CartPole-v1", algo, ps.SerialSampler(T=4, B=2), ps.RunConfig(steps=10_000)))


def test_an_algorithm_brings_its_own_training_step() -> None:
    algo = TwiceAnIteration()
    with trainer(algo) as live:
        for k in range(3):
            metrics = live.train()
            assert metrics["train/own"] == 7.0 and metrics["time/iterations"] == k + 1
            assert metrics["train/n_updates"] == live.policy.updates == 3 * (k + 1)
        assert algo.calls == [0, 1, 2]
        assert live.env_steps == metrics["time/total_timesteps"] > 3 * 4 * 2  # pyright: ignore[reportPossiblyUnboundVariable]


def test_without_one_an_iteration_is_a_batch_and_its_training() -> None:
    with trainer(ps.A2C()) as live:
        assert live.train()["train/n_updates"] == 1 and live.env_steps == 4 * 2


@dataclass(frozen=True)
class WithoutBatch:
    def build(self, spec: Any, seed: int = 0, device: str = "cpu") -> Any:
        raise AssertionError("not reached")


@dataclass(frozen=True)
class WithoutBuild:
    batch = ps.BatchSpec(T=4, B=2)


@pytest.mark.parametrize(
    ("algo", "member"),
    [(WithoutBatch(), r"batch: BatchSpec"), (WithoutBuild(), r"build\(spec: Any, seed: int = 0, device: str = 'cpu'\)")],
    ids=["batch", "build"],
)  # fmt: skip
def test_an_algorithm_that_lacks_a_member_is_refused_with_its_signature(algo: Any, member: str) -> None:
    name = type(algo).__name__
    for sampler in (None, ps.SerialSampler(T=4, B=2)):
        with pytest.raises(ConfigError, match=rf"{name} has no {member}.*Algorithm.*docs/writing-an-algorithm\.md$"):
            ps.Experiment("CartPole-v1", algo, sampler)
