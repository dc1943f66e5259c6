"""Settings as data: frozen dataclasses to and from plain JSON, and changes by dotted path with strict names."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import importlib
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from penstock.core.errors import ConfigError, known_words, nearest

S = TypeVar("S")
_LARGEST = (1 << 63) - 1
"""The largest whole number that arrays and files hold."""
_FINITE = sys.float_info.max
_MOST_VALUES = 1 << 12
"""Values of one setting, at most."""
_MARKS = {"class", "import", "tuple", "unstorable"}
"""Keys of a dict in plain settings that is no dict."""
_LONGEST = 200
"""Most characters of a value in a message."""
_NUMBERS = re.compile(r"[\[(]?\s*\d[\d_.e+-]*(\s*,\s*\d[\d_.e+-]*)*\s*,?\s*[\])]?")
"""Text that spells a tuple of numbers: `64,64`, `[64, 64]`, `64`."""


def override(settings: S, changes: Mapping[str, Any]) -> S:
    """A copy with some fields changed: `override(exp, {"algo.lr": 3e-4, "run.seed": 1})`.

    Values are converted to the field's type where that loses nothing (a list for a tuple, an int for a float, text
    for anything it spells).

    Raises:
        ConfigError: an unknown path (the message names the nearest), or a value of the wrong type.
    """
    return _changed(settings, [(path.split("."), path, value) for path, value in changes.items()])


def _known_names(cls: type[S], *args: object, **given: object) -> S:
    """The `__new__` of settings: refuses names that they do not have before the dataclass's `__init__` does.

    Raises:
        ConfigError: names the setting that was meant, where another library calls it so, or the nearest.
    """
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # pyright: ignore[reportArgumentType]
    for name in given:
        if name in getattr(cls, "__former__", ()):
            from penstock.core.names.renamed import take_former_names

            take_former_names(cls)
        elif name not in known:
            from penstock.core.names.hints import hint  # it reads a file

            raise ConfigError(f"{cls.__name__} has no setting {name!r}; {hint(name, cls)}")
    return object.__new__(cls)


# `inspect.signature` leaves out a `__new__` written in C and shows the fields, which is what a notebook asks for.
if typing.TYPE_CHECKING:
    known_names = _known_names
else:
    known_names = functools.partial(_known_names).__call__


class Elsewhere:
    """A method that algorithms of other libraries have: on settings an AttributeError, which says what has it here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> typing.NoReturn:
        from penstock.core.names.hints import of_member  # it reads a file

        raise AttributeError(f"{owner.__name__} has no {self._name!r}; {of_member(self._name, owner)}")


def check_fields(settings: Any, prefix: str = "") -> None:
    """For `__post_init__`: raises ConfigError if a field of a settings dataclass is not of its annotated type.

    Equivalent values are stored as the annotated type: a number given as text, 1e4 for a whole one, numpy's numbers,
    lists and arrays for tuples, paths and torch devices for text.

    Args:
        prefix: of the names in messages, such as `run.`.
    """
    hints = _hints(type(settings))
    for f in dataclasses.fields(settings):
        given = getattr(settings, f.name)
        meant = _convert(given, hints[f.name], f"{prefix}{f.name}")
        foreign = isinstance(given, (np.generic, np.ndarray, PurePath)) or _is_device(given)
        of_text = hints[f.name] in (int, float, bool) and isinstance(given, (str, float))
        if foreign or (of_text and type(meant) is not type(given)) or (isinstance(meant, tuple) and meant is not given):
            object.__setattr__(settings, f.name, meant)


def differences(settings: Any) -> str:
    """Settings as one would write them, without those at their default: `PPO(lr=0.001, net=Net(hidden=(8,)))`."""
    if isinstance(settings, Mapping):
        return f"{{{', '.join(f'{key!r}: {differences(value)}' for key, value in settings.items())}}}"
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return getattr(settings, "__qualname__", None) or repr(settings)
    said: list[str] = []
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.repr and value != default:
            said.append(f"{f.name}={differences(value)}")
    return f"{type(settings).__name__}({', '.join(said)})"


def to_plain(value: Any) -> Any:
    """Settings as JSON data. Dataclasses carry their class, functions their import path; see `unstorable`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": import_path(type(value)), **plain}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is functools.partial:
        bound: Any = value
        plain = {"args": [*map(_argument, bound.args)], "kwargs": _argument(bound.keywords)}
        called = to_plain(bound.func)
        if "import" in called:
            return {**called, **plain}
        return called if "unstorable" in called else {"unstorable": repr(value)}
    if callable(value):
        path = import_path(value)
        return {"import": path} if path else {"unstorable": getattr(value, "__qualname__", repr(value))}
    if isinstance(value, np.generic):
        return value.item()
    return {"unstorable": repr(value)}


def _argument(value: Any) -> Any:
    """An argument of a partial as JSON data, so that a tuple comes back as one."""
    if type(value) is tuple:
        return {"tuple": [*map(_argument, value)]}
    if type(value) is list:
        return [*map(_argument, value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
        return {key: _argument(item) for key, item in value.items()}
    return {"unstorable": repr(value)} if isinstance(value, Mapping) else to_plain(value)


def _from_argument(plain: Any) -> Any:
    """Inverse of `_argument`."""
    if isinstance(plain, list):
        return [*map(_from_argument, plain)]
    if isinstance(plain, Mapping) and not _MARKS & plain.keys():
        return {key: _from_argument(item) for key, item in plain.items()}
    if isinstance(plain, Mapping) and "tuple" in plain:
        return tuple(map(_from_argument, plain["tuple"]))
    return from_plain(plain)


def unstorable(plain: Any, where: str = "") -> dict[str, str]:
    """The parts of plain settings that `from_plain` cannot bring back, by dotted path, as messages name them."""
    if isinstance(plain, list):
        return {path: said for i, item in enumerate(plain) for path, said in unstorable(item, f"{where}[{i}]").items()}
    if not isinstance(plain, Mapping):
        return {}
    if "unstorable" in plain:
        return {where: str(plain["unstorable"])}
    found = {where: "a class that no module names"} if "class" in plain and plain["class"] is None else {}
    for key, item in plain.items():
        found |= unstorable(item, f"{where}.{key}".lstrip("."))
    return found


def from_plain(plain: Any) -> Any:
    """Inverse of `to_plain`. Raises ConfigError for a class that is gone, a field it lacks, or unstorable data."""
    if isinstance(plain, Mapping):
        if "import" in plain:
            found = import_object(plain["import"])
            if "args" not in plain:
                return found
            return functools.partial(found, *_from_argument(plain["args"]), **_from_argument(plain["kwargs"]))
        if "unstorable" in plain:
            raise ConfigError(
                f"{plain['unstorable']} could not be stored (a lambda, or not at the top of a module); pass it again"
            )
        if "class" in plain:
            if plain["class"] is None:
                raise ConfigError(
                    "stored settings are of a class that cannot be imported (local, or of the user's "
                    "script); pass them again, or move the class into a module"
                )
            cls = import_object(plain["class"])
            known = {f.name: f for f in dataclasses.fields(cls)}
            renamed: Mapping[str, Any] = getattr(cls, "__former__", {})
            given = {renamed[key].new if key in renamed else key: from_plain(item) for key, item in plain.items()}
            given.pop("class")
            for key in given:
                if key not in known:
                    raise ConfigError(f"stored settings of {cls.__name__} name {key!r}; {nearest(key, known)}")
            hints = _hints(cls)
            return cls(**{key: _convert(value, hints[key], key) for key, value in given.items()})
        return {key: from_plain(item) for key, item in plain.items()}
    return [from_plain(item) for item in plain] if isinstance(plain, list) else plain


def import_path(obj: Any) -> str | None:
    """`module:qualname` if importing it returns this very object, else None."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is obj else None


def import_object(path: str) -> Any:
    """The object at `module:qualname`. Raises ConfigError that says which half is wrong."""
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ConfigError(f"{path!r} is no import path; expected module:name, e.g. my_package.algos:MyPPO")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"cannot import {module!r} of {path!r}: {error}; is its folder on PYTHONPATH?") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"module {module!r} has no {part!r}; {nearest(part, [n for n in vars(found) if n[0] != '_'])}"
            )
        found = getattr(found, part)
    return found


def _of_one(settings: Any, key: str, path: str) -> str:
    """The path of a setting that each of several has, such as `algo.algos.ID.lr`; "" if none has it."""
    for name, several in ((name, getattr(settings, name)) for name in getattr(settings, "__dataclass_fields__", ())):
        for id_ in several if isinstance(several, Mapping) else ():
            if key in getattr(several[id_], "__dataclass_fields__", ()):
                start, end = path.split(key, 1)
                return f"each of {', '.join(several)} has its own: {start}{name}.{id_}.{key}{end}"
    return ""


def keys_at(settings: Any, keys: list[str]) -> list[str]:
    """The keys of a path, where the first is joined with those behind it that belong to one key of a mapping."""
    for n in range(len(keys), 1, -1) if isinstance(settings, Mapping) else ():
        if (whole := ".".join(keys[:n])) in settings:
            return [whole, *keys[n:]]
    return keys


def _changed(settings: Any, changes: list[tuple[list[str], str, Any]]) -> Any:
    """The settings with changes (keys, path, value), all at once: checks of several fields see them together."""
    changes = [(keys_at(settings, keys), path, value) for keys, path, value in changes]
    if hasattr(type(settings), "__former__"):
        from penstock.core.names.renamed import current_name

        cls = type(settings)
        changes = [([current_name(cls, k[0], f"{cls.__name__}."), *k[1:]], path, value) for k, path, value in changes]
    changed: dict[str, Any] = {}
    for key in dict.fromkeys(keys[0] for keys, _, _ in changes):
        mine = [(keys[1:], path, value) for keys, path, value in changes if keys[0] == key]
        below = [change for change in mine if change[0]]
        hint = _hint_at(settings, key, mine[0][1], bool(below))
        new = settings.get(key, {}) if isinstance(settings, Mapping) else getattr(settings, key)
        for keys, path, value in mine:
            new = new if keys else _convert(value, hint, path)
            if below and not keys and new is None:
                raise ConfigError(f"{path!r} is None, and {below[0][1]!r} is given beside it; expected one of the two")
        if below and new is None:  # such as an affinity, which is None by default
            choices: list[Any] = [choice for choice in typing.get_args(hint) if dataclasses.is_dataclass(choice)]
            new = choices[0]() if choices else None
        changed[key] = _changed(new, below) if below else new
    if isinstance(settings, Mapping):
        return {**settings, **changed}
    if not changed:
        return settings
    if _is_named_tuple(type(settings)):
        return settings._replace(**changed)
    return dataclasses.replace(settings, **changed)


def _hint_at(settings: Any, key: str, path: str, below: bool) -> Any:
    """The type of a setting. Raises ConfigError if there is none of that name."""
    if isinstance(settings, Mapping):
        if below and key not in settings and any(map(dataclasses.is_dataclass, settings.values())):
            raise ConfigError(f"unknown setting {path!r}: there is no {key!r}; {nearest(key, settings)}")
        return Any
    if not (_is_named_tuple(type(settings)) or dataclasses.is_dataclass(settings)):
        raise ConfigError(f"{path!r}: nothing lies below {type(settings).__name__} {settings!r}; shorten the path")
    hints = _hints(type(settings))
    if key not in getattr(settings, "_fields", ()) and key not in getattr(settings, "__dataclass_fields__", ()):
        from penstock.core.names.hints import hint

        said = _of_one(settings, key, path) or hint(key, type(settings))
        raise ConfigError(f"unknown setting {path!r}: {type(settings).__name__} has no {key!r}; {said}")
    return hints[key]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_device(value: Any) -> bool:
    """True for a torch.device, which is told by its name: core does without torch."""
    return f"{type(value).__module__}.{type(value).__name__}" == "torch.device"


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the annotated type, or ConfigError; types that cannot be checked by value pass as they are."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in sorted(args, key=lambda a: a is not type(value)):  # an exact match first
            try:
                return _convert(value, choice, path)
            except ConfigError:
                continue
        names = [name for choice in args if typing.get_origin(choice) is typing.Literal for name in choice.__args__]
        if isinstance(value, str) and names:
            raise ConfigError(f"{path}={_told(value)}; {nearest(value, map(str, names))}")
        wanted = str(hint)
        for part in filter(dataclasses.is_dataclass, args):
            wanted = wanted.replace(f"{part.__module__}.", "")
            wanted += f", or a setting below it: {path}.{dataclasses.fields(part)[0].name}"
        raise ConfigError(f"{path}={_told(value)} ({type(value).__name__}); expected {wanted}")
    if origin is typing.Literal:
        if value in args:
            return value
        said = [nearest(str(value), map(str, args))]
        if len(args) == 2:  # 'cuda', which is near to 'cpu', may mean the other
            said.append(known_words(sorted(map(str, args))))
        raise ConfigError(f"{path}={_told(value)}; {' '.join(dict.fromkeys(said))}")
    if origin is tuple and isinstance(value, str) and _NUMBERS.fullmatch(value):
        value = [part for part in value.strip("[]() ").split(",") if part.strip()]
    if origin is tuple and isinstance(value, (list, tuple, range)):
        if len(value) > _MOST_VALUES:
            raise ConfigError(f"{path} has {len(value):,} values; expected at most {_MOST_VALUES:,}")
        inner = args[:1] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if args and len(inner) != len(value):
            raise ConfigError(f"{path}={_told(value)}; expected {len(inner)} values")
        return tuple(_convert(v, h, path) for v, h in zip(value, inner)) if args else tuple(value)
    if origin in (collections.abc.Mapping, dict) and isinstance(value, Mapping):
        return {key: _convert(item, args[1], f"{path}.{key}") for key, item in value.items()} if args else dict(value)
    if origin is collections.abc.Callable and (callable(value) or isinstance(value, str)):
        return import_object(value) if isinstance(value, str) else value
    if hint is Any:
        return value
    if hint is types.NoneType and isinstance(value, str) and value.lower() == "none":
        return None
    if not isinstance(hint, type):
        if origin is None:
            return value
        raise ConfigError(f"{path}={_told(value)} ({type(value).__name__}); expected {hint}")
    if getattr(hint, "_is_protocol", False):
        return value
    if _is_named_tuple(hint) and isinstance(value, (list, tuple, Mapping)):
        fields = _hints(hint)
        given = value if isinstance(value, Mapping) else dict(zip(fields, value))
        if len(value) != len(fields) or set(given) != set(fields):
            raise ConfigError(f"{path}={_told(value)}; expected {len(fields)} values: {', '.join(fields)}")
        return hint(**{name: _convert(given[name], fields[name], f"{path}.{name}") for name in fields})
    whole_, most = hint is int or isinstance(value, int), _LARGEST if hint is int else _FINITE
    if hint in (int, float) and isinstance(value, (int, float)) and whole_ and abs(value) > most:
        raise ConfigError(f"{path}={_told(value)}; expected at most {f'{most:,}' if hint is int else f'{most:g}'}")
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isnan(value):
            raise ConfigError(f"{path}={_told(value)}; expected a number")
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    if isinstance(value, str) and hint in (int, float, bool):
        try:
            if hint is int:
                return whole(value)
            found = {"true": True, "false": False}[value.lower()] if hint is bool else float(value.replace("_", ""))
            if not math.isnan(found):
                return found
        except (ValueError, KeyError):
            pass
    if hint is str and (isinstance(value, PurePath) or _is_device(value)):
        return str(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    expected = "a whole number, such as 100000, 1e5 or 100_000" if hint is int else getattr(hint, "__name__", hint)
    raise ConfigError(f"{path}={_told(value)} ({type(value).__name__}); expected {expected}")


def _told(value: Any) -> str:
    """The `repr` of a value, cut short."""
    if isinstance(value, int) and value.bit_length() > 64:  # from 4,300 digits on it has no repr
        return f"a whole number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def whole(text: str) -> int:
    """The whole number that a text spells: 100000, 1e5, 1.5e3 or 100_000.

    Raises ValueError for any other text, and for a number that takes more than 64 bits.
    """
    try:
        found = int(text)
    except ValueError:
        number = float(text.replace("_", ""))
        if not number.is_integer():  # nor are inf and nan
            raise
        found = int(number)
    if abs(found) > _LARGEST:
        raise ValueError(f"{text:.30} takes more than 64 bits")
    return found


def split_values(text: str) -> tuple[str, ...]:
    """The values between commas outside brackets: "linear(1e-3, 0),3e-4" holds two."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return tuple(part.strip() for part in parts)
