"""Checks that an object of a user's own has every member of the Protocol that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def required(method: F) -> F:
    """Marks a method of a Protocol that a class inheriting the Protocol must define; the others have a default."""
    method.__required__ = True  # pyright: ignore[reportFunctionMemberAccess]
    return method


def require_members(value: Any, protocol: type, page: str) -> None:
    """Raises ConfigError that names the first member of `protocol` that `value` lacks, its signature, and a page.

    Args:
        value: an instance, or a class; of a class only methods are checked.
        protocol: a `typing.Protocol`, or a class with public methods and annotated attributes as members.
        page: where the documentation shows an example, such as `docs/writing-an-algorithm.md`.
    """
    defaults = any(getattr(x, "__required__", False) for x in vars(protocol).values())
    for name, signature in members(protocol).items():
        member = getattr(value, name, None)
        if member is None and signature.endswith("| None") and hasattr(value, name):
            continue
        if getattr(member, "__required__", False) or (
            member is None and not (isinstance(value, type) and signature.startswith(f"{name}:"))
        ):
            owner, own = value if isinstance(value, type) else type(value), getattr(protocol, name, None)
            inherited = defaults and own is not None and not getattr(own, "__required__", False)
            cure = f", or inherit {protocol.__name__}, which has a default" * inherited
            raise ConfigError(
                f"{owner.__module__}.{owner.__qualname__} has no {signature}, which {protocol.__name__} asks for; "
                f"see {page}{cure}"
            )


def require_call(what: str, fn: Any, *arguments: str, returns: str) -> None:
    """Raises ConfigError unless `fn` takes these positional arguments; it is not called.

    Args:
        what: the name of the setting. arguments: their names, for the message. returns: what `fn` makes of them.
    """
    asked = f"expected {what}({', '.join(arguments)}), a function that returns {returns}"
    name = getattr(fn, "__name__", repr(fn))
    if not callable(fn):
        raise ConfigError(f"{what}={fn!r:.80} cannot be called; {asked}")
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError as error:
        taken = f"take {' and '.join(arguments)}" if arguments else "be called without arguments"
        raise ConfigError(f"{what}={name} cannot {taken} ({error}); {asked}") from None
    except ValueError:  # a C function without a signature
        pass


def members(protocol: type) -> dict[str, str]:
    """Every public member of a Protocol by name, each as it is written: `spec: EnvSpec` or `recv() -> int`."""
    found: dict[str, str] = {}
    for cls in reversed([c for c in protocol.__mro__ if c.__module__ not in ("builtins", "typing", "abc")]):
        for name, hint in inspect.get_annotations(cls).items():
            found[name] = f"{name}: {hint if isinstance(hint, str) else getattr(hint, '__name__', hint)}"
        for name, member in vars(cls).items():
            if isinstance(member, property) and member.fget is not None:
                found[name] = f"{name}: {inspect.signature(member.fget).return_annotation}"
            elif inspect.isfunction(member):
                found[name] = f"{name}{_signature(member)}"
    return {name: text for name, text in found.items() if not name.startswith("_")}


class _Written(str):
    """An annotation that is shown as it is written, without quotes."""

    __repr__ = str.__str__


def _signature(method: Any) -> inspect.Signature:
    """A method's signature without `self`."""
    whole = inspect.signature(method)
    parameters = [p.replace(annotation=_written(p.annotation)) for p in list(whole.parameters.values())[1:]]
    return whole.replace(parameters=parameters, return_annotation=_written(whole.return_annotation))


def _written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation
