"""Calls as text, `module:NAME(3, name='x')`: a name and arguments that are plain literals, never code."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.core.errors import ConfigError

_LONGEST = 4096
_PLAIN = "numbers, texts in quotes, True, False, None, and tuples, lists and dicts of them"


class Call(NamedTuple):
    """A name with arguments."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def read_call(text: str) -> Call:
    """The call in a text.

    Raises:
        ConfigError: brackets that do not match, or an argument that is no plain literal.
    """
    name, bracket, rest = text.partition("(")
    if not bracket:
        return Call(text.strip())
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"more than {_LONGEST:,} characters")
        node = ast.parse(f"f({rest.rstrip()}", mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("more than one call")
        args = tuple(map(ast.literal_eval, node.args))
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg is not None}
        if len(kwargs) < len(node.keywords) or not _is_literal([*args, kwargs]):
            raise ValueError("an argument twice, or by ** or as a set")
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"{text!r:.200} has arguments that cannot be read ({type(error).__name__}); expected {_PLAIN}, e.g. "
            "FrameStackObservation(stack_size=4); functions and objects are for Python, as functools.partial"
        ) from error
    return Call(name.strip(), args, kwargs)


def call_text(call: Call) -> str | None:
    """The text of a call, for `read_call`; without brackets if it has no arguments; None if there is none.

    Equal calls have the same text in every process.
    """
    try:
        if not _is_literal([*call.args, dict(call.kwargs)]):
            return None
        given = [*map(repr, call.args), *(f"{key}={value!r}" for key, value in call.kwargs.items())]
        text = f"{call.name}({', '.join(given)})" if given else call.name
        return text if read_call(text) == call else None
    except (ValueError, RecursionError):  # too many digits, a list that holds itself, a keyword such as `class`
        return None


def _is_literal(value: Any) -> bool:
    """True for a value that its `repr` restores in every process: None, numbers, texts, and tuples, lists and dicts of
    them.
    """
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list) and all(map(_is_literal, value))
    if isinstance(value, dict):
        return type(value) is dict and all(_is_literal(key) and _is_literal(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
