"""Settings that change over a run: a number, or a schedule written as text such as `linear(3e-4, 0)`."""

from __future__ import annotations

import functools
import math
import re
import sys
import types
import typing
from dataclasses import fields
from typing import Any, TypeVar

from penstock.core.errors import ConfigError

Schedule = float | str
"""A number, or text: `linear(start, end)`, `linear(start, end, until)`, `linear(start, end, steps=N)`; `cosine` too.

`until` is a fraction of the run; `steps` are environment steps and do not depend on its length.
"""

S = TypeVar("S")
_FORM = re.compile(r"\s*(linear|cosine)\s*\(([^()]*?)(?:,\s*steps\s*=\s*([0-9._e+]+)\s*)?\)\s*")


def linear(start: float, end: float, until: float = 1.0) -> str:
    """A schedule from `start` to `end` over the first `until` of the run's steps, then constant."""
    return f"linear({start!r}, {end!r}, {until!r})"


def cosine(start: float, end: float, until: float = 1.0) -> str:
    """Half a cosine from `start` to `end` (Loshchilov and Hutter 2017, eq. 5, without restarts)."""
    return f"cosine({start!r}, {end!r}, {until!r})"


def schedule_value(schedule: Schedule, progress: float, env_steps: int = 0) -> float:
    """The value after a fraction `progress` of the run and `steps` steps. Raises ConfigError on other text."""
    if isinstance(schedule, (int, float)) and math.isfinite(schedule):
        return float(schedule)
    if not isinstance(schedule, str):
        raise ConfigError(f"schedule {schedule!r} is no finite number")
    kind, numbers, steps = _parsed(schedule)
    if not kind:
        return numbers[0]
    start, end = numbers[:2]
    if steps is not None:
        fraction = min(env_steps / steps, 1.0)
    else:
        fraction = min(min(max(progress, 0.0), 1.0) / (numbers[2] if len(numbers) == 3 else 1.0), 1.0)
    if kind == "cosine":
        fraction = 0.5 * (1.0 - math.cos(math.pi * fraction))
    return start + (end - start) * fraction if fraction < 1.0 else end


@functools.lru_cache(maxsize=256)
def _parsed(schedule: str) -> tuple[str, list[float], float | None]:
    """Kind ("" for a plain number), numbers and steps of a schedule's text."""
    match = _FORM.fullmatch(schedule)
    try:
        kind = match[1] if match else ""
        numbers = [float(part) for part in match[2].split(",")] if match else [float(schedule)]
        steps = float(match[3]) if match and match[3] else None
    except ValueError:
        kind, numbers, steps = "", [], None
    if not kind and len(numbers) == 1 and math.isfinite(numbers[0]):
        return kind, numbers, steps
    if (
        len(numbers) not in ((2, 3) if steps is None else (2,))
        or not all(map(math.isfinite, numbers))
        or (len(numbers) == 3 and numbers[2] <= 0)
        or (steps is not None and not 0.0 < steps < math.inf)
    ):
        raise ConfigError(
            f"schedule {schedule!r} not understood; expected a number, linear(start, end[, until]), "
            "linear(start, end, steps=N) or cosine(...)"
        )
    return kind, numbers, steps


def schedule_ends(schedule: Schedule) -> tuple[float, float]:
    """First and last value of a schedule that runs its course; all others lie between."""
    return schedule_value(schedule, 0.0), schedule_value(schedule, math.inf, sys.maxsize)


def needs_total(schedule: Any) -> bool:
    """True for a schedule over a fraction of the run, which needs the run's length."""
    if not isinstance(schedule, str) or not _FORM.fullmatch(schedule):
        return False
    _, numbers, steps = _parsed(schedule)
    return steps is None and numbers[0] != numbers[1]


def at_progress(settings: S, progress: float, env_steps: int = 0, last: S | None = None) -> S:
    """A copy of a settings dataclass in which every schedule is its present value.

    It is not checked again: a step size may end at 0, though none may begin there.

    Args:
        last: an earlier such copy, returned again if it has the same values.
    """
    changed: dict[str, float] = {}
    for name in _schedule_fields(type(settings)):
        value = getattr(settings, name)
        if isinstance(value, str):
            changed[name] = schedule_value(value, progress, env_steps)
    if not changed:
        return settings
    if last is not None and all(getattr(last, name) == value for name, value in changed.items()):
        return last
    out = object.__new__(type(settings))
    for name in _slots(type(settings)):
        object.__setattr__(out, name, getattr(settings, name))
    getattr(out, "__dict__", {}).update(getattr(settings, "__dict__", {}))
    for name, value in changed.items():
        object.__setattr__(out, name, value)
    return out


def check_schedules(settings: Any) -> None:
    """Raises ConfigError if a schedule field of a settings dataclass holds text that is no schedule."""
    for name in _schedule_fields(type(settings)):
        schedule_value(getattr(settings, name), 0.0)


@functools.cache
def _schedule_fields(cls: type) -> tuple[str, ...]:
    """The fields annotated as `Schedule`."""
    hints = typing.get_type_hints(cls)
    return tuple(f.name for f in fields(cls) if hints[f.name] == Schedule)  # pyright: ignore[reportArgumentType]


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    """The fields that do not lie in the `__dict__` of an instance."""
    names = (f.name for f in fields(cls))  # pyright: ignore[reportArgumentType]
    return tuple(name for name in names if isinstance(getattr(cls, name, None), types.MemberDescriptorType))
