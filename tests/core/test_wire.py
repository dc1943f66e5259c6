from __future__ import annotations

import json
import random
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest

import penstock as ps
from penstock.core.tree import tree_leaves
from penstock.core.wire import decode, encode, pack, unpack

LEAVES: list[Any] = [
    None, True, False, 0, -7, 1 << 200, -(2**127), 2.5, -0.0, 5e-324, float("inf"), float("-inf"), float("nan"), 1.0, "",
    "text", "é\ud800\0", b"", b"\0\1" * 5, np.float32(0.1), np.float64("nan"), np.uint64(2**64 - 1), np.True_, np.str_("x"),
    np.complex128(1 - 2j), np.float16(-0.0), np.array(3), np.zeros((0, 3), np.int8), np.array(["a", "bcd"]), np.array([b"x"]),
    np.arange(6, dtype=">f4").reshape(2, 3)[:, ::2], np.array([np.nan, -np.inf]), np.array([[True, False]]),
    np.asfortranarray(np.arange(6).reshape(2, 3)), np.zeros(3, np.longdouble),
]  # fmt: skip
KEYS: list[Any] = [
    "a",
    "",
    "$",
    "$b",
    "$$array",
    0,
    -1,
    1,
    True,
    None,
    2.5,
    (),
    (1, "x"),
    b"k",
    np.int64(3),
    float("inf"),
]


def assert_same(found: Any, expected: Any) -> None:
    """Of one type and content, bit for bit."""
    assert type(found) is type(expected)
    if isinstance(expected, (np.ndarray, np.generic)):
        assert found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()
        assert isinstance(found, np.generic) or found.flags.writeable
    elif isinstance(expected, dict):
        assert len(found) == len(expected)
        for (key, item), (other, value) in zip(found.items(), expected.items()):
            assert_same(key, other)
            assert_same(item, value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for item, value in zip(found, expected):
            assert_same(item, value)
    else:
        assert repr(found) == repr(expected)


def drawn(draw: random.Random, depth: int = 4) -> Any:
    """A nested value of any form."""
    kind = draw.choice(["leaf", "list", "tuple", "dict", "any keys"]) if depth else "leaf"
    if kind == "leaf":
        return draw.choice(LEAVES)
    items = [drawn(draw, depth - 1) for _ in range(draw.randrange(5))]
    if kind in ("list", "tuple"):
        return items if kind == "list" else tuple(items)
    return dict(zip(draw.sample([k for k in KEYS if kind != "dict" or type(k) is str], len(items)), items))


@pytest.mark.parametrize("value", LEAVES, ids=lambda x: f"{type(x).__name__} {x!r:.20}")
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert_same(decode(encode(value)), value)


@pytest.mark.parametrize("seed", range(100))
def test_nested_values_come_back_as_they_were(seed: int) -> None:
    value = {"value": drawn(random.Random(seed))}
    text, parts, size = pack(value)
    assert sum(map(len, parts)) == size
    assert_same(unpack(text, np.frombuffer(b"".join(parts), np.uint8)), value)
    assert_same(decode(encode(value)), value)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("dtype", ["bool", "u1", "i8", "f4", "c8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)])
def test_arrays_of_any_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    first, between, last = decode(encode([array, b"odd", array.T]))
    assert between == b"odd"
    for back, whole in ((first, array), (last, array.T)):
        assert back.dtype == whole.dtype and back.shape == whole.shape and back.tobytes() == whole.tobytes()
        assert back.flags.writeable


def test_a_batch_comes_back_whole() -> None:
    sampler = ps.SerialSampler(4, 3).build("CartPole-v1")
    sampler.initialize(ps.PPO().build(sampler.spec).agent)
    batch, _ = sampler.obtain_samples(0)
    back = decode(encode({"fragment": batch}))["fragment"]
    sampler.shutdown()
    assert isinstance(back, ps.SampleBatch) and back.spec == batch.spec
    assert [x.tobytes() for x in tree_leaves(back)] == [x.tobytes() for x in tree_leaves(batch)]


class Pair(NamedTuple):
    a: int


class Color(IntEnum):
    red = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        np.array([None]),
        np.zeros(1, "i4,f4"),
        np.ma.masked_equal([1, 2], 2),
        np.datetime64(0, "s"),
        Pair(1),
        Color.red,
        1 << 9_000,
        1j,
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_would_not_come_back_as_it_was_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)^value\['a'\]\[1\]\[\(2, 'b'\)\] is .*neither stored nor sent"):
        encode({"a": [0, {(2, "b"): value}]})
    with pytest.raises(TypeError, match=r"^state is "):
        encode(value, "state")


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"$array": ["|O", [1], 0]}, "dtype object, shape .1. is not allowed"),
        ({"$array": ["<f8", [10**13], 0]}, "fit into the 64 bytes"),
        ({"$array": ["<f8", [10**13, 0, -1], 0]}, "not allowed"),
        ({"$array": ["<f8", [8], 8]}, "fit into the"),
        ({"$array": ["<f8", [1], -8]}, "fit into the"),
        ([{"$array": ["|u1", [64], 0]}] * 2, "fit into the"),
        ({"$array": ["f4,f4", [1], 0]}, "not allowed"),
        ({"$array": ["|S0", [10**13], 0]}, "not allowed"),
        ({"$scalar": ["<U0", [], 0]}, "not allowed"),
        ({"$array": ["f4,,", [1], 0]}, "no value as penstock writes them"),
        ({"$batch": [1]}, "no value as penstock writes them"),
        ({"$bytes": [0, 10**13]}, "fit into the"),
        ({"$pickle": "cos"}, "is no type of value"),
        ({"$own": [1, 2]}, "is no type of value"),
    ],
)
def test_forged_text_takes_no_memory_and_names_no_object(plain: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        unpack(json.dumps(plain).encode(), np.zeros(64, np.uint8))


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8])
def test_bytes_without_a_text_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


@pytest.mark.parametrize(
    "data", [np.zeros(64), np.zeros((64, 1 << 10), np.uint8), np.zeros((), np.uint8)], ids=lambda x: x.shape
)
def test_bytes_of_another_form_are_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="expected one axis of uint8"):
        unpack(b'{"$array": ["|u1", [64], 0]}', data)
