"""Are units drawn with the chances, the weights and in the order that their index promises?"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.replay.columns import Array, Rows
from penstock.replay.index import FifoIndex, PrioritizedIndex, UniformIndex
from penstock.replay.replay import Replay, ReplaySettings, SampledUnits
from penstock.replay.storage import Storage
from penstock.replay.view import Transitions
from tests.replay.oracle import SPEC, random_batches

UNITS, B = 7, 3
MISFIT = 31.26
"""What chi-square of 11 degrees of freedom, those of `wrapped`, exceeds once in a thousand times."""


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def chances(index: Any, rounds: int, n: int, seed: int = 0) -> dict[tuple[int, int], int]:
    """How often each (unit, slot) was drawn."""
    rng, seen = rng_of(seed), dict[tuple[int, int], int]()
    for _ in range(rounds):
        for at in pairs(index.draw(n, rng)):
            seen[at] = seen.get(at, 0) + 1
    return seen


def pairs(drawn: Any) -> list[tuple[int, int]]:
    """(unit, slot) of each."""
    return [*zip(drawn.unit.tolist(), drawn.slot.tolist())]


def misfit(seen: dict[tuple[int, int], int], expected: dict[tuple[int, int], float]) -> float:
    """The chi-square statistic of counts against chances; nothing else may have been drawn."""
    assert seen.keys() <= expected.keys()
    total, mass = sum(seen.values()), sum(expected.values())
    return sum((seen.get(at, 0) - total * p / mass) ** 2 / (total * p / mass) for at, p in expected.items())


def wrapped(index: Any) -> dict[tuple[int, int], bool]:
    """Adds 4 + 5 + 2 units to a ring of 7, some of them not usable, and drops one more; gives those that are left."""
    usable = rng_of(5).random((11, B)) < 0.7
    for part in (slice(0, 4), slice(4, 9), slice(9, 11)):
        index.extend(usable[part])
    index.drop(5)
    return {(t, b): True for t in range(5, 11) for b in range(B) if usable[t, b]}


def test_what_is_refused_is_drawn_again_and_nothing_else() -> None:
    """Word for word as the generator gives them: units stay where they were drawn, whatever is drawn again."""
    index = UniformIndex(UNITS, B)
    left = wrapped(index)
    for seed in range(20):
        drawn, rng = rng_of(seed).integers(5 * B, 11 * B, 40), rng_of(seed)
        rng.integers(5 * B, 11 * B, 40)
        while len(wrong := [i for i, x in enumerate(drawn) if divmod(x, B) not in left]):
            drawn[wrong] = rng.integers(5 * B, 11 * B, len(wrong))
        assert pairs(index.draw(40, rng_of(seed))) == [divmod(x, B) for x in drawn.tolist()]


def test_uniform_draws_are_uniform_over_what_is_usable() -> None:
    index = UniformIndex(UNITS, B)
    left = wrapped(index)
    assert len(index) == len(left) == 12
    seen = chances(index, 500, 20)
    assert misfit(seen, dict.fromkeys(left, 1.0)) < MISFIT


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_prioritized_draws_follow_the_power_of_the_priorities(alpha: float) -> None:
    index = PrioritizedIndex(UNITS, B, alpha, epsilon=0.5)
    left = sorted(wrapped(index))
    unit, slot = np.array(left).T
    priority = np.where(rng_of(1).random(len(left)) < 0.3, -1.0, 1.0) * rng_of(2).exponential(1.0, len(left))
    index.update(unit, slot, priority)
    mass = {at: (abs(p) + 0.5) ** alpha for at, p in zip(left, priority.tolist())}
    assert misfit(chances(index, 2_000, 5), mass) < MISFIT
    drawn = index.draw(200, rng_of(3))
    expected = [mass[at] / sum(mass.values()) for at in pairs(drawn)]
    assert drawn.probability is not None
    np.testing.assert_allclose(drawn.probability, expected, rtol=1e-12)


def test_one_draw_falls_into_each_stratum_and_varies_there() -> None:
    """8 equal units, 4 strata: one of each pair of neighbours, either of them about half of the time."""
    index = PrioritizedIndex(8, 1, 1.0)
    index.extend(np.ones((8, 1), bool))
    drawn = np.array([index.draw(4, rng).unit for rng in map(rng_of, range(400))])
    np.testing.assert_array_equal(drawn // 2, np.tile(np.arange(4), (400, 1)))
    odd = (drawn % 2).mean(0)
    assert ((odd > 0.4) & (odd < 0.6)).all()


def test_fresh_units_have_the_largest_priority_so_far() -> None:
    """By hand, alpha 1 and epsilon 0: 1 before any is known; then 5, also once that unit has a smaller one or is gone."""
    index = PrioritizedIndex(4, 2, 1.0, epsilon=0.0)
    index.extend(np.array([[True, False]]))
    assert index.draw(1, rng_of(0)).probability == 1.0
    index.update(np.array([0]), np.array([0]), np.array([-5.0]))
    index.extend(np.array([[True, True]]))
    index.update(np.array([0, 0]), np.array([0, 0]), np.array([3.0, 2.0]))  # of equal units the last counts
    assert index.arrays()["mass"].tolist() == [[2, 0], [5, 5], [0, 0], [0, 0]]
    index.extend(np.ones((3, 2), bool))
    assert index.arrays()["mass"].tolist() == [[5, 5], [5, 5], [5, 5], [5, 5]] and len(index) == 8
    index.update(np.array([0, 1, 5]), np.array([0, 0, 1]), np.array([9.0, 1.0, 9.0]))  # 0 is gone, 5 is not there yet
    assert index.arrays()["mass"].tolist() == [[5, 5], [1, 5], [5, 5], [5, 5]]


def test_fresh_units_may_bring_their_priorities() -> None:
    index = PrioritizedIndex(4, 2, 0.5, epsilon=0.0)
    index.extend(np.array([[True, True], [True, False]]), np.array([[4.0, -9.0], [16.0, 1e6]]))
    np.testing.assert_allclose(index.arrays()["mass"], [[2, 3], [4, 0], [0, 0], [0, 0]])
    index.extend(np.array([[True, False]]))
    np.testing.assert_allclose(index.arrays()["mass"], [[2, 3], [4, 0], [4, 0], [0, 0]])
    assert len(index) == 4


def test_a_priority_of_zero_can_still_be_drawn() -> None:
    index = PrioritizedIndex(4, 1, 0.6)
    index.extend(np.ones((2, 1), bool), np.zeros((2, 1)))
    assert len(index) == 2 and set(index.draw(50, rng_of(0)).unit.tolist()) == {0, 1}


def test_fifo_gives_each_unit_once_in_its_order() -> None:
    index = FifoIndex(UNITS, B)
    left = sorted(wrapped(index))
    given = [at for n in (1, 4, 3) for at in pairs(index.draw(n, rng_of(0)))]
    assert given == left[:8] and len(index) == 4
    with pytest.raises(ConfigError, match=r"5 of 4 undrawn samples"):
        index.draw(5, rng_of(0))
    index.extend(np.ones((2, B), bool))
    index.drop(9)  # undrawn ones among them
    rest = [at for at in left[8:] if at[0] >= 9] + [(t, b) for t in (11, 12) for b in range(B)]
    assert 6 < len(rest) < 10
    assert pairs(index.draw(len(rest), rng_of(0))) == rest
    assert len(index) == 0


@pytest.mark.parametrize("make", [UniformIndex, FifoIndex, lambda *shape: PrioritizedIndex(*shape, 0.7)])
def test_a_loaded_index_draws_the_same_bits(make: Any) -> None:
    index, other = make(UNITS, B), make(UNITS, B)
    left = sorted(wrapped(index))
    index.draw(4, rng_of(0))
    index.update(*np.array(left[5:7]).T, np.array([30.0, 0.1]))
    other.load_state_dict(index.state_dict(), {name: x.copy() for name, x in index.arrays().items()})
    for _ in range(3):
        assert len(index) == len(other)
        drawn = index.draw(4, rng_of(1)), other.draw(4, rng_of(1))
        for x, y in zip(*drawn):
            np.testing.assert_array_equal(x, y)
        for each in (index, other):
            each.extend(np.ones((2, B), bool))
    for name, x in index.arrays().items():
        np.testing.assert_array_equal(x, other.arrays()[name])


def test_weights_are_those_of_the_paper() -> None:
    """P = .1, .2, .3, .4: with beta 1/2 the weights (1 / (N P))^beta are 1, .70711, .57735, .5 over their largest."""
    replay = Replay(SPEC, ReplaySettings(capacity=60, index="prioritized", priority_alpha=1.0, priority_beta=0.5),
                    Transitions())  # fmt: skip
    batch = next(random_batches(0, 4, 1, 1))[0]
    batch.valid[...] = True
    replay.append(batch)
    assert replay.index is not None and len(replay) == 4
    replay.index.update(np.arange(4), np.zeros(4, np.int64), np.array([1.0, 2.0, 3.0, 4.0]) - 1e-6)
    weight = dict[int, float]()
    drawing = replay.draw(40, rng_of(0))
    assert drawing.weight is not None and drawing.weight.dtype == np.float32
    for unit, w in zip(drawing.unit.tolist(), drawing.weight.tolist()):
        weight[unit] = w
    assert weight == pytest.approx({0: 1.0, 1: 0.7071068, 2: 0.5773503, 3: 0.5}, abs=1e-6)


@pytest.mark.parametrize("fresh", ["max", "agent"])
def test_fresh_rows_have_the_priorities_of_the_agent_where_that_is_asked_for(fresh: Any) -> None:
    """|q| + 2 of each row, to the power 1: what else is drawn follows. `appended` counts valid rows."""
    settings = ReplaySettings(capacity=60, index="prioritized", priority_alpha=1.0, fresh_priority=fresh)
    with pytest.raises(ConfigError, match="records no values; use 'max'") if fresh == "agent" else nullcontext():
        Replay(SPEC, settings, Transitions())

    def by_agent(storage: Storage, t: Rows) -> Array:
        rows, slots = np.broadcast_arrays(t[:, None], np.arange(B))
        return np.abs(storage.info("['q']", rows, slots)) + 2.0

    replay = Replay(SPEC, settings, Transitions(), info=("['q']",), priority_fn=by_agent)
    batches = [batch for batch, _ in random_batches(1, 4, B, 3)]
    for batch in batches:
        replay.append(batch)
    valid, q = (np.concatenate(x) for x in zip(*((batch.valid, batch.info["q"]) for batch in batches)))
    assert replay.appended == valid.sum() == len(replay) < valid.size
    mass = np.where(valid, np.abs(q.astype(np.float64)) + 2.0 + 1e-6 if fresh == "agent" else 1.0, 0.0)
    np.testing.assert_allclose(replay.arrays()["index.mass"][: len(mass)], mass)


@pytest.mark.parametrize(
    ("beta", "progress", "steps", "expected"),
    [("linear(0.5, 1.0)", 0.0, 0, 0.5), ("linear(0.5, 1.0)", 0.5, 0, 0.75), ("linear(0.5, 1.0)", 2.0, 0, 1.0),
     ("linear(0.5, 1.0, steps=100)", 0.9, 50, 0.75), ("linear(0.5, 1.0, steps=100)", 0.1, 500, 1.0)],
)  # fmt: skip
def test_beta_follows_its_schedule_over_the_run_or_in_steps(
    beta: str, progress: float, steps: int, expected: float
) -> None:
    replay = Replay(SPEC, ReplaySettings(capacity=60, index="prioritized", priority_beta=beta), Transitions())
    batch = next(random_batches(0, 4, 1, 1))[0]
    batch.valid[...] = True
    replay.append(batch)
    drawing = SampledUnits(np.array([2]), np.array([0]), None, np.zeros((1, 0)))
    replay.update_priorities(drawing, np.array([1e3]))
    assert replay.index is not None
    drawn = replay.index.draw(64, rng_of(0))
    replay.appended = steps
    weight = replay.draw(64, rng_of(0), progress).weight
    assert drawn.probability is not None and weight is not None
    np.testing.assert_allclose(weight, (drawn.probability.min() / drawn.probability) ** expected, rtol=1e-6)


def test_settings_that_no_index_can_keep_are_refused() -> None:
    for beta in ("linear(0.4, 1.5)", -0.1):
        with pytest.raises(ConfigError, match=r"^replay.priority_beta=.*; expected 0 to 1$"):
            ReplaySettings(priority_beta=beta)
    with pytest.raises(ConfigError, match=r"priority_alpha=2.0"):
        ReplaySettings(priority_alpha=2.0)
    for index in (UniformIndex(4, 1), PrioritizedIndex(4, 1, 0.5)):
        with pytest.raises(ConfigError, match="holds none yet"):
            index.draw(1, rng_of(0))
