from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.run import threads
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.threads import fastest_threads
from penstock.run.trainer import Trainer

NET = ps.Net(hidden=(8,), normalize_obs=True, normalize_reward=True)
EXP = ps.Experiment(
    "CartPole-v1", ps.PPO(epochs=1, minibatch=32, net=NET), ps.SerialSampler(T=16, B=4),
    ps.RunConfig(steps=128, learner_threads="auto", eval_episodes=0, progress="off"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


class Clock:
    """Seconds that depend on the thread count alone."""

    def __init__(self, cost: dict[int, float]) -> None:
        self.cost, self.now = cost, 0.0

    def perf_counter(self) -> float:
        self.now += self.cost.get(torch.get_num_threads(), 9.0)
        return self.now


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        ({1: 1.0, 2: 0.5, 4: 0.3, 8: 0.2}, 8),
        ({1: 1.0, 2: 0.5, 4: 0.7, 8: 0.8}, 2),
        ({1: 1.0, 2: 0.97, 4: 0.96, 8: 0.96}, 1),  # more threads must earn their keep
        ({1: 0.1}, 1),
    ],
)
def test_takes_the_fastest(cost: dict[int, float], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "time", Clock(cost))
    with Trainer(EXP) as trainer:
        assert fastest_threads(trainer.policy, trainer.sampler) == expected
        assert torch.get_num_threads() == expected


def test_asks_for_no_more_than_the_cores_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", tried.append)
    with Trainer(EXP) as trainer:
        fastest_threads(trainer.policy, trainer.sampler)
    assert set(tried) == {1, 2}


def test_touches_neither_policy_nor_environments() -> None:
    with Trainer(EXP) as trainer, Trainer(EXP) as other:
        before = {
            name: x.clone() for name, x in trainer.policy.agent.state_dict().items() if isinstance(x, torch.Tensor)
        }
        fastest_threads(trainer.policy, trainer.sampler)
        after = trainer.policy.agent.state_dict()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
        assert trainer.policy.updates == trainer.policy.version == 0
        assert trainer.policy.agent.needs_statistics
        torch.set_num_threads(1)
        a, b = trainer.sampler.obtain_samples(0)[0], other.sampler.obtain_samples(0)[0]
        assert (a.obs == b.obs).all()
        assert (a.action == b.action).all()


def test_the_answer_is_kept_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(policy: Any, sampler: Any) -> int:
        asked.append(2)
        torch.set_num_threads(2)
        return 2

    monkeypatch.setattr("penstock.run.trainer.fastest_threads", answer)
    run = tmp_path / "run"
    ps.train(replace(EXP, run=replace(EXP.run, dir=str(run))))
    assert asked == [2]
    assert load_checkpoint(find_checkpoint(run)).state["trainer"]["threads"] == 2
    torch.set_num_threads(1)
    ps.resume(run, {"run.steps": 256})
    assert asked == [2]  # bits are promised for equal thread counts, so it is not asked again
    assert torch.get_num_threads() == 2


def test_a_number_is_obeyed() -> None:
    with Trainer(replace(EXP, run=ps.RunConfig(learner_threads=2))) as trainer:
        assert torch.get_num_threads() == trainer.threads == 2
