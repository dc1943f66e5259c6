"""Settings that change over a run: a number, a schedule written as text such as `linear(3e-4, 0)`, or a function."""

from __future__ import annotations

import ast
import functools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple, TypeVar

from penstock.core.config import import_object
from penstock.core.errors import ConfigError, nearest

Schedule = float | str | Callable[[float], float]
"""A number; a function from the fraction of the run, 0 to 1, to a number; or text, which docs/schedules.md lists:
`linear(start, end)`, `linear(start, end, until)`, `linear(start, end, steps=N)`, `cosine(...)` and `exponential(...)`
alike, `piecewise((0, a), (0.5, b))`, `warmup(0.05, SCHEDULE)`, `module:function`, for `lr` also `kl(start)`.

`until` is a fraction of the run; `steps` are environment steps and do not depend on its length.
"""

S = TypeVar("S")
_WARM = 0.01
"""Factor of a schedule's value at the start of a warm-up."""
_LOOKED_AT = 64
"""Intervals at whose ends a function is called to find its range."""
_FORMS = (
    "a number, linear(start, end[, until]) or linear(start, end, steps=N), cosine(...) or exponential(...) alike, "
    "piecewise((0, a), (0.5, b), ...), warmup(0.05, SCHEDULE), module:function, or for lr kl(start, desired=0.01)"
)


class Curve(NamedTuple):
    """A parsed schedule."""

    value: Callable[[float, float], float]
    """(fraction of the run, environment steps) -> its value."""
    lowest: float
    highest: float
    of_total: bool = False
    """True if it depends on the length of the run."""
    desired_kl: float | None = None
    """Of `kl(...)`: the KL divergence that the step size, here the first, is adapted to, from lowest to highest."""

    @property
    def start(self) -> float:
        """Its first value."""
        return self.value(0.0, 0.0)


def linear(start: float, end: float, until: float = 1.0) -> str:
    """A schedule from `start` to `end` over the first `until` of the run's steps, then constant."""
    return f"linear({start!r}, {end!r}, {until!r})"


def cosine(start: float, end: float, until: float = 1.0) -> str:
    """Half a cosine from `start` to `end` (Loshchilov and Hutter 2017, eq. 5, without restarts)."""
    return f"cosine({start!r}, {end!r}, {until!r})"


def exponential(start: float, end: float, until: float = 1.0) -> str:
    """From `start` to `end`, both above 0, by a constant factor per step: start * (end / start)^fraction."""
    return f"exponential({start!r}, {end!r}, {until!r})"


def piecewise(*points: tuple[float, float]) -> str:
    """Straight lines between points (place, value), constant before the first and after the last.

    Places are fractions of the run, or environment steps if any is above 1. Two points at one place are a jump.
    """
    return f"piecewise({', '.join(f'({x!r}, {y!r})' for x, y in points)})"


def warmup(until: float, schedule: Schedule) -> str:
    """A schedule scaled linearly from 1 % up to its full value.

    Args:
        until: end of the warm-up: a fraction of the run, or environment steps if above 1.
    """
    return f"warmup({until!r}, {schedule})"


def schedule_value(schedule: Schedule, progress: float, env_steps: float = 0) -> float:
    """The value after a fraction `progress` of the run and `env_steps` steps. Raises ConfigError if invalid."""
    if isinstance(schedule, (int, float)) and math.isfinite(schedule):
        return float(schedule)
    return curve(schedule).value(progress, env_steps)


def curve(schedule: Schedule) -> Curve:
    """A schedule as a function of progress and steps. Raises ConfigError if invalid."""
    if isinstance(schedule, (int, float)) and math.isfinite(schedule):
        number = float(schedule)
        return Curve(lambda progress, env_steps: number, number, number)
    if isinstance(schedule, str):
        return _read(schedule)
    if callable(schedule):
        return _of_function(schedule)
    raise ConfigError(f"schedule {schedule!r} is no finite number; expected {_FORMS}")


@functools.lru_cache(maxsize=256)
def _read(text: str) -> Curve:
    try:
        if ":" in text and "(" not in text:
            return _of_function(import_object(text.strip()))
        return _of_node(ast.parse(text.strip(), mode="eval").body)
    except ConfigError:
        raise
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        said = f" ({error})" if type(error) is ValueError and str(error) else ""
        raise ConfigError(f"schedule {text[:200]!r} not understood{said}; expected {_FORMS}") from error


def _of_node(node: ast.expr) -> Curve:
    if not isinstance(node, ast.Call):
        return curve(_number(node))
    kind = node.func.id if isinstance(node.func, ast.Name) else ""
    keywords = {x.arg: _number(x.value) for x in node.keywords}
    if kind in _SHAPES and keywords.keys() <= {"steps"}:
        return _between(kind, [_number(x) for x in node.args], keywords.get("steps"))
    if kind == "piecewise" and not keywords:
        return _through([tuple(map(_number, getattr(x, "elts", ()))) for x in node.args])
    if kind == "warmup" and not keywords and len(node.args) == 2:
        return _warmed(_number(node.args[0]), _of_node(node.args[1]))
    if kind == "kl" and len(node.args) == 1 and keywords.keys() <= {"desired", "least", "most"}:
        return _by_kl(_number(node.args[0]), **typing.cast(Any, keywords))
    raise ValueError(nearest(kind, [*_SHAPES, "piecewise", "warmup", "kl"]).rstrip("?") if kind else "")


def _by_kl(start: float, desired: float = 0.01, least: float = 1e-5, most: float = 1e-2) -> Curve:
    if not (desired > 0.0 and 0.0 < least <= start <= most):
        raise ValueError("kl has a start from least=1e-5 to most=1e-2, and desired > 0")
    return Curve(lambda progress, env_steps: start, least, most, desired_kl=desired)


def _number(node: ast.expr) -> float:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{ast.unparse(node)} is no finite number")
    return float(value)


_SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "linear": lambda start, end, x: start + (end - start) * x,
    "cosine": lambda start, end, x: start + (end - start) * (0.5 * (1.0 - math.cos(math.pi * x))),
    "exponential": lambda start, end, x: start * (end / start) ** x,
}


def _between(kind: str, numbers: list[float], steps: float | None) -> Curve:
    start, end, until = (*numbers, 1.0)[:3] if len(numbers) in (2, 3) else (0.0, 0.0, 0.0)
    if until <= 0.0 or (steps is not None and (steps <= 0.0 or len(numbers) == 3)):
        raise ValueError(f"{kind} has two values, then until > 0 or steps=N > 0")
    if kind == "exponential" and min(start, end) <= 0.0:
        raise ValueError("both values of exponential are above 0")
    shape = _SHAPES[kind]

    def value(progress: float, env_steps: float) -> float:
        x = min(min(max(progress, 0.0), 1.0) / until if steps is None else env_steps / steps, 1.0)
        return shape(start, end, x) if x < 1.0 else end

    return Curve(value, min(start, end), max(start, end), steps is None and start != end)


def _through(points: list[tuple[float, ...]]) -> Curve:
    if not points or any(len(point) != 2 for point in points):
        raise ValueError("piecewise has pairs (place, value)")
    places, values = map(list, zip(*points))
    if places != sorted(places) or places[0] < 0.0:
        raise ValueError("the places of piecewise rise, from 0 on")
    in_steps = places[-1] > 1.0

    def value(progress: float, env_steps: float) -> float:
        x = env_steps if in_steps else min(max(progress, 0.0), 1.0)
        after = next((i for i, place in enumerate(places) if place > x), len(places))
        if after in (0, len(places)):
            return values[max(after - 1, 0)]
        a, b = places[after - 1], places[after]
        return values[after - 1] + (values[after] - values[after - 1]) * ((x - a) / (b - a))

    return Curve(value, min(values), max(values), not in_steps and len(set(values)) > 1)


def _warmed(until: float, inner: Curve) -> Curve:
    if until <= 0.0 or inner.desired_kl is not None:
        raise ValueError("a warm-up ends after 0, and has no kl inside")

    def value(progress: float, env_steps: float) -> float:
        x = (progress if until <= 1.0 else env_steps) / until
        found = inner.value(progress, env_steps)
        return found if x >= 1.0 else found * (_WARM + (1.0 - _WARM) * max(x, 0.0))

    ends = inner.lowest, inner.highest, _WARM * inner.lowest, _WARM * inner.highest
    return Curve(value, min(ends), max(ends), inner.of_total or until <= 1.0)


def _of_function(function: Any) -> Curve:
    """A schedule from a function of progress. Raises ConfigError unless its values on [0, 1] are finite."""
    name = getattr(function, "__qualname__", repr(function))

    def value(progress: float, env_steps: float) -> float:
        progress = min(max(progress, 0.0), 1.0)
        try:
            found = float(function(progress))
        except Exception as error:
            raise ConfigError(
                f"schedule {name}({progress:g}) failed ({type(error).__name__}: {error}); expected a function of the "
                "run's progress, 0 to 1, that returns a number"
            ) from error
        if not math.isfinite(found):
            raise ConfigError(f"schedule {name}({progress:g}) returned {found}; expected a finite number")
        return found

    seen = [value(i / _LOOKED_AT, 0.0) for i in range(_LOOKED_AT + 1)]
    return Curve(value, min(seen), max(seen), min(seen) < max(seen))


def at_progress(settings: S, progress: float, env_steps: int = 0, last: S | None = None) -> S:
    """A copy of a settings dataclass in which every schedule is its present value.

    It is not checked again: a step size may end at 0, though none may begin there.

    Args:
        last: an earlier such copy, reused if its values are equal.
    """
    changed: dict[str, float] = {}
    for name, value in _schedules(settings):
        changed[name] = schedule_value(value, progress, env_steps)
    if not changed:
        return settings
    if last is not None and all(getattr(last, name) == value for name, value in changed.items()):
        return last
    return with_values(settings, changed)


def with_values(settings: S, values: Mapping[str, Any]) -> S:
    """A copy of a frozen dataclass with other values of some fields, unchecked."""
    out = object.__new__(type(settings))
    for name in _slots(type(settings)):
        object.__setattr__(out, name, getattr(settings, name))
    getattr(out, "__dict__", {}).update(getattr(settings, "__dict__", {}))
    for name, value in values.items():
        object.__setattr__(out, name, value)
    return out


def check_schedules(settings: Any) -> None:
    """Raises ConfigError if a schedule field of a settings dataclass holds no valid schedule."""
    for name, value in _schedules(settings):
        try:
            if curve(value).desired_kl is not None and name != "lr":
                raise ConfigError(f"{value!r} adapts a step size; expected it as lr alone")
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


def over_the_run(settings: Any) -> dict[str, Schedule]:
    """The schedules of a settings dataclass, by name, that depend on the run's length."""
    return {name: value for name, value in _schedules(settings) if curve(value).of_total}


def _schedules(settings: Any) -> Iterator[tuple[str, Schedule]]:
    """The fields that hold a schedule, not a number or a word."""
    for name, words in _schedule_fields(type(settings)).items():
        value: Any = getattr(settings, name)
        if (isinstance(value, str) or callable(value)) and value not in words:
            yield name, typing.cast(Any, value)


@functools.cache
def _schedule_fields(cls: type) -> dict[str, tuple[str, ...]]:
    """The fields annotated as `Schedule`, or as `float | str`, each with its literal words, such as "auto"."""
    hints = typing.get_type_hints(cls)
    found: dict[str, tuple[str, ...]] = {}
    for f in fields(cls):
        choices = typing.get_args(hints[f.name])
        if float in choices and str in choices:
            literals = [x for x in choices if typing.get_origin(x) is Literal]
            found[f.name] = tuple(word for x in literals for word in typing.get_args(x))
    return found


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    """The fields that are slots, outside an instance's `__dict__`."""
    names = (f.name for f in fields(cls))  # pyright: ignore[reportArgumentType]
    return tuple(name for name in names if isinstance(getattr(cls, name, None), types.MemberDescriptorType))
