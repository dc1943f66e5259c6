"""Does a replay that is loaded from what another one gave go on in the same bits, and is one of another shape refused?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import MultiAgentBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.tree import tree_leaves
from penstock.replay.multi_agent import MultiAgentReplay
from penstock.replay.replay import Replay, ReplaySettings, make_view
from penstock.replay.view import Sequences
from tests.params import pairs_first
from tests.replay.oracle import INFO, SPEC, STATE, Oracle, random_batches
from tests.replay.test_replay import GAMMA, Case, check_transitions

B, CAPACITY = 3, 150


def reward_fn(achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
    return -np.abs(achieved - desired).sum(-1)


def made(storage: str, index: Any, kind: str, folder: Path, capacity: int = CAPACITY) -> Replay:
    hindsight = {"hindsight": 4, "reward_fn": f"{__name__}:reward_fn"} if kind == "hindsight" else {}
    settings = ReplaySettings(capacity=capacity, index=index, deduplicate_frames="frames" in storage,
                              dir=str(folder) if "files" in storage else None, **hindsight)  # fmt: skip
    fed = frozenset(("first",)) if hindsight else frozenset(("prev_action", "prev_reward", "first"))
    view = Sequences(8, 2, 4, 2) if kind == "sequences" else make_view(settings, SPEC, 1, GAMMA, fed=fed)
    return Replay(SPEC, settings, view, info=("['q']",), state=STATE if kind == "sequences" else None)


def drawn(replay: Replay, seed: int, n: int = 8) -> list[np.ndarray]:
    """All arrays of n samples, some of whose priorities change."""
    rng = np.random.default_rng(seed)
    drawing, shown = replay.sample(n, rng)
    replay.update_priorities(drawing, rng.random(n) * 3)
    return [*(x for x in drawing if x is not None), *tree_leaves(shown)]


def assert_equal(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    assert len(left) == len(right)
    for x, y in zip(left, right):
        np.testing.assert_array_equal(x, y)


def saved(replay: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """State and arrays, in memory of their own."""
    return copy.deepcopy(replay.state_dict()), {name: x.copy() for name, x in replay.arrays().items()}


@pytest.mark.parametrize(
    ("storage", "index", "kind"),
    pairs_first(
        *({name: name for name in names} for names in (
            ("ring", "frames", "files", "frames in files"), ("uniform", "prioritized", "fifo"),
            ("transitions", "sequences", "hindsight"),
        ))
    ),
)  # fmt: skip
@pytest.mark.parametrize("before", [5, 21])
def test_a_loaded_replay_goes_on_in_the_same_bits(storage: str, index: str, kind: str, before: int, tmp_path: Path):
    """Before the ring comes round, and after it."""
    replay, other = (made(storage, index, kind, tmp_path) for _ in range(2))
    batches = [batch for batch, _ in random_batches(3, 4, B, before + 6, gaps=0.15)]
    for batch in batches[:before]:
        replay.append(batch.copy())
    drawn(replay, 0, 2)
    state, arrays = saved(replay)
    other.prepare(4, B, {"q": INFO["q"]})
    other.load_state_dict(state, arrays)
    assert (other.appended, len(other)) == (replay.appended, len(replay))
    for k, batch in enumerate(batches[before:]):
        assert_equal(drawn(replay, k, 2), drawn(other, k, 2))
        for each in (replay, other):
            each.append(batch.copy())
    for left, right in zip(saved(replay), saved(other)):
        assert_equal(tree_leaves(left), tree_leaves(right))


def test_the_padding_of_frames_is_not_forgotten(tmp_path: Path):
    """Whether stacks are padded with zeros is learned from the first episodes, whose rows may be gone by now."""
    replay, other = (made("frames", "uniform", "transitions", tmp_path) for _ in range(2))
    for batch, _ in random_batches(4, 4, B, 10, zeros=True):
        replay.append(batch)
    other.prepare(4, B, {"q": INFO["q"]})
    other.load_state_dict(*saved(replay))
    assert_equal(drawn(replay, 0, 200), drawn(other, 0, 200))


def test_another_shape_or_index_is_refused_and_says_what_to_change(tmp_path: Path):
    replay = made("ring", "uniform", "transitions", tmp_path)
    with pytest.raises(ConfigError, match="append a batch first"):
        replay.draw(1, np.random.default_rng(0))
    empty = replay.state_dict()
    for batch, _ in random_batches(3, 4, B, 3):
        replay.append(batch)
    state, arrays = saved(replay)
    others = [
        (made("ring", "uniform", "transitions", tmp_path, 300), r"50 rows of 3 slots; this one has 100 of 3: resume with"),
        (made("ring", "fifo", "transitions", tmp_path), r"index='uniform'; this one has 'fifo'"),
        (made("frames", "uniform", "transitions", tmp_path), r"has uint8\[13, 3, 3, 2, 2\] as obs\['image'\]; this one keeps "),
        (made("ring", "uniform", "hindsight", tmp_path), r"has nothing as stretch; this one keeps int64\[51, 3\]"),
    ]  # fmt: skip
    for other, message in others:
        other.prepare(4, B, {"q": INFO["q"]})
        other.load_state_dict(empty, {})
        with pytest.raises(CheckpointError, match=message):
            other.load_state_dict(state, arrays)
        assert len(other) == 0  # as it was
    fewer = {name: x for name, x in arrays.items() if name != "index.usable"}
    again = made("ring", "uniform", "transitions", tmp_path)
    again.prepare(4, B, {"q": INFO["q"]})
    with pytest.raises(CheckpointError, match=r"has nothing as index.usable; this one keeps bool\[51, 3\]"):
        again.load_state_dict(state, fewer)


def multi(tmp_path: Path) -> MultiAgentReplay:
    return MultiAgentReplay(
        {name: made("ring", "prioritized", "transitions", tmp_path) for name in ("red", "blue", "rare")}
    )


def test_every_policy_keeps_and_draws_its_own_rows(tmp_path: Path):
    """Columns of two policies, with other numbers of slots; the third has none yet."""
    replay = multi(tmp_path)
    oracles = {name: Oracle(replay.replays[name]) for name in ("red", "blue")}
    streams = {"red": random_batches(1, 4, 3, 20, gaps=0.2), "blue": random_batches(2, 4, 1, 20)}
    for (red, red_on), (blue, blue_on) in zip(*streams.values()):
        before = {name: oracle.written for name, oracle in oracles.items()}
        replay.append(MultiAgentBatch({"red": red, "blue": blue}, red.env_steps))
        oracles["red"].note(red, before["red"], red_on)
        oracles["blue"].note(blue, before["blue"], blue_on)
    rng = np.random.default_rng(0)
    for oracle in oracles.values():
        assert check_transitions(oracle, Case(1), rng, 160) <= oracle.transitions(1)
    samples = replay.sample(8, rng)
    assert samples.keys() == {"red", "blue"}
    mass = {name: replay.replays[name].arrays()["index.mass"].copy() for name in samples}
    replay.update_priorities({"blue": samples["blue"][0]}, {"blue": np.full(8, 100.0)})
    after = {name: replay.replays[name].arrays()["index.mass"] for name in samples}
    assert (after["red"] == mass["red"]).all() and after["blue"].max() > 10 > mass["blue"].max()
    assert [line.split(": replay of")[0] for line in replay.describe().splitlines()] == ["red", "blue", "rare"]
    with pytest.raises(ConfigError, match=r"policies \['green'\] and replays of \['blue', 'rare', 'red'\]"):
        replay.append(MultiAgentBatch({"green": red}, 0))


def test_replays_of_several_policies_are_loaded_each_from_its_own(tmp_path: Path):
    replay, other = multi(tmp_path), multi(tmp_path)
    for (red, _), (blue, _) in zip(random_batches(1, 4, 3, 9), random_batches(2, 4, 3, 9)):
        replay.append(MultiAgentBatch({"red": red, "blue": blue}, red.env_steps))
    for name in ("red", "blue", "rare"):
        other.replays[name].prepare(4, B, {"q": INFO["q"]})
    other.load_state_dict(*saved(replay))
    for name in ("red", "blue"):
        assert_equal(drawn(replay.replays[name], 5), drawn(other.replays[name], 5))
    assert len(other.replays["rare"]) == 0
    with pytest.raises(CheckpointError, match=r"policies \['red'\]; this run has \['blue', 'rare', 'red'\]"):
        other.load_state_dict({"red": replay.replays["red"].state_dict()}, {})


@pytest.mark.parametrize("storage", ["ring", "frames"])
@pytest.mark.parametrize("index", ["uniform", "prioritized", "fifo"])
def test_a_copy_goes_on_as_the_original(storage: str, index: str, tmp_path: Path) -> None:
    """Arrays that are views of one another stay so: what is appended to the copy is what it draws."""
    replay = made(storage, index, "transitions", tmp_path)
    batches = [batch for batch, _ in random_batches(1, 4, B, 12, "next_step", 0.2, False)]
    for batch in batches[:6]:
        replay.append(batch)
    copied = copy.deepcopy(replay)
    for k, batch in enumerate(batches[6:]):
        replay.append(batch)
        expected = drawn(replay, k, 2)
        if k == 3 and index != "fifo":
            assert not all(np.array_equal(x, y) for x, y in zip(drawn(copy.deepcopy(copied), k, 2), expected))
        copied.append(batch)
        assert all(np.array_equal(x, y) for x, y in zip(drawn(copied, k, 2), expected, strict=True))


def test_a_copy_of_rows_in_files_lies_in_memory(tmp_path: Path) -> None:
    replay = made("files", "uniform", "transitions", tmp_path)
    replay.append(next(batch for batch, _ in random_batches(1, 4, B, 1, "next_step", 0.2, False)))
    copied = copy.deepcopy(replay)
    assert (replay.settings.dir, copied.settings.dir) == (str(tmp_path), None)
    assert all(np.array_equal(x, y) for x, y in zip(drawn(replay, 0, 2), drawn(copied, 0, 2), strict=True))
