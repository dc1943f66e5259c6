"""Settings on the command line, such as `--algo.net.hidden 64 64`: options located in settings, words as values."""

from __future__ import annotations

import collections.abc
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock.core.errors import ConfigError

_NUMBER = re.compile(r"[+-]?((\d[\d_]*(\.[\d_]*)?|\.\d+)(e[+-]?\d+)?|nan|inf)", re.IGNORECASE)
_NUMBERS = re.compile(r"\d[\d_]*(,\d[\d_]*)*")


def split_options(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The options among words, `--a 1 2` and `--a=1`, each with its values; words before the first are values of ""."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            found.append((option, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            found.append(("", [word]))
    return found


def located(settings: Any, option: str) -> tuple[str, Any] | None:
    """The dotted path of an option in settings, real or declared, and the type there; None if it is not there."""
    keys, value, hint = list[str](), settings, None
    parts = option.removeprefix("--").split(".")
    for i, part in enumerate(parts):
        key = part.replace("-", "_")
        if isinstance(value, Mapping):
            if not any(map(is_dataclass, value.values())):  # keys of the user's own, such as metrics of run.stop
                return ".".join([*keys, *parts[i:]]), Any
            key = part if part in value else key
            if key not in value:
                return (".".join([*keys, *parts[i:]]), Any) if keys else None  # a policy that is not there
            hint, value = Any, value[key]
        elif is_dataclass(value):
            if key in getattr(type(value), "__former__", ()):
                from penstock.core.names.renamed import current_name

                key = current_name(type(value), key, ".".join(["--", *keys, ""]).replace("--.", "--"))
            if key not in type(value).__dataclass_fields__:
                return None
            hint, value = get_type_hints(type(value))[key], part_at(value, key)
        else:
            return None
        keys.append(key)
    return ".".join(keys), hint


def typed(words: Sequence[str], hint: Any, option: str) -> Any:
    """The value that words mean for a setting of this type, which `override` then converts and checks.

    Raises:
        ConfigError: too many or too few words, or a list that is no JSON.
    """
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    origins = {get_origin(kind) or kind for kind in kinds}
    many = tuple in origins
    named = len(words) == 1 and not words[0].startswith("{") and not {str, collections.abc.Callable}.isdisjoint(origins)
    if not named and any(isinstance(origin, type) and issubclass(origin, Mapping) for origin in origins):
        return _pairs(words, option)
    if not many and len(words) != 1:
        raise ConfigError(f"{option} has {len(words)} values{': ' * bool(words)}{' '.join(words)[:200]}; expected one")
    word = words[0] if len(words) == 1 else None
    if word is not None and word.lower() == "none" and type(None) in kinds:
        return None
    if word is not None and word[:1] in ("[", "{"):
        from penstock.core.config import override  # it loads numpy, which help does not need

        value, inner = _json(word, option), _begun(kinds)
        return override(inner, value) if inner is not None and isinstance(value, Mapping) else value
    if word is not None and tuple[str, ...] in kinds:
        return [part.strip() for part in word.split(",")]
    if many and not (word is not None and (_NUMBERS.fullmatch(word) or word in _literals(kinds))):
        return list(words)
    return _number(word) if float in origins and word is not None else word


def part_at(settings: Any, name: str) -> Any:
    """The value of a setting; of an optional part that is None, such as an affinity, what it would begin with."""
    value = getattr(settings, name)
    return _begun(get_args(get_type_hints(type(settings))[name])) if value is None else value


def _begun(kinds: Sequence[Any]) -> Any:
    """Default settings of the first of these types that is a settings class, such as of an affinity; None for none."""
    classes: list[Any] = [kind for kind in kinds if is_dataclass(kind)]
    return classes[0]() if classes else None


def _literals(kinds: Sequence[Any]) -> list[Any]:
    return [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def _pairs(words: Sequence[str], option: str) -> Any:
    if len(words) == 1 and words[0].startswith("{"):
        return _json(words[0], option)
    if len(words) % 2:
        raise ConfigError(f"{option} has {len(words)} values; expected pairs of key and value")
    return dict(zip(words[::2], map(_number, words[1::2])))


def _number(word: str) -> Any:
    return float(word) if _NUMBER.fullmatch(word) else word


def _json(word: str, option: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{option} {word!r:.200} is no JSON: {error}; expected e.g. '[[32, 8, 4], [64, 4, 2]]'"
        ) from error
