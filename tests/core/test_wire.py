from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.tree import tree_leaves
from penstock.core.wire import decode, encode

VALUES: list[Any] = [
    None, True, 7, 2.5, "text", b"", b"\0\1" * 5, [1, [2]], (1, (2,)), {"a": 1, "$b": {"$$c": 2}}, {1: 2, (3,): 4},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    assert decode(encode(value)) == value
    assert type(decode(encode(value))) is type(value)


@pytest.mark.parametrize("dtype", ["bool", "u1", "i8", "f4", "c8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)])
def test_arrays_of_any_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    first, between, last = decode(encode([array, b"odd", array.T]))
    assert between == b"odd"
    for back, whole in ((first, array), (last, array.T)):
        assert back.dtype == whole.dtype and back.shape == whole.shape and back.tobytes() == whole.tobytes()
        assert back.flags.writeable


def test_scalars_stay_scalars() -> None:
    assert type(decode(encode(np.float32(2.5)))) is np.float32


def test_a_batch_comes_back_whole() -> None:
    sampler = ps.SerialSampler(4, 3).build("CartPole-v1")
    sampler.initialize(ps.PPO().build(sampler.spec).agent)
    batch, _ = sampler.obtain_samples(0)
    back = decode(encode({"fragment": batch}))["fragment"]
    sampler.shutdown()
    assert isinstance(back, ps.SampleBatch) and back.spec == batch.spec
    assert [x.tobytes() for x in tree_leaves(back)] == [x.tobytes() for x in tree_leaves(batch)]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array(["a"]), np.array([None])])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        encode(value)
