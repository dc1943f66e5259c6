"""How often training from replay takes a gradient step: exactly as often as the ratio says, whatever the shapes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.envs.toy import RepeatPrevious
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import ReplaySchedule
from tests.learn.small_dqn import CFG, UNIFORM, built


class Counted:
    """A replay that only says how many samples it holds."""

    def __init__(self, index: str = "uniform", capacity: int = 10**6) -> None:
        self.settings = SimpleNamespace(index=index, capacity=capacity, dataset="")
        self.held, self.view = 0, None

    def __len__(self) -> int:
        return self.held


RATIOS = [(1, 10), (1, 3), (1, 1), (3, 2), (8, 1), (7, 3), (256, 1), (37, 100)]


@pytest.mark.parametrize("ratio", RATIOS, ids=lambda r: f"{r[0]}:{r[1]}")
def test_the_ratio_is_exact_whatever_the_shapes(ratio: tuple[int, int]) -> None:
    """After every batch the gradient steps are floor(ratio * rows / size), counted from the start, in whole numbers."""
    exact, rng = Fraction(*ratio), np.random.default_rng(ratio[0])
    for T, B, batch, rows, starts in itertools.product((1, 5, 128), (1, 3, 16), (1, 32, 256), (1, 80), (0, 7, 1_000)):
        replay: Any = Counted()
        own = ReplaySchedule(replay, batch, float(exact), starts, sample_rows=rows)
        for _ in range(40):
            own.collected += int(rng.integers(T * B // 2, T * B + 1))  # some rows are no steps
            replay.held = max(0, own.collected - 3)
            own.trained += own.due()
            counted = max(0, own.collected - starts)
            expected = math.floor(counted * exact / (batch * rows))
            assert own.trained == expected or (own.trained == 0 and not replay.held)
            if counted:
                assert own.metrics()["replay/ratio"] == pytest.approx(own.trained * batch * rows / counted)


@pytest.mark.parametrize(("T", "B", "batch", "ratio", "starts", "n"), [
    (1, 1, 4, 4.0, 5, 1), (4, 4, 8, 4.0, 20, 1), (3, 5, 7, 2.5, 0, 3), (8, 2, 32, 0.5, 16, 1), (2, 3, 4, 12.0, 1, 5),
])  # fmt: skip
def test_a_policy_takes_the_steps_that_are_due(T: int, B: int, batch: int, ratio: float, starts: int, n: int) -> None:
    """Only valid rows count, of an environment that resets every fourth row."""
    cfg = replace(CFG, batch_size=batch, replay_ratio=ratio, learning_starts=starts, n_step=n)
    policy, sampler, own = built(cfg, T=T, B=B)
    rows = 0
    for itr in range(16):
        batch_ = sampler.obtain_samples(itr)[0]
        rows += int(batch_.valid.sum())
        results = train_one_step(policy, batch_)
        due = math.floor(max(0, rows - starts) * Fraction(ratio) / batch)
        assert own.collected == rows and policy.updates == own.trained == (due if len(own.replay) else 0)
        assert results["replay/size"] == len(own.replay) and results["train/n_updates"] == policy.updates
    assert rows < 16 * T * B and policy.updates > 0


def test_what_cannot_be_drawn_yet_stays_due() -> None:
    policy, sampler, own = built(replace(CFG, batch_size=2, replay_ratio=2.0, learning_starts=0, n_step=6), RepeatPrevious,
                                 T=2, B=1)  # fmt: skip
    seen = []
    for itr in range(5):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
        seen.append((len(own.replay), policy.updates))
    assert seen == [(0, 0), (0, 0), (1, 6), (3, 8), (5, 10)]


def test_a_queue_gives_each_sample_once() -> None:
    cfg = replace(CFG, replay=replace(UNIFORM, index="fifo"), replay_ratio=1.0, learning_starts=0, batch_size=4)
    policy, sampler, own = built(cfg, RepeatPrevious)
    drawn: list[tuple[int, int]] = []
    inner = own.replay.draw

    def watch(*args: Any) -> Any:
        drawing = inner(*args)
        drawn.extend(zip(drawing.unit.tolist(), drawing.slot.tolist()))
        return drawing

    own.replay.draw = watch
    for itr in range(8):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert len(drawn) == len(set(drawn)) == own.trained * 4 >= own.collected - 4
    assert drawn == sorted(drawn)
    with pytest.raises(ConfigError, match=r"replay_ratio=4\.0 with replay\.index='fifo'"):
        built(replace(cfg, replay_ratio=4.0))


def test_it_says_how_often_it_trains() -> None:
    for ratio, words in (
        (4.0, "one update of 8 every 2 steps after the first 20"),
        (32.0, "4 updates of 8 every step"),
    ):
        policy, sampler, own = built(replace(CFG, replay_ratio=ratio))
        policy.prepare(sampler.batch_spec)
        assert words in own.describe() and "400 rows" in own.describe()


def test_counters_are_stored() -> None:
    policy, sampler, own = built(CFG)
    for itr in range(4):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    state, (other, _, held) = own.state_dict(), built(CFG)
    other.prepare(sampler.batch_spec)
    held.load_state_dict(state, own.replay.arrays())
    assert (held.collected, held.trained, len(held.replay)) == (own.collected, own.trained, len(own.replay))
    assert held.due() == own.due() == 0


@pytest.mark.parametrize("ratio", [1.0, 32.0])
def test_another_ratio_holds_from_where_it_is_loaded(ratio: float) -> None:
    """Neither is all that was collected trained on anew, nor does training wait until the new ratio is true of all."""
    policy, sampler, own = built(CFG)
    for itr in range(6):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    other, _, held = built(replace(CFG, replay_ratio=ratio))
    other.prepare(sampler.batch_spec)
    held.load_state_dict(own.state_dict(), own.replay.arrays())
    assert held.due() == 0
    before, start = held.trained, held.collected
    for itr in range(6, 10):
        train_one_step(other, sampler.obtain_samples(itr)[0])
    assert abs((held.trained - before) * 8 - ratio * (held.collected - start)) < 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 500}, ["replay.capacity=400", "batch_size=500", "replay.capacity >= 500"]),
        ({"learning_starts": 401}, ["replay.capacity=400", "learning_starts=401"]),
        ({"replay_ratio": 0.0}, ["replay_ratio=0.0", "more than 0"]),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"learning_starts": -1}, ["learning_starts=-1"]),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        built(replace(CFG, **changes))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("numbers", [(0, 1.0, 0), (4, 0.0, 0), (4, 1.0, -1)])
def test_numbers_that_make_no_schedule_are_refused(numbers: tuple[int, float, int]) -> None:
    """Settings of a user's own need not check theirs."""
    replay: Any = Counted()
    with pytest.raises(ConfigError, match="expected positive numbers"):
        ReplaySchedule(replay, *numbers)
