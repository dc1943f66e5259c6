"""Limits that are declared with the type of a setting."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from penstock.core.config import from_plain, override, to_plain
from penstock.core.errors import ConfigError
from penstock.core.limits import (
    Bound,
    Chance,
    Count,
    Inner,
    Limit,
    NotNegative,
    Number,
    Positive,
    Rate,
    Share,
    Unit,
    Weight,
    Whole,
    check_settings,
)


@dataclass(frozen=True)
class Every:
    """One setting of each kind."""

    whole: Whole = 0
    count: Count = 1
    number: Number = 0.0
    not_negative: NotNegative = 0.0
    positive: Positive = 1.0
    bound: Bound = 1.0
    unit: Unit = 0.5
    share: Share = 0.5
    rate: Rate = 1e-3
    weight: Weight = 0.0
    chance: Chance = 0.5
    inner: Inner = 0.5
    widths: tuple[Count, ...] = (1, 2)
    some: Positive | None = None
    word: Positive | Literal["auto"] = "auto"
    own: Annotated[int, Limit(2)] = 2
    text: str = "free"

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    ("name", "inside", "outside", "expected"),
    [
        ("whole", [0, 5], [-1], "0 or more"),
        ("count", [1, 10**9], [0, -3], "1 or more"),
        ("number", [-1e300, 0.0], [math.inf, -math.inf], "a finite number"),
        ("not_negative", [0.0, 7.0], [-1e-9, math.inf], "0 or more"),
        ("positive", [1e-300, 7.0], [0.0, -1.0, math.inf], "more than 0"),
        ("bound", [0.5, math.inf], [0.0], "more than 0"),
        ("unit", [0.0, 1.0], [-0.1, 1.1], "0 to 1"),
        ("share", [1e-9, 1.0], [0.0, 1.1], "more than 0, at most 1"),
        ("rate", [1e-3, "linear(1, 0)", "0.5"], [0.0, "linear(0, 1)", "linear(1, -1)", "0"], "more than 0"),
        ("weight", [0.0, "linear(0, 1)"], [-1.0, "cosine(1, -1)"], "0 or more"),
        ("chance", [0.0, "linear(1, 0.1, steps=10)"], ["linear(1.5, 0)", 2.0], "0 to 1"),
        (
            "inner",
            [0.1, "linear(0.9, 0.1)"],
            [0.0, 1.0, "linear(0.5, 1)", "linear(0, 0.5)"],
            "more than 0, less than 1",
        ),
        ("widths", [(), (3,)], [(3, 0), (-1,)], "1 or more"),
        ("some", [None, 2.0], [0.0], "more than 0"),
        ("word", ["auto", 2.0], [0.0, -1.0], "more than 0"),
        ("own", [2], [1], "2 or more"),
    ],
)
def test_what_lies_outside_is_refused_by_name_value_and_limit(
    name: str, inside: list[Any], outside: list[Any], expected: str
) -> None:
    for value in inside:
        assert getattr(Every(**{name: value}), name) == value
    for value in outside:
        with pytest.raises(ConfigError) as error:
            Every(**{name: value})
        finite = ", finite" if value == math.inf and name != "number" else ""
        assert str(error.value) == f"{name}={value}; expected {expected}{finite}"


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Every) if f.name != "text"])
def test_nan_is_no_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Every(**{name: (math.nan,) if name == "widths" else math.nan})


def test_types_and_schedules_are_checked_too() -> None:
    for changes, words in (({"count": 1.5}, "expected a whole number"), ({"rate": "linaer(1, 0)"}, "not understood"),
                           ({"word": "often"}, "often"), ({"count": True}, "expected a whole number")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            Every(**changes)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Narrower(Every):
    unit: float = 0.25  # its meaning, and so its limit, stays
    count: Annotated[int, Limit(10)] = 10
    mine: Positive = 3.0


def test_a_field_declared_anew_keeps_its_limit_unless_it_brings_one() -> None:
    assert Narrower(unit=1.0).count == 10
    for name, value in (("unit", 1.5), ("count", 9), ("mine", 0.0), ("positive", 0.0)):
        with pytest.raises(ConfigError, match=f"^{name}={value}"):
            Narrower(**{name: value})


def test_a_prefix_says_whose_setting_it_is() -> None:
    @dataclass(frozen=True)
    class Local:
        T: Count = 1

        def __post_init__(self) -> None:
            check_settings(self, "sampler.")

    with pytest.raises(ConfigError, match=r"^sampler\.T=0; expected 1 or more$"):
        Local(T=0)


def test_settings_with_limits_are_changed_and_stored_as_others_are() -> None:
    changed = override(Every(), {"count": "3", "some": 2, "widths": [4], "rate": "linear(1, 0)"})
    assert changed == Every(count=3, some=2.0, widths=(4,), rate="linear(1, 0)")
    assert from_plain(to_plain(changed)) == changed
    with pytest.raises(ConfigError, match="count=0"):
        override(Every(), {"count": 0})


@pytest.mark.parametrize("given", ["1e4", "10_000", 1e4])
def test_a_number_is_stored_as_the_number_that_it_means(given: Any) -> None:
    """RunConfig(steps="1e4") passed its check, and training then compared a text with a number."""

    @dataclass(frozen=True)
    class Some:
        count: Count = 1
        rate: Positive = 1.0

        def __post_init__(self) -> None:
            check_settings(self)

    some = Some(given, "0.5")  # pyright: ignore[reportArgumentType]
    assert (some.count, type(some.count), some.rate) == (10_000, int, 0.5)
