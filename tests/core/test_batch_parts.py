from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.batch import MultiAgentBatch, SampleBatch, allocate_batch
from penstock.core.batch_parts import as_multi_agent, concat_samples, split_by_episode, timeslices, wrap_as_needed
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map

BOX = LeafSpec("box", (2,), "float32")
SPEC = EnvSpec(obs={"image": LeafSpec("box", (3, 4, 4), "uint8"), "x": BOX}, action=(LeafSpec("discrete", (), "int64",
               sizes=(3,), start=5), LeafSpec("box", (2,), "float32")))  # fmt: skip
STATE = {"h": np.zeros(3, np.float32)}


def numbered(T: int, B: int, state: bool = True, offset: int = 0) -> SampleBatch:
    """A batch in which every element of every leaf differs from its neighbours."""
    batch = allocate_batch(
        SPEC, BatchSpec(T, B), {"logp": np.float32(0)}, STATE if state else None, env_info=("score",)
    )
    for i, x in enumerate(tree_leaves(batch)):
        values = (np.arange(x.size) + 31 * i + offset).reshape(x.shape)
        x[...] = values % 2 == 0 if x.dtype == bool else values % 200
    return batch


def as_torch(batch: SampleBatch) -> SampleBatch:
    return tree_map(lambda x: torch.from_numpy(x.copy()), batch)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, MultiAgentBatch):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    x, y = tree_leaves(a), tree_leaves(b)
    return len(x) == len(y) and all(
        np.asarray(p).dtype == np.asarray(q).dtype and np.array_equal(np.asarray(p), np.asarray(q), equal_nan=True)
        if np.asarray(p).dtype.kind == "f"
        else np.array_equal(np.asarray(p), np.asarray(q))
        for p, q in zip(x, y)
    )


@pytest.mark.parametrize("convert", [lambda b: b, as_torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("state", [True, False])
def test_slots_joined_are_the_slots_cut(convert, state: bool):
    whole = convert(numbered(3, 6, state))
    parts = [whole[:, 0:1], whole[:, 1:4], whole[:, 4:6]]
    joined = concat_samples(parts)
    assert same(joined, whole)
    assert type(joined.valid) is type(whole.valid)
    joined.reward[...] = 0
    assert np.asarray(whole.reward).any()


@pytest.mark.parametrize("convert", [lambda b: b, as_torch], ids=["numpy", "torch"])
def test_times_joined_are_the_times_cut(convert):
    whole = convert(numbered(7, 2, state=False))
    assert same(concat_samples([whole[0:1], whole[1:4], whole[4:7]], axis="T"), whole)
    first, second = whole[0:3], whole[3:7]
    object.__setattr__(first, "state", {"h": "of the first"})
    object.__setattr__(second, "state", {"h": "of the second"})
    assert concat_samples([first, second], axis="T").state == {"h": "of the first"}


def test_what_does_not_fit_is_not_joined():
    with pytest.raises(ConfigError, match="no batch"):
        concat_samples([])
    with pytest.raises(ConfigError, match=r"\(3, 2\), \(4, 2\).*common T"):
        concat_samples([numbered(3, 2), numbered(4, 2)])
    with pytest.raises(ConfigError, match="common B"):
        concat_samples([numbered(3, 2), numbered(3, 4)], axis="T")
    with pytest.raises(ConfigError, match="state in all or none"):
        concat_samples([numbered(3, 2), numbered(3, 2, state=False)])
    with pytest.raises(ConfigError, match="all or none, as last observations"):
        one = numbered(3, 2)
        concat_samples([one, replace(one, final=tree_map(lambda x: x[1:], one.obs))], "B")
    whole = numbered(7, 2, state=False)
    with pytest.raises(ConfigError, match="pass them in order"):
        concat_samples([whole[3:7], whole[0:3]], axis="T")
    for name in ("first", "prev_reward"):  # either of them tells
        other = whole[3:7].copy()
        getattr(other, name)[0, 1] = 1 - getattr(other, name)[0, 1]
        with pytest.raises(ConfigError, match="pass them in order"):
            concat_samples([whole[0:3], other], axis="T")


def test_many_policies_are_joined_policy_by_policy():
    a, b = numbered(3, 2), numbered(3, 4, offset=1)
    left = MultiAgentBatch({"red": a[:, :1], "blue": b[:, :1]}, env_steps=3)
    right = MultiAgentBatch({"blue": b[:, 1:], "red": a[:, 1:]}, env_steps=5)
    joined = concat_samples([left, right])
    assert isinstance(joined, MultiAgentBatch)
    assert same(joined["red"], a)
    assert same(joined["blue"], b)
    assert joined.env_steps == 8
    assert joined.agent_steps == a.env_steps + b.env_steps
    assert list(joined) == ["red", "blue"]
    assert len(joined) == 8
    assert joined.environments is None


def test_a_batch_that_lacks_a_policy_adds_nothing_to_it():
    a, b = numbered(3, 2), numbered(3, 4, offset=1)
    left = MultiAgentBatch({"red": a[:, :1], "blue": b}, 3, environments=1)
    joined = concat_samples([left, MultiAgentBatch({"red": a[:, 1:]}, 2, environments=1)])
    assert same(joined["red"], a)
    assert same(joined["blue"], b)
    assert (joined.env_steps, joined.environments) == (5, None)
    mixed: Any = [MultiAgentBatch({"shared": a[:, :1]}, 3, 1), a[:, 1:]]
    assert same(concat_samples(mixed)["shared"], a)


def test_environments_are_counted_where_seats_stay_where_they_were():
    a, b = numbered(4, 2, state=False), numbered(4, 6, state=False, offset=1)
    parts = [
        MultiAgentBatch({"red": a[:, i : i + 1], "blue": b[:, 3 * i : 3 * i + 3]}, 4, environments=1) for i in (0, 1)
    ]
    assert concat_samples(parts).environments == 2
    assert concat_samples([parts[0], MultiAgentBatch({"red": a[:, :1], "blue": b}, 4, 1)]).environments is None
    later = [MultiAgentBatch({"red": a[t : t + 2], "blue": b[t : t + 2]}, 4, environments=2) for t in (0, 2)]
    joined = concat_samples(later, axis="T")
    assert (joined.env_steps, joined.environments) == (8, 2)
    assert same(joined["blue"], b)


def test_time_slices_count_the_steps_of_environments_once():
    """Two environments with seats red 1 and blue 2; the second environment's agents are all absent in row 1."""
    red, blue = numbered(5, 2, state=False), numbered(5, 4, state=False, offset=1)
    red.valid[...], blue.valid[...] = True, True
    red.valid[1, 1], blue.valid[1, 2:] = False, False
    red.valid[3, 0], blue.valid[3, 0] = False, False  # seat 1 of blue acts on: the environment stepped
    batch = MultiAgentBatch({"red": red, "blue": blue}, env_steps=9, environments=2)
    slices = timeslices(batch, 2)
    assert [len(s) for s in slices] == [3, 4, 2]
    assert sum(s.agent_steps for s in slices) == batch.agent_steps == 30 - 5
    assert same(concat_samples(slices, axis="T"), batch)
    for at, part in zip((0, 2, 4), slices):
        assert part.environments == 2
        assert same(part["blue"], blue[at : at + 2])
    assert [s.env_steps for s in timeslices(blue, 3)] == [int(blue.valid[:3].sum()), int(blue.valid[3:].sum())]
    with pytest.raises(ConfigError, match="take turns"):
        timeslices(MultiAgentBatch({"red": red}, 5), 2)
    with pytest.raises(ConfigError, match="n=0; expected 1"):
        timeslices(batch, 0)


def test_one_policy_is_wrapped_and_unwrapped():
    batch = numbered(3, 2)
    wrapped = as_multi_agent(batch)
    assert list(wrapped) == ["shared"]
    assert (wrapped.env_steps, wrapped.environments) == (batch.env_steps, 2)
    assert as_multi_agent(wrapped) is wrapped
    assert list(as_multi_agent(batch, "red")) == ["red"]
    assert wrap_as_needed({"shared": batch}, 3) is batch
    many = wrap_as_needed({"red": batch}, 3, 2)
    assert isinstance(many, MultiAgentBatch)
    assert (list(many), len(many), many.environments) == (["red"], 3, 2)
    assert isinstance(wrap_as_needed({}, 0), MultiAgentBatch)


@pytest.mark.parametrize("convert", [lambda b: b, as_torch], ids=["numpy", "torch"])
def test_episodes_are_found_in_a_layout_drawn_by_hand(convert):
    """Upper case ends its episode (T terminated, C truncated), - is a reset row, . idles, v goes on."""
    layout = ["vvT-vC", "v.....", "T-T-vv", "-vvvv-", "------"]
    batch = numbered(6, 5)
    grid = np.array([list(row) for row in layout]).T
    batch.terminated[...], batch.truncated[...] = grid == "T", grid == "C"
    batch.valid[...] = np.isin(grid, ["v", "T", "C"])
    batch = convert(batch)
    expected = [(0, 0, 3), (0, 4, 6), (1, 0, 1), (2, 0, 1), (2, 2, 3), (2, 4, 6), (3, 1, 5)]
    fragments = split_by_episode(batch)
    assert [f.spec for f in fragments] == [BatchSpec(t1 - t0, 1) for _, t0, t1 in expected]
    for fragment, (b, t0, t1) in zip(fragments, expected):
        assert same(fragment, batch[t0:t1, b : b + 1])
        assert bool(fragment.valid.all())
        assert (fragment.state is None) == (t0 > 0)
    assert sum(f.env_steps for f in fragments) == batch.env_steps


def test_every_valid_row_lies_in_one_fragment():
    rng = np.random.default_rng(0)
    for _ in range(50):
        T, B = rng.integers(1, 12), rng.integers(1, 5)
        batch = numbered(int(T), int(B))
        batch.valid[...] = rng.random((T, B)) < 0.8
        batch.terminated[...] = batch.valid & (rng.random((T, B)) < 0.2)
        batch.truncated[...] = batch.valid & (rng.random((T, B)) < 0.2)
        batch.version[...] = np.arange(T * B).reshape(T, B)
        fragments = split_by_episode(batch)
        found = [int(v) for f in fragments for v in f.version.ravel()]
        assert sorted(found) == sorted(batch.version[batch.valid].tolist())
        for f in fragments:
            assert not (f.terminated | f.truncated)[:-1].any()


def test_each_policy_has_its_own_episodes():
    a, b = numbered(3, 2), numbered(3, 4, offset=1)
    split = split_by_episode(MultiAgentBatch({"red": a, "blue": b}, env_steps=3))
    assert sorted(split) == ["blue", "red"]
    for key, batch in (("red", a), ("blue", b)):
        assert len(split[key]) == len(split_by_episode(batch))
        assert all(same(x, y) for x, y in zip(split[key], split_by_episode(batch)))


def test_an_unknown_axis_is_refused():
    batch = allocate_batch(SPEC, BatchSpec(2, 3), {}, None)
    with pytest.raises(ConfigError, match="axis='Z'; expected 'T' or 'B'"):
        concat_samples([batch, batch], axis="Z")  # pyright: ignore[reportArgumentType, reportCallIssue]
