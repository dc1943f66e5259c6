"""Hints at the setting that an unknown name stands for: from a table of other libraries' names, from our own classes,
or by its spelling. Loaded only where a name is unknown."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from penstock.core.config import import_object
from penstock.core.errors import known_words
from penstock.core.names.declared import declared, field_names

_FORM = re.compile(r"([\w.-]+)(?:: (.+))?")
_NO_OPTION = ("algo", "run", "imports")
"""Settings of `ps.Experiment` that have no option of their name."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """Our counterpart of another library's name: a setting, or a sentence where there is none."""

    path: str
    """Dotted path of the setting, such as `algo.net.hidden`; "" where `note` alone answers."""
    note: str
    """Shown after the path, may be ""; without a path it is the whole answer."""


def hint(name: str, cls: type) -> str:
    """A hint at the setting meant by `name`, which `cls` does not have.

    From the table of other libraries' names, else a class of penstock that has it, else a close spelling in `cls`, else
    the settings of `cls`. A guess is not stated as a fact.
    """
    meaning = foreign(name, [cls])
    if meaning is not None:
        return _located(meaning, cls) if meaning.path else meaning.note
    return _owned(name, cls) or slip(name, settings_of(cls)) or known_words(sorted(settings_of(cls)))


def foreign(name: str, classes: Sequence[type]) -> Meaning | None:
    """The meaning of another library's name for settings of these classes, the first that knows it; else None."""
    parts = [*(base.__name__ for cls in classes for base in cls.__mro__[:-1]), "any"]
    value = next((table()[part][name] for part in parts if name in table().get(part, {})), None)
    return None if value is None else meaning_of(value)


def of_public(name: str, known: Iterable[str]) -> str:
    """A hint at the public name of the package that `name` stands for."""
    if name in table()["algorithms"]:
        meaning = meaning_of(table()["algorithms"][name])
        return _with(f"it is ps.{_class_name(meaning.path)}", meaning.note) if meaning.path else meaning.note
    if name in table()["names"]:
        counterpart = table()["names"][name]
        return f"it is {counterpart}" if counterpart.startswith("ps.") else counterpart
    return _owned(name, object) or slip(name, known) or "dir(penstock) lists its names"


def of_member(name: str, cls: type) -> str:
    """A hint at what has a method of other libraries' algorithms, `cls` being the settings of one."""
    return f"ps.{cls.__name__}(...) is settings: {table()['members'][name].format(cls=cls.__name__)}"


def of_algorithm(name: str, known: Iterable[str]) -> str:
    """A hint at the algorithm on the command line that `name` stands for."""
    spelt = name.lower().replace("_", "-")
    if spelt in known:
        return f"did you mean {spelt!r}?"
    for other, value in table()["algorithms"].items():
        if other.lower() == spelt:
            meaning = meaning_of(value)
            return _with(f"it is {meaning.path!r} here", meaning.note) if meaning.path else meaning.note
    return slip(spelt, known) or known_words(known)


def slip(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` of the known words that `name` is a slip of the pen from; "" for none."""
    close = slips(name, known)
    return f"did you mean {' or '.join(map(repr, close[:3]))}?" if close else ""


def slips(name: str, known: Iterable[str]) -> list[str]:
    """The known words with fewest edits from `name`, one or two; [] where none is so near.

    A word that merely resembles one, as `vf_clip_param` does `clip`, is none.
    """
    most = min(2 if len(name) > 5 else 1, len(name) // 2)
    near = {word for word in known if abs(len(word) - len(name)) <= most}
    by_edits = sorted((_edits(name, word), word) for word in near)
    return [word for edits, word in by_edits if edits == by_edits[0][0] <= most]


def owners(name: str) -> dict[str, list[type]]:
    """Our classes that have a setting of this name, by the path that settings of them lie at: "", `run`, `algo.net`."""
    if name not in field_names():
        return {}
    having = {at: [cls for cls in classes if name in settings_of(cls)] for at, classes in settings_classes().items()}
    return {at: classes for at, classes in having.items() if classes}


def in_words(at: str, classes: Sequence[type]) -> str:
    """The names of classes, such as `ps.SAC, ps.CQL`, or `every algorithm`."""
    shared = [cls for cls in settings_classes()["algo"] if "lr" in settings_of(cls)]
    if at == "algo" and set(classes) >= set(shared):
        return "every algorithm"
    return ", ".join(f"ps.{cls.__name__}" for cls in classes)


def option(path: str) -> str:
    """The option of `penstock train` for a setting; "" if it has none."""
    if path.startswith("env.") or path in _NO_OPTION:
        return ""
    return f"--{path}" if "." in path else f"--{path.replace('_', '-')}"


def _located(meaning: Meaning, cls: type) -> str:
    """The setting that is meant, as one says it where settings of `cls` are made."""
    known, at, path = settings_of(cls), _place(cls), meaning.path
    if "inner" in known and path in ("sampler.T", "sampler.B"):
        path = f"sampler.inner.{path[-1]}"
    setting = ""
    if at is None:  # settings of another package
        parts = path.split(".")
        setting = next((".".join(parts[i:]) for i, part in enumerate(parts) if part in known), "")
    elif at == "" or path.startswith(f"{at}."):
        setting = path.removeprefix(f"{at}.") if at else path
    ending = f" ({option(path)})" if option(path) and not _holds_algorithms(cls) else ""
    if setting and setting.split(".")[0] in known:
        return _with(f"it is {setting!r} here{ending}", meaning.note)
    where, _, leaf = path.rpartition(".")
    classes = owners(leaf)[where]
    if where == "sampler" and leaf not in ("T", "B"):
        ending = ending.replace("(", "(--sampler NAME ")
    return _with(f"it is {leaf!r} of {in_words(where, classes)} here{ending}", meaning.note)


def _owned(name: str, cls: type) -> str:
    """The classes of ours that have this very name, "" if none has."""
    known, place = settings_of(cls), _place(cls)
    parts: list[tuple[str, str]] = []
    for at, classes in owners(name).items():
        inside = at == "sampler" and "inner" in known and any("inner" not in settings_of(c) for c in classes)
        path = ".".join(part for part in (at, "inner" if inside else "", name) if part)
        setting = path.removeprefix(f"{place}.") if place and not inside else path
        where = [setting] if "." in setting or at else []
        where += [f"`{option(path)}`"] if option(path) else []
        parts.append((in_words(at, classes), ", ".join(where) if at != "env" and not _holds_algorithms(cls) else ""))
    if len(parts) == 1:
        return _with(f"`{name}` is a setting of {parts[0][0]}", parts[0][1])
    of = " and of ".join(f"{words} ({where})" if where else words for words, where in parts)
    return f"`{name}` is a setting of {of}" if parts else ""


def _holds_algorithms(cls: type) -> bool:
    """True for settings that contain an algorithm's, such as `ps.Policies`, where paths differ."""
    return _place(cls) == "algo" and "lr" not in settings_of(cls)


@functools.cache
def settings_classes() -> dict[str, list[type]]:
    """Our settings classes by path, as their source declares them, of every layer, by name, for an error's text."""
    algos, samplers = import_object("penstock.algos:ALGOS"), import_object("penstock.samplers:SAMPLERS")
    paths = {
        "": ["penstock.run.experiment:Experiment"],
        "run": ["penstock.run.experiment:RunConfig"],
        "algo": [*algos.values(), "penstock.learn.policies:Policies"],
        "algo.net": ["penstock.agents.networks:Net"],
        "algo.replay": ["penstock.replay.settings:ReplaySettings"],
        "algo.rnd": ["penstock.algos.rnd:RND"],
        "sampler": list(samplers.values()),
        "env": ["penstock.envs.make:EnvConfig"],
    }
    return {at: [declared(path) for path in found] for at, found in paths.items()}


@functools.cache
def _place(cls: type) -> str | None:
    """The path that settings of this class lie at; None if they share no class with ours."""
    mine = _names(cls)
    return next((at for at, found in settings_classes().items() if any(mine & _names(other) for other in found)), None)


def _names(cls: type) -> set[tuple[str, str]]:
    """A class and its bases by name, since one that is declared is not the one that was imported."""
    return {(base.__module__, base.__name__) for base in cls.__mro__[:-1]}


def _edits(a: str, b: str) -> int:
    """Insertions, deletions, changes and swaps of neighbours that turn one text into the other."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a):
        row = [i + 1]
        for j, y in enumerate(b):
            row.append(min(rows[i][j + 1] + 1, row[j] + 1, rows[i][j] + (x != y)))
            if i and j and (x, a[i - 1]) == (b[j - 1], y):
                row[-1] = min(row[-1], rows[i - 1][j - 1] + 1)
        rows.append(row)
    return rows[-1][-1]


@functools.cache
def settings_of(cls: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(cls):
        return tuple(f.name for f in dataclasses.fields(cls) if f.init)
    return getattr(cls, "_fields", ())


def _class_name(algo: str) -> str:
    return import_object("penstock.algos:ALGOS")[algo].rpartition(":")[2]


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("penstock.core.names").joinpath("foreign.toml").read_text(encoding="utf-8"))


def meaning_of(value: str) -> Meaning:
    match = _FORM.fullmatch(value)
    return Meaning(match[1], match[2] or "") if match else Meaning("", value)


def _with(text: str, note: str) -> str:
    return f"{text}: {note}" if note else text
