import math
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.core import schedule
from penstock.core.errors import ConfigError
from penstock.core.schedule import (
    Schedule,
    at_progress,
    check_schedules,
    cosine,
    curve,
    exponential,
    linear,
    piecewise,
    schedule_value,
    warmup,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (3e-4, [3e-4] * 5),
        (1, [1.0] * 5),
        ("3e-4", [3e-4] * 5),
        ("linear(1, 0)", [1.0, 0.75, 0.5, 0.0, 0.0]),
        ("linear(0, 1, 0.5)", [0.0, 0.5, 1.0, 1.0, 1.0]),
        ("linear(1, 0, 2)", [1.0, 0.875, 0.75, 0.5, 0.5]),
        ("cosine(1, 0)", [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.0, 0.0]),
        (" cosine ( 2 , 4 , 0.5 ) ", [2.0, 3.0, 4.0, 4.0, 4.0]),
        (linear(0.1, 0.3), [0.1, 0.15, 0.2, 0.3, 0.3]),
        (cosine(1.0, 0.0, 0.25), [1.0, 0.0, 0.0, 0.0, 0.0]),
        ("exponential(1, 0.0001)", [1.0, 0.1, 0.01, 0.0001, 0.0001]),
        (exponential(16.0, 1.0, 0.5), [16.0, 4.0, 1.0, 1.0, 1.0]),
        ("piecewise((0.25, 1), (0.5, 3))", [1.0, 1.0, 3.0, 3.0, 3.0]),
        ("piecewise((0, 1), (0.5, 2), (0.5, -4), (1, -5))", [1.0, 1.5, -4.0, -5.0, -5.0]),
        (piecewise((0.0, 8.0), (1.0, 4.0)), [8.0, 7.0, 6.0, 4.0, 4.0]),
        ("warmup(0.5, 2)", [0.02, 2 * 0.505, 2.0, 2.0, 2.0]),
        (warmup(0.5, linear(4.0, 0.0)), [0.04, 3 * 0.505, 2.0, 0.0, 0.0]),
        (lambda progress: 1 - progress**2, [1.0, 0.9375, 0.75, 0.0, 0.0]),
        ("tests.core.test_schedule:halved", [0.5, 0.25, 1 / 6, 0.1, 0.1]),
    ],
)
def test_values_at_start_quarter_middle_end_and_beyond(text: Schedule, values: list[float]):
    got = [schedule_value(text, progress) for progress in (0.0, 0.25, 0.5, 1.0, 7.0)]
    seen = [schedule_value(text, i / 100) for i in range(101)]
    assert curve(text).lowest <= min(seen) <= max(seen) <= curve(text).highest
    assert curve(text).of_total == (len({*values}) > 1)
    assert got == pytest.approx(values, abs=1e-15)
    assert all(isinstance(v, float) for v in got)
    assert schedule_value(text, -3.0) == values[0]


def halved(progress: float) -> float:
    return 0.5 / (1 + 4 * progress)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("linear(1, 0, steps=1_000)", [1.0, 0.75, 0.0]),
        ("exponential(1, 1e-4, steps=1e3)", [1.0, 0.1, 1e-4]),
        ("piecewise((0, 1), (500, 3))", [1.0, 2.0, 3.0]),
        ("warmup(500, 3)", [0.03, 3 * 0.505, 3.0]),
    ],
)
def test_steps_do_not_depend_on_the_length_of_the_run(text: str, values: list[float]):
    assert [schedule_value(text, 0.9, steps) for steps in (0, 250, 2_000)] == pytest.approx(values)
    assert not curve(text).of_total


def test_the_end_is_exact():
    assert schedule_value("linear(1, 0.1)", 1.0) == 0.1
    assert schedule_value("cosine(3, 0.1, 0.5)", 0.5) == 0.1


@pytest.mark.parametrize("text", ["", "linear", "linear(1)", "linear(1, 2, 3, 4)", "linear(1, 2, 0)", "linear(1, 2, -1)",
                                  "step(1, 2)", "linear(a, b)", "linear(1, inf)", "linear(1, 2))", "1, 2"])  # fmt: skip
def test_other_text_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"not understood.*; expected a number, linear"):
        schedule_value(text, 0.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("linaer(1, 0)", "did you mean 'linear'"), ("exponential(1, 0)", "above 0"), ("warmup(0, 1)", "ends after 0"),
        ("piecewise((0.5, 1), (0, 2))", "places of piecewise rise"), ("piecewise(1, 2)", "pairs"), ("piecewise()", "pairs"),
        ("math:sqr", "module 'math' has no 'sqr'"), ("no_such:f", "cannot import 'no_such'"), ("os:getcwd", "function of the"),
        (lambda progress: 1 / progress, r"\(0\) failed \(ZeroDivisionError"), (lambda progress: math.nan, "returned nan"),
        (lambda: 1.0, "function of the run's progress"), ("__import__('os')", "not understood"), (None, "no finite number"),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused_with_its_reason(text: Any, why: str):
    with pytest.raises(ConfigError, match=why):
        schedule_value(text, 0.0)


@dataclass(frozen=True)
class Settings:
    lr: Schedule = "linear(1, 0)"
    clip: "Schedule" = 0.2
    name: str = "linear(1, 0)"
    qualified: "schedule.Schedule" = "linear(4, 0)"
    spelled: float | str = "linear(2, 0)"
    optional: float | None = None


def test_only_schedule_fields_move():
    now = at_progress(Settings(), 0.5)
    assert now == Settings(0.5, 0.2, "linear(1, 0)", 2.0, 1.0)
    constant = Settings(1.0, 0.2, "x", 1.0, 1.0)
    assert at_progress(constant, 0.5) is constant


@dataclass(frozen=True, slots=True)
class Slotted:
    lr: Schedule = "linear(1, 0)"
    name: str = "a"


@dataclass(frozen=True)
class Mixed(Slotted):
    clip: Schedule = "linear(4, 0)"
    layers: tuple[int, ...] = (64,)


def test_a_settings_class_with_slots_moves_too():
    assert at_progress(Slotted(name="b"), 0.5) == Slotted(0.5, "b")
    assert at_progress(Mixed(name="b", layers=(8,)), 0.5) == Mixed(0.5, "b", 2.0, (8,))


def test_a_bad_schedule_is_found_early():
    check_schedules(Settings(name="no schedule at all"))
    with pytest.raises(ConfigError, match=r"'linaer\(1, 0\)' not understood"):
        check_schedules(Settings(lr="linaer(1, 0)"))
