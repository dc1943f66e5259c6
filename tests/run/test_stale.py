"""Samplers whose batches are of an earlier policy, or of one runner at a time, and the algorithms that take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import penstock as ps
from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class Fragments(ps.PPO):
    takes_fragments: ClassVar[bool] = True


@dataclass(frozen=True)
class FragmentsOfReplay(ps.DQN):
    takes_fragments: ClassVar[bool] = True


SCALED = ps.Net(normalize_reward=True)


def runners(**kwargs: Any) -> ps.RunnerSampler:
    return ps.RunnerSampler(2, ps.SerialSampler(8, 2), "in-process", **kwargs)


def trainer(algo: Any, sampler: Any) -> ps.Trainer:
    return ps.Trainer(ps.Experiment("CartPole-v1", algo, sampler))


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        (ps.PPO(), r"'ready'.*PPO needs the same slots in every batch.*use mode='rounds', or IMPALA or APPO$"),
        (ps.DQN(), r"'ready'.*DQN needs the same slots in every batch"),
        (FragmentsOfReplay(), r"'ready'.*FragmentsOfReplay keeps a replay.*use mode='rounds'$"),
        (
            Fragments(net=SCALED),
            r"'ready'.*normalize_reward keeps a running return of each slot.*or net.normalize_reward=False$",
        ),
    ],
)
def test_ready_mode_is_refused_where_slots_must_follow_each_other(algo: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(algo, runners(mode="ready"))


@pytest.mark.parametrize("depth", [0, 2])
def test_ready_mode_is_taken_by_what_takes_fragments(depth: int) -> None:
    with trainer(Fragments(epochs=1), runners(mode="ready", depth=depth)) as made:
        metrics = made.train()
        assert metrics["time/total_timesteps"] == 16  # one runner's fragment
        assert made.policy.version == 1


@pytest.mark.parametrize("algo", [ps.DQN(), ps.PPO(net=SCALED)])
def test_rounds_are_taken_by_all(algo: Any) -> None:
    with trainer(algo, runners()) as made:
        assert made.train()["time/total_timesteps"] == 32


def test_rounds_ahead_are_refused_where_batches_must_be_of_the_present_policy() -> None:
    with pytest.raises(ConfigError, match=r"depth=1 .*and A2C learns only from.*use depth=0"):
        trainer(ps.A2C(), runners(depth=1))
    with trainer(ps.A2C(), runners()) as made:
        assert made.train()["time/total_timesteps"] == 32


def test_the_discount_of_the_algorithm_reaches_the_runners() -> None:
    algo = ps.PPO(discount=0.5)
    with trainer(algo, runners()) as made:
        assert made.plan.sampler.inner.discount == 0.5
        made.train()
        while not len(made.episodes):
            made.train()
        length = made.episodes.length[0]
        assert made.episodes.discounted_return[0] == pytest.approx((1 - 0.5**length) / 0.5, rel=1e-5)
