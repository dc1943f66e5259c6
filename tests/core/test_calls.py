from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.core.names.calls import Call, call_text, read_call

CALLS = [
    Call("a:B"),
    Call("a:B", (3,), {"name": "x"}),
    Call("a:B", ((84, 84), [1, [2.5]], (1,), ()), {"x": {"k": None, 1: True}, "y": "f(1, 'q')", "z": -0.5}),
    Call("A", (), {"text": 'it\'s "so"\n', "big": 10**30, "no": False}),
]
NO_LITERALS: list[Any] = [
    len,
    {1, 2},
    b"x",
    1j,
    math.inf,
    math.nan,
    object(),
    [lambda: 1],
    {"a": len},
    type("S", (str,), {})("x"),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_read_from_its_text(call: Call) -> None:
    text = call_text(call)
    assert text is not None
    found = read_call(text)
    assert found == call
    assert repr(found) == repr(call)  # True is no 1, a tuple no list
    assert call_text(found) == text


@pytest.mark.parametrize("value", NO_LITERALS, ids=lambda value: repr(value)[:20])
def test_what_is_no_literal_has_no_text(value: Any) -> None:
    assert call_text(Call("A", (value,))) is None
    assert call_text(Call("A", (), {"x": value})) is None


def test_arguments_that_no_text_can_name_have_none() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for call in (Call("A", (), {"class": 1}), Call("A", (), {"a b": 1}), Call("A", (endless,)), Call("A", (10**5000,))):
        assert call_text(call) is None
    assert call_text(Call("A", ("x" * 5000,))) is None


def test_forms_of_one_call_have_one_text() -> None:
    for text in ("A(3,name = 'x')", 'A( 3, name="x" )', "A(\n3, name='x') # so", " A (3, name='x')"):
        assert call_text(read_call(text)) == "A(3, name='x')"
    assert read_call("A()") == read_call("A") == Call("A")


@pytest.mark.parametrize(
    "given",
    [
        "(__import__('os').system('x'))", "(lambda: 1)", "(x)", "(1", "(1))", "(1)(2)", "(1) + B(2)", "(1); B(2)", "(*[1])",
        "(**{'a': 1})", "(a=1, a=2)", "(1 if 2 else 3)", "([x for x in (1,)])", "(f'{1}')", "({1, 2})", "(1e999)", "(b'x')",
        "(" * 300, "(" + "-" * 4000 + "1)", "(" + "9" * 4090 + ")" * 9, "('" + "x" * 5000 + "')", "(\0)",
    ],
)  # fmt: skip
def test_text_that_is_no_call_with_literals_is_refused_in_a_line(given: str) -> None:
    with pytest.raises(ConfigError, match=r"arguments that cannot be read.*e\.g\. FrameStackObservation") as caught:
        read_call(f"A{given}")
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)
