"""Every storage x index x view against loops over the batches that were appended."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.core.batch import SampleBatch, as_arrays
from penstock.core.tree import tree_leaves
from penstock.learn.rows.torch_memory import TorchMemory
from penstock.replay.replay import Replay, ReplaySettings, make_view
from penstock.replay.view import Sequences
from tests.params import pairs_first
from tests.replay.oracle import SPEC, STACK, STATE, Oracle, assert_same, random_batches

T, B, ROWS, GAMMA = 4, 3, 40, 0.9
STORAGES = {
    f"{storage}-{reset}": (storage, reset)
    for storage, resets in (
        ("ring", ("next_step", "batch_end")), ("frames", ("next_step", "batch_end")), ("files", ("next_step",)),
        ("frames in files", ("batch_end",)), ("device", ("next_step", "batch_end")),
    )
    for reset in resets
}  # fmt: skip
INDEXES = {name: name for name in ("uniform", "prioritized", "fifo")}


@functools.cache
def recorded(*args: Any) -> list[tuple[SampleBatch, bool]]:
    """What `random_batches` gives."""
    return [*random_batches(*args)]


def settings_of(storage: str, index: Any, tmp_path: Path, slots: int = B, **others: Any) -> ReplaySettings:
    folder = str(tmp_path) if "files" in storage else None
    return ReplaySettings(
        capacity=ROWS * slots,
        index=index,
        deduplicate_frames="frames" in storage,
        dir=folder,
        device="learner" if storage == "device" else "cpu",
        **others,
    )


def draws(replay: Replay, rng: np.random.Generator, n: int) -> Any:
    """Samples until all is drawn, if each comes once; else n, after which some priorities change."""
    if replay.settings.index == "fifo":
        left = len(replay)
        while left:
            drawing = replay.draw(min(7, left), rng)
            left -= len(drawing.unit)
            assert len(replay) == left
            yield drawing, as_arrays(replay.read(drawing))
        return
    if not len(replay):
        return
    for _ in range(n // 16):
        drawing = replay.draw(16, rng)
        yield drawing, as_arrays(replay.read(drawing))
        replay.update_priorities(drawing, rng.random(16) * 3)


def reward_fn(achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
    reward = -np.abs(achieved - desired).sum(-1)
    return reward, reward == 0


def check_transitions(oracle: Oracle, case: Case, rng: np.random.Generator, count: int) -> set[Any]:
    """Checks every field of `count` samples; gives the rows drawn."""
    seen: set[Any] = set()
    share = case.hindsight / (case.hindsight + 1)
    for drawing, shown in draws(oracle.replay, rng, count):
        at = list(zip(drawing.slot.tolist(), drawing.unit.tolist()))
        seen.update(at)
        totals, discounts, nexts = map(list, zip(*(oracle.transition(b, t, case.n, GAMMA, case.clip) for b, t in at)))
        inputs = [oracle.inputs(b, t) for b, t in at]
        if case.hindsight:
            for i, (b, t) in enumerate(at):
                # Leaves: achieved_goal, desired_goal, image, v, two of the action, reward, first.
                for leaves in (inputs[i], nexts[i]):
                    del leaves[6]
                if drawing.noise[i, 0] >= share:
                    continue
                goal_row = t + int(drawing.noise[i, 1] * (oracle.last(b, t) - t + 1))
                assert t <= goal_row <= oracle.last(b, t)
                inputs[i][1] = nexts[i][1] = oracle.following(b, goal_row)[0]
                total = -float(np.abs(nexts[i][0] - nexts[i][1]).sum())
                totals[i] = float(np.sign(total)) if case.clip else total
                discounts[i] = 0.0 if goal_row == t else GAMMA
        assert_same(shown.inputs, inputs)
        assert_same(shown.rows["next"], nexts)
        assert_same(shown.rows["action"], [oracle.column("action", b, t) for b, t in at])
        np.testing.assert_allclose(shown.rows["return"], totals, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(shown.rows["discount"], discounts, rtol=1e-6)
        assert shown.rows["return"].dtype == shown.rows["discount"].dtype == np.float32
    return seen


def check_sequences(oracle: Oracle, view: Sequences, rng: np.random.Generator, count: int, case: Pieces) -> set[Any]:
    """Checks every valid row of `count` samples; gives the units drawn, as (slot, first row)."""
    seen: set[Any] = set()
    for drawing, shown in draws(oracle.replay, rng, count):
        assert shown.valid is not None
        at = list(zip(drawing.slot.tolist(), (drawing.unit * view.stride).tolist()))
        seen.update(at)
        if case.stateful:
            states = [oracle.starts[t].state for _, t in at]
            assert_same(shown.state, [[state["c"][b], state["h"][b]] for state, (b, _) in zip(states, at)])
        else:
            assert shown.state is None
        assert not shown.inputs.idle.any()  # that is for turns
        shown = replace(shown, inputs=shown.inputs._replace(idle=None))
        valid = [[oracle.in_sequence(b, start, start + j) for b, start in at] for j in range(view.span)]
        np.testing.assert_array_equal(shown.valid, valid)
        steps = [(j, i) for j, i in np.argwhere(shown.valid).tolist()]
        where = tuple(np.transpose(steps))
        rows = [(at[i][0], at[i][1] + j) for j, i in steps]
        assert_same([x[where] for x in tree_leaves(shown.inputs)], [oracle.inputs(*row) for row in rows])
        after = where[0] + 1, where[1]
        assert_same([x[after] for x in tree_leaves(shown.inputs)], [oracle.following(*row) for row in rows])
        for name in ("action", "reward", "terminated", "truncated"):
            expected = [oracle.column(name, *row) for row in rows]
            if name == "reward" and case.clip:
                expected = [[np.sign(x) for x in leaves] for leaves in expected]
            assert_same([x[where] for x in tree_leaves(shown.rows[name])], expected)
    return seen


class Case(NamedTuple):
    """One kind of transitions, and the batches that they are drawn from."""

    n: int
    T: int | tuple[int, ...] = 4
    B: int = 3
    hindsight: int = 0
    lives: bool = False
    """Some rows count as terminal though the episode goes on."""
    acted_next: bool = False
    clip: bool = False


CASES = {
    "one step": Case(1),
    "one slot": Case(2, (5, 1, 3), 1),
    "lives": Case(3, B=2, lives=True),
    "signs": Case(4, 7, 5, clip=True),
    "values at the end": Case(5, (2, 9), acted_next=True),
    "hindsight": Case(1, hindsight=4),
    "hindsight, lives": Case(1, (3, 6), 2, hindsight=1, lives=True, clip=True),
}


@pytest.mark.parametrize(
    ("case", "stored", "index"),
    [x for x in pairs_first(CASES, STORAGES, INDEXES) if not re.match("hindsight.*device", str(x.id))],  # refused
)
def test_transitions_are_those_of_the_record(case: Case, stored: tuple[str, str], index: str, tmp_path: Path):
    storage, reset = stored
    n, B, hindsight = case.n, case.B, case.hindsight
    reward = f"{__name__}:reward_fn" if hindsight else ""
    settings = settings_of(storage, index, tmp_path, B, hindsight=hindsight, reward_fn=reward)
    fed = frozenset(("prev_action", "first")) if hindsight else frozenset(("prev_action", "prev_reward", "first"))
    view = make_view(settings, SPEC, n, GAMMA, case.clip, fed, case.acted_next)
    replay, rng = Replay(SPEC, settings, view), np.random.default_rng(n)
    replay.device_memory = TorchMemory(torch.device("cpu"))
    oracle = Oracle(replay, STACK - 1 if "frames" in storage else 0)
    known: set[Any] = set()
    for k, (batch, goes_on) in enumerate(recorded(n, case.T, B, 18, reset, 0.2, n == 3)):
        lost = batch.terminated | (batch.valid & (rng.random(batch.valid.shape) < 0.15)) if case.lives else None
        oracle.append(batch.copy(), goes_on, lost)
        drawable = oracle.transitions(n + case.acted_next)
        if index == "fifo":
            drawable, known = drawable - known, known | drawable
        assert len(replay) == len(drawable)
        if k % 3 == 2:
            seen = check_transitions(oracle, case, rng, 32)
            assert seen <= drawable
            assert seen == drawable or index != "fifo"
        elif index == "fifo":
            known -= drawable
    if index != "fifo":
        drawn = [replay.draw(256, rng) for _ in range(16)]
        assert {at for d in drawn for at in zip(d.slot.tolist(), d.unit.tolist())} == drawable


class Pieces(NamedTuple):
    """One kind of sequences, and the batches that they are drawn from."""

    every: int
    burn_in: int
    train: int
    n: int
    T: int | tuple[int, ...] = 4
    B: int = 3
    stateful: bool = True
    clip: bool = False


STRETCHES = {
    "apart": Pieces(8, 0, 5, 1),
    "uneven": Pieces(8, 1, 4, 2, (4, 8, 4)),
    "overlapping": Pieces(4, 4, 8, 3),
    "burn-in": Pieces(12, 5, 3, 1, 6, 2),
    "every row": Pieces(1, 2, 2, 2, 1, 1, clip=True),
    "stateless": Pieces(3, 2, 6, 2, (5, 1, 4), 2, stateful=False),
    "stateless, long tail": Pieces(8, 0, 4, 5, (4, 2), 5, stateful=False),
}


ON_HOST = {name: stored for name, stored in STORAGES.items() if stored[0] != "device"}


@pytest.mark.parametrize(("case", "stored", "index"), pairs_first(STRETCHES, ON_HOST, INDEXES))
def test_sequences_are_those_of_the_record(case: Pieces, stored: tuple[str, str], index: str, tmp_path: Path):
    storage, reset = stored
    every, burn_in, train, n, B = case.every, case.burn_in, case.train, case.n, case.B
    view = Sequences(every, burn_in, train, n, case.clip)
    settings = settings_of(storage, index, tmp_path, B)
    state = {"c": STATE["c"], "h": STATE["h"]} if case.stateful else None
    replay, rng = Replay(SPEC, settings, view, state=state), np.random.default_rng(every)
    oracle = Oracle(replay, STACK - 1 if "frames" in storage else 0)
    known: set[Any] = set()
    for k, (batch, goes_on) in enumerate(recorded(every, case.T, B, 32, reset, 0.15)):
        oracle.append(batch.copy(), goes_on)
        assert not oracle.apart or max(oracle.apart) % every == 0  # else no state after a gap would be kept
        drawable = oracle.sequences(every, burn_in, train, n, case.stateful)
        if index == "fifo":
            drawable, known = drawable - known, known | drawable
        assert len(replay) == len(drawable)
        if k % 4 == 3:
            seen = check_sequences(oracle, view, rng, 16, case)
            assert seen <= drawable
            assert seen == drawable or index != "fifo"
        elif index == "fifo":
            known -= drawable
    if index != "fifo":
        drawn = replay.draw(1000, rng)
        assert set(zip(drawn.slot.tolist(), (drawn.unit * every).tolist())) == drawable
