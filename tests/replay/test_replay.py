"""Every storage x index x view against loops over the batches that were appended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.tree import tree_leaves
from penstock.replay.replay import Replay, ReplaySettings, make_view
from penstock.replay.view import Sequences
from tests.replay.oracle import SPEC, STACK, STATE, Oracle, assert_same, random_batches

T, B, ROWS, GAMMA = 4, 3, 40, 0.9
each_storage = pytest.mark.parametrize("storage", ["ring", "frames", "files", "frames in files"])
each_index = pytest.mark.parametrize("index", ["uniform", "prioritized", "fifo"])
each_reset = pytest.mark.parametrize("reset", ["next_step", "batch_end"])


def settings_of(storage: str, index: Any, tmp_path: Path, **others: Any) -> ReplaySettings:
    folder = str(tmp_path) if "files" in storage else None
    return ReplaySettings(capacity=ROWS * B, index=index, deduplicate_frames="frames" in storage, dir=folder, **others)


def draws(replay: Replay, rng: np.random.Generator, n: int) -> Any:
    """Samples until all is drawn, if each comes once; else n, after which some priorities change."""
    if replay.settings.index == "fifo":
        left = len(replay)
        while left:
            drawing = replay.draw(min(7, left), rng)
            left -= len(drawing.unit)
            assert len(replay) == left
            yield drawing, replay.read(drawing)
        return
    if not len(replay):
        return
    for _ in range(n // 16):
        drawing = replay.draw(16, rng)
        yield drawing, replay.read(drawing)
        replay.update_priorities(drawing, rng.random(16) * 3)


def reward_fn(achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
    reward = -np.abs(achieved - desired).sum(-1)
    return reward, reward == 0


def check_transitions(
    oracle: Oracle, n: int, rng: np.random.Generator, count: int, hindsight: bool = False
) -> set[Any]:
    """Checks every field of `count` samples; gives the rows drawn."""
    seen: set[Any] = set()
    for drawing, shown in draws(oracle.replay, rng, count):
        at = list(zip(drawing.slot.tolist(), drawing.unit.tolist()))
        seen.update(at)
        totals, discounts, nexts = map(list, zip(*(oracle.transition(b, t, n, GAMMA) for b, t in at)))
        inputs = [oracle.inputs(b, t) for b, t in at]
        if hindsight:
            for i, (b, t) in enumerate(at):
                # Leaves: achieved_goal, desired_goal, image, v, two of the action, reward, first.
                for leaves in (inputs[i], nexts[i]):
                    del leaves[6]
                if drawing.noise[i, 0] >= 0.8:
                    continue
                goal_row = t + int(drawing.noise[i, 1] * (oracle.last(b, t) - t + 1))
                assert t <= goal_row <= oracle.last(b, t)
                inputs[i][1] = nexts[i][1] = oracle.following(b, goal_row)[0]
                totals[i] = -float(np.abs(nexts[i][0] - nexts[i][1]).sum())
                discounts[i] = 0.0 if goal_row == t else GAMMA
        assert_same(shown.inputs, inputs)
        assert_same(shown.rows["next"], nexts)
        assert_same(shown.rows["action"], [oracle.column("action", b, t) for b, t in at])
        np.testing.assert_allclose(shown.rows["return"], totals, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(shown.rows["discount"], discounts, rtol=1e-6)
        assert shown.rows["return"].dtype == shown.rows["discount"].dtype == np.float32
    return seen


def check_sequences(oracle: Oracle, view: Any, rng: np.random.Generator, count: int) -> set[Any]:
    """Checks every valid row of `count` samples; gives the units drawn, as (slot, first row)."""
    seen: set[Any] = set()
    for drawing, shown in draws(oracle.replay, rng, count):
        assert shown.valid is not None
        at = list(zip(drawing.slot.tolist(), (drawing.unit * view.stride).tolist()))
        seen.update(at)
        states = [oracle.starts[t].state for _, t in at]
        assert_same(shown.state, [[state["c"][b], state["h"][b]] for state, (b, _) in zip(states, at)])
        valid = [[oracle.in_sequence(b, start, start + j) for b, start in at] for j in range(view.span)]
        np.testing.assert_array_equal(shown.valid, valid)
        steps = [(j, i) for j, i in np.argwhere(shown.valid).tolist()]
        where = tuple(np.transpose(steps))
        rows = [(at[i][0], at[i][1] + j) for j, i in steps]
        assert_same([x[where] for x in tree_leaves(shown.inputs)], [oracle.inputs(*row) for row in rows])
        after = where[0] + 1, where[1]
        assert_same([x[after] for x in tree_leaves(shown.inputs)], [oracle.following(*row) for row in rows])
        for name in ("action", "reward", "terminated", "truncated"):
            assert_same([x[where] for x in tree_leaves(shown.rows[name])], [oracle.column(name, *row) for row in rows])
    return seen


@each_storage
@each_index
@each_reset
@pytest.mark.parametrize(("n", "hindsight"), [(1, 0), (3, 0), (5, 0), (1, 4)])
def test_transitions_are_those_of_the_record(
    storage: str, index: str, reset: str, n: int, hindsight: int, tmp_path: Path
):
    settings = settings_of(
        storage, index, tmp_path, hindsight=hindsight, reward_fn=f"{__name__}:reward_fn" if hindsight else ""
    )
    fed = frozenset(("prev_action", "first")) if hindsight else frozenset(("prev_action", "prev_reward", "first"))
    view = make_view(settings, SPEC, n, GAMMA, fed=fed)
    replay, rng = Replay(SPEC, settings, view), np.random.default_rng(n)
    oracle = Oracle(replay, STACK - 1 if "frames" in storage else 0)
    known: set[Any] = set()
    for k, (batch, goes_on) in enumerate(random_batches(n, T, B, 18, reset, gaps=0.2, zeros=n == 3)):
        oracle.append(batch, goes_on)
        drawable = oracle.transitions(n)
        if index == "fifo":
            drawable, known = drawable - known, known | drawable
        assert len(replay) == len(drawable)
        if k % 3 == 2:
            seen = check_transitions(oracle, n, rng, 32, bool(hindsight))
            assert seen <= drawable
            assert seen == drawable or index != "fifo"
        elif index == "fifo":
            known -= drawable
    if index != "fifo":
        drawn = [replay.draw(256, rng) for _ in range(16)]
        assert {at for d in drawn for at in zip(d.slot.tolist(), d.unit.tolist())} == oracle.transitions(n)


SEQUENCES = [(8, 0, 5, 1), (4, 4, 8, 3), (12, 5, 3, 1)]


@each_storage
@each_index
@each_reset
@pytest.mark.parametrize(("every", "burn_in", "train", "n"), SEQUENCES)
def test_sequences_are_those_of_the_record(
    storage: str, index: str, reset: str, every: int, burn_in: int, train: int, n: int, tmp_path: Path
):
    view = Sequences(every, burn_in, train, n)
    settings = settings_of(storage, index, tmp_path)
    state = {"c": STATE["c"], "h": STATE["h"]}
    replay, rng = Replay(SPEC, settings, view, state=state), np.random.default_rng(every)
    oracle = Oracle(replay, STACK - 1 if "frames" in storage else 0)
    known: set[Any] = set()
    for k, (batch, goes_on) in enumerate(random_batches(every, T, B, 24, reset, gaps=0.15)):
        oracle.append(batch, goes_on)
        drawable = oracle.sequences(every, burn_in, train, n)
        if index == "fifo":
            drawable, known = drawable - known, known | drawable
        assert len(replay) == len(drawable)
        if k % 4 == 3:
            seen = check_sequences(oracle, view, rng, 16)
            assert seen <= drawable
            assert seen == drawable or index != "fifo"
        elif index == "fifo":
            known -= drawable
    if index != "fifo" and len(replay):
        drawn = replay.draw(1000, rng)
        assert set(zip(drawn.slot.tolist(), (drawn.unit * every).tolist())) == oracle.sequences(
            every, burn_in, train, n
        )
