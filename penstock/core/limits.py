"""Limits of settings, declared with the type: `discount: Unit = 0.99`; values outside are refused at construction."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import typing
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from penstock.core.config import check_fields
from penstock.core.errors import ConfigError
from penstock.core.schedule import Schedule, check_schedules, curve

_LARGEST = sys.float_info.max


class Limit(NamedTuple):
    """Numbers from `low` to `high`, finite unless `high` is inf.

    With `above` they do not begin at `low`, though a schedule may end there; with `inside` they are never either end.
    """

    low: float
    high: float = _LARGEST
    above: bool = False
    inside: bool = False

    def holds(self, value: Any) -> bool:
        """True for a number or schedule inside, and for values that are neither (None, "auto"), which types judge."""
        least = most = start = value
        if isinstance(value, str) or callable(value):
            try:
                found = curve(typing.cast(Any, value))
            except ConfigError:
                return True
            least, most, start = found.lowest, found.highest, found.start
        if value is None:
            return True
        within = self.low < least <= most < self.high if self.inside else self.low <= least <= most <= self.high
        return within and not (self.above and start == self.low)

    def __str__(self) -> str:
        if self.low == -_LARGEST:
            return "a finite number"
        if self.inside:
            return f"more than {self.low:g}, less than {self.high:g}"
        low = f"more than {self.low:g}" if self.above else f"{self.low:g}"
        if self.high < _LARGEST:
            return f"{low}, at most {self.high:g}" if self.above else f"{low} to {self.high:g}"
        return low if self.above else f"{low} or more"


Whole = Annotated[int, Limit(0)]
"""0, 1, 2, ..."""
Count = Annotated[int, Limit(1)]
"""1, 2, 3, ..."""
Number = Annotated[float, Limit(-_LARGEST)]
"""Any finite number."""
NotNegative = Annotated[float, Limit(0.0)]
"""0 or more."""
Positive = Annotated[float, Limit(0.0, above=True)]
"""More than 0."""
Bound = Annotated[float, Limit(0.0, math.inf, above=True)]
"""The largest size of something; inf for no bound."""
Unit = Annotated[float, Limit(0.0, 1.0)]
"""0 to 1."""
Share = Annotated[float, Limit(0.0, 1.0, above=True)]
"""0 to 1, but not 0."""
if TYPE_CHECKING:  # numbers to those that read them: functions get settings at the present time
    Rate: TypeAlias = Any
    Weight: TypeAlias = Any
    Chance: TypeAlias = Any
    Part: TypeAlias = Any
    Inner: TypeAlias = Any
    Cap: TypeAlias = Any
else:
    Rate = Annotated[Schedule, Limit(0.0, above=True)]
    """A number or schedule above 0; a schedule may end at 0."""
    Weight = Annotated[Schedule, Limit(0.0)]
    """A number or schedule of 0 or more."""
    Chance = Annotated[Schedule, Limit(0.0, 1.0)]
    """A number or schedule from 0 to 1."""
    Part = Annotated[Schedule, Limit(0.0, 1.0, above=True)]
    """A number or schedule from 0 to 1 that does not begin at 0."""
    Inner = Annotated[Schedule, Limit(0.0, 1.0, inside=True)]
    """A number or schedule between 0 and 1, which is never either."""
    Cap = Annotated[Schedule, Limit(0.0, math.inf, above=True)]
    """A number or schedule above 0, or inf for no bound."""


def check_settings(settings: Any, prefix: str = "") -> None:
    """For `__post_init__` of a settings dataclass: checks types, schedules and limits of all fields.

    A field that a subclass declares anew keeps its limit unless the new type brings one.

    Raises:
        ConfigError: names the setting, after `prefix`, its value and what was expected.
    """
    check_fields(settings, prefix)
    check_limits(settings, prefix)


def check_limits(settings: Any, prefix: str = "") -> None:
    """Checks schedules and limits like `check_settings`, but no types."""
    check_schedules(settings)
    for name, limit in _limits(type(settings)).items():
        value = getattr(settings, name)
        if not all(map(limit.holds, value if isinstance(value, tuple) else (value,))):
            raise ConfigError(
                f"{prefix}{name}={value}; expected {limit}" + ", finite" * (value == math.inf and limit.low == 0)
            )


def require_whole(least: int, **given: Any) -> None:
    """For the arguments of a function: raises ConfigError unless each is None or a whole number, `least` or more."""
    for name, value in given.items():
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise ConfigError(
                f"{name}={value!r:.60} ({type(value).__name__}); expected a whole number, {least} or more"
            )


@functools.cache
def _limits(cls: type) -> dict[str, Limit]:
    """Limits by field, of the class and those that it inherits from; inner ones too: of `tuple[Count, ...] | None`."""
    found: dict[str, Limit] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        hints = typing.get_type_hints(base, include_extras=True)
        for f in dataclasses.fields(base):
            for hint in _parts(hints[f.name]):
                for extra in getattr(hint, "__metadata__", ()):
                    if isinstance(extra, Limit):
                        found[f.name] = extra
    return found


def _parts(hint: Any) -> list[Any]:
    """A type and all that it is made of."""
    return [hint, *(part for inner in typing.get_args(hint) for part in _parts(inner))]
