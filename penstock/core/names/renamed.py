"""Former names of what is public: each works until a version that a warning names, with the new name.

Public names of `ps` have a table in penstock/__init__.py; the rest of them is renamed by what is here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from penstock.core import VERSION
from penstock.core.errors import ConfigError, depth_of_user

F = TypeVar("F", bound=Callable[..., Any])


class Former(NamedTuple):
    """A former name's successor."""

    new: str
    gone_in: str
    """First version without the old name, such as `0.4`."""


def warn_renamed(old: str, new: str, gone_in: str) -> None:
    """Warns at the nearest line outside penstock, once for each such line (a FutureWarning, which Python shows)."""
    warnings.warn(
        f"{old} is now {new}; the old name goes in penstock {gone_in}", FutureWarning, stacklevel=depth_of_user()
    )


def former(new: F, old: str, gone_in: str) -> F:
    """The function or method under its former name: `disown = former(invalidate, "EnvPool.disown", "0.4")`."""
    _require_future(old, gone_in)

    @functools.wraps(new)
    def under_old_name(*args: Any, **kwargs: Any) -> Any:
        warn_renamed(old, new.__qualname__, gone_in)
        return new(*args, **kwargs)

    return under_old_name  # pyright: ignore[reportReturnType]


def renamed(gone_in: str, **names: str) -> Callable[[F], F]:
    """Decorator that takes former names of keyword arguments as well: `@renamed("0.4", columns="partition")`.

    Above a dataclass of settings they are former names of settings: of constructor, `override`, TOML files, options of
    the command line and attributes, of its subclasses too; runs that stored them are read without a warning.
    """
    for old in names:
        _require_future(old, gone_in)
    own = {old: Former(new, gone_in) for old, new in names.items()}

    def decorate(made: Any) -> Any:
        if not isinstance(made, type):
            return _with_current_names(made, own, f"{made.__qualname__}: ")
        made.__former__ = {**former_names(made), **own}  # pyright: ignore[reportAttributeAccessIssue]
        for old in own:
            setattr(made, old, property(functools.partial(_read, old)))
        return made

    return decorate


def former_names(cls: type) -> Mapping[str, Former]:
    """Former names of settings of a class, by `renamed`."""
    return getattr(cls, "__former__", {})


def take_former_names(cls: type) -> None:
    """Has the `__init__` of settings take their former names; done where the first one is given."""
    if not getattr(cls.__init__, "takes_former_names", False):
        cls.__init__ = _with_current_names(cls.__init__, former_names(cls), f"{cls.__name__}.")


def current_name(cls: type, name: str, at: str = "") -> str:
    """The name that a setting has now, after a warning if `name` is a former one. at: what stands before both."""
    found = former_names(cls).get(name)
    if found is None:
        return name
    warn_renamed(f"{at}{name}", f"{at}{found.new}", found.gone_in)
    return found.new


def _with_current_names(call: Any, names: Mapping[str, Former], at: str) -> Any:
    @functools.wraps(call)
    def translated(*args: Any, **given: Any) -> Any:
        for old in [name for name in names if name in given]:
            new, gone_in = names[old]
            if new in given:
                raise ConfigError(f"{at}{old} and {new} are one, and both were given; leave out {old}, the former name")
            warn_renamed(f"{at}{old}", f"{at}{new}", gone_in)
            given[new] = given.pop(old)
        return call(*args, **given)

    translated.takes_former_names = True  # pyright: ignore[reportAttributeAccessIssue]
    return translated


def _read(old: str, settings: Any) -> Any:
    return getattr(settings, current_name(type(settings), old, f"{type(settings).__name__}."))


def _require_future(old: str, gone_in: str) -> None:
    """Raises RuntimeError for a name that this version should no longer have."""
    if tuple(map(int, gone_in.split("."))) <= tuple(map(int, VERSION.split("."))):
        raise RuntimeError(f"{old} was to go in penstock {gone_in}, and this is {VERSION}; remove the old name")
