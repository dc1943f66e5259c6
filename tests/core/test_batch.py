from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.batch import Inputs, MultiAgentBatch, SampleBatch, TrainBatch, allocate_batch, padded_rows, poison
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
    x, y = tree_leaves(a), tree_leaves(b)
    return len(x) == len(y) and all(
        np.asarray(p).dtype == np.asarray(q).dtype and np.array_equal(np.asarray(p), np.asarray(q), equal_nan=True)
        if np.asarray(p).dtype.kind == "f"
        else np.array_equal(np.asarray(p), np.asarray(q))
        for p, q in zip(x, y)
    )


def test_allocate_gives_every_leaf_its_shape_and_null():
    batch = allocate_batch(SPEC, BatchSpec(4, 3), {"logp": np.float32(0), "pi": np.zeros(5)}, STATE, ("score",))
    shapes = {name: tree_map(lambda x: (x.shape, x.dtype.name), getattr(batch, name)) for name in vars(batch)}
    assert shapes == {
        "obs": {"image": ((5, 3, 3, 4, 4), "uint8"), "x": ((5, 3, 2), "float32")},
        "first": ((5, 3), "bool"),
        "prev_action": (((5, 3), "int64"), ((5, 3, 2), "float32")),
        "prev_reward": ((5, 3), "float32"),
        "terminated": ((4, 3), "bool"),
        "truncated": ((4, 3), "bool"),
        "valid": ((4, 3), "bool"),
        "info": {"logp": ((4, 3), "float32"), "pi": ((4, 3, 5), "float64"), "env": {"score": ((4, 3), "float32")}},
        "state": {"h": ((3, 3), "float32")},
        "version": ((4, 3), "int64"),
        "final": None,
    }
    assert (batch.prev_action[0] == 5).all()
    assert (batch.prev_action[1] == 0).all()
    assert np.isnan(batch.info["env"]["score"]).all()
    assert not batch.valid.any()
    assert batch.env_steps == 0
    bare = allocate_batch(SPEC, BatchSpec(1, 1))
    assert bare.info == {}
    assert bare.state is None


@pytest.mark.parametrize("convert", [lambda b: b, as_torch], ids=["numpy", "torch"])
def test_action_and_reward_are_the_later_rows_of_what_came_before(convert):
    batch = convert(numbered(4, 3))
    assert batch.spec == BatchSpec(4, 3)
    assert batch.spec.size == 12
    assert tree_leaves(batch.action)[0].shape == (4, 3)
    batch.action[0][0, 1] = 99
    batch.reward[3, 2] = -7
    assert batch.prev_action[0][1, 1] == 99
    assert batch.prev_reward[4, 2] == -7
    inputs = batch.inputs
    assert isinstance(inputs, Inputs)
    assert inputs.obs is batch.obs
    assert inputs.prev_action is batch.prev_action
    assert inputs.prev_reward is batch.prev_reward
    assert inputs.first is batch.first
    assert same(batch.inputs_t, Inputs(*tree_map(lambda x: x[:-1], tuple(inputs))))
    assert batch.inputs_t.first.shape == (4, 3)
    assert batch.env_steps == int(np.asarray(batch.valid).sum()) == 6


@pytest.mark.parametrize("convert", [lambda b: b, as_torch], ids=["numpy", "torch"])
def test_a_time_slice_keeps_the_row_after_it_and_views_the_memory(convert):
    batch = convert(numbered(6, 4))
    part = batch[2:5, 1:3]
    assert part.spec == BatchSpec(3, 2)
    for name in ("obs", "first", "prev_action", "prev_reward"):
        assert same(getattr(part, name), tree_map(lambda x: x[2:6, 1:3], getattr(batch, name)))
    for name in ("terminated", "truncated", "valid", "info", "version", "action", "reward"):
        assert same(getattr(part, name), tree_map(lambda x: x[2:5, 1:3], getattr(batch, name)))
    assert part.state is None
    part.reward[0, 0] = 123
    assert batch.reward[2, 1] == 123


def test_the_state_is_kept_where_it_is_known():
    batch = numbered(6, 4)
    assert same(batch[:3].state, batch.state)
    assert same(batch[0:3, 1:2].state, {"h": batch.state["h"][1:2]})
    assert batch[1:3].state is None
    assert batch[-3:].state is None
    assert batch[-3:].spec == BatchSpec(3, 4)
    assert same(batch[:, :], batch)
    assert same(batch[-6:99], batch)
    assert batch[4:2].spec == BatchSpec(0, 4)
    for index in (3, slice(0, 4, 2), (slice(None), 1), (slice(None), slice(None, None, -1))):
        with pytest.raises(ConfigError, match="slice of step 1"):
            batch[index]


@pytest.mark.parametrize("convert", [lambda b: b, as_torch], ids=["numpy", "torch"])
def test_flatten_is_time_major_and_drops_what_comes_after(convert):
    batch = convert(numbered(3, 2))
    flat = batch.flatten()
    assert sorted(flat) == sorted(["obs", "first", "prev_action", "prev_reward", "terminated", "truncated", "valid",
                                   "info", "version", "action", "reward"])  # fmt: skip
    for t in range(3):
        for b in range(2):
            n = 2 * t + b
            for name in flat:
                assert same(tree_map(lambda x, n=n: x[n], flat[name]),
                            tree_map(lambda x, t=t, b=b: x[t, b], getattr(batch, name)))  # fmt: skip
    assert all(len(x) == 6 for x in tree_leaves(flat))


@pytest.mark.parametrize("convert", [lambda b: b, as_torch], ids=["numpy", "torch"])
def test_a_copy_owns_its_memory(convert):
    batch = convert(numbered(3, 2))
    kept = batch.copy()
    before = [np.asarray(x).copy() for x in tree_leaves(kept)]
    for x in tree_leaves(batch):
        x[...] = 0
    assert all(np.array_equal(x, np.asarray(y)) for x, y in zip(before, tree_leaves(kept)))
    kept.action[0][0, 0] = 77
    assert kept.prev_action[0][1, 0] == 77
    assert type(kept.valid) is type(batch.valid)


def test_poison_reaches_every_leaf():
    batch = numbered(3, 2)
    poison(batch)
    assert np.isnan(batch.obs["x"]).all()
    assert (batch.obs["image"] == 213).all()
    assert batch.first.all()
    assert (batch.prev_action[0] == -4242).all()
    assert np.isnan(batch.info["env"]["score"]).all()
    assert np.isnan(batch.state["h"]).all()
    assert (batch.version == -4242).all()


def test_rows_are_padded_to_the_next_multiple_of_four():
    assert [padded_rows(n) for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 1000, 1001)] == [0, 4, 4, 4, 4, 8, 8, 8, 12, 1000, 1004]


def test_a_batch_shows_shapes_and_no_values():
    batch = numbered(3, 2)
    batch.valid[...] = [[True, True], [False, True], [True, True]]
    text = (
        "SampleBatch(T=3, B=2, 5 of 6 rows valid, obs['image'] uint8[4, 2, 3, 4, 4], obs['x'] float32[4, 2, 2], "
        "prev_action[0] int64[4, 2], prev_action[1] float32[4, 2, 2], info['env']['score'] float32[3, 2], "
        "info['logp'] float32[3, 2], state['h'] float32[2, 3])"
    )
    assert repr(batch) == str(batch) == repr(as_torch(batch)) == text
    assert repr(MultiAgentBatch({"a": batch}, 1_234)) == f"MultiAgentBatch(1,234 env steps, {{'a': {text}}})"
    assert repr(tree_map(np.shape, batch)).startswith("SampleBatch("), "a tree of something else in its form"


def test_a_batch_to_train_on_shows_shapes_and_no_values():
    batch = numbered(3, 2, state=False)
    rows = {"return": np.ones(6, np.float32)}
    flat = TrainBatch(batch.inputs_t.flat()._replace(obs=np.zeros((6, 4))), rows, metrics={"loss": 1.0})
    assert repr(flat) == (
        "TrainBatch(obs float64[6, 4], prev_action[0] int64[6], prev_action[1] float32[6, 2], prev_reward float32[6], "
        "first bool[6], return float32[6], metrics: loss)"
    )
    assert repr(replace(flat, valid=np.array([True] * 5 + [False]))).startswith("TrainBatch(5 of 6 rows valid, obs ")


def test_flat_inputs_are_split_into_views() -> None:
    inputs = Inputs({"x": torch.arange(10).reshape(5, 2)}, None, torch.arange(5.0), torch.zeros(5, dtype=torch.bool))
    parts = list(inputs.split(2))
    assert [len(part.first) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.obs["x"] for part in parts]), inputs.obs["x"])
    assert torch.equal(torch.cat([part.prev_reward for part in parts]), inputs.prev_reward)
    assert all(part.prev_action is None for part in parts)
    assert parts[1].obs["x"].data_ptr() == inputs.obs["x"][2:].data_ptr()
