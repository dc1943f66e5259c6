"""`penstock train ALGO --help`: settings of algorithm, sampler and run by group, as declared, without torch."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock.cli.values import part_at
from penstock.core.names.declared import texts

_USUAL = {
    "algo": ("lr", "discount", "epochs", "minibatch", "batch_size", "replay_ratio", "learning_starts", "n_step"),
    "algo.net": (
        "hidden",
        "actor_hidden",
        "critic_hidden",
        "activation",
        "cnn",
        "encoder",
        "recurrent",
        "normalize_obs",
        "normalize_reward",
    ),
    "algo.replay": ("capacity", "index", "hindsight"),
    "sampler": ("T", "B", "workers", "runners", "depth", "dataset", "backend"),
    "sampler.inner": ("T", "B", "workers"),
    "run": ("steps", "seed", "dir", "stop", "eval_interval", "checkpoint_interval", "device", "learners", "each"),
}
"""Settings that the short help shows, besides those that an algorithm declares itself."""
_TITLES = {
    "algo": "algorithm",
    "algo.net": "networks",
    "algo.replay": "replay",
    "algo.rnd": "random network distillation, which any of these switches on",
    "algo.rnd.net": "networks of --algo.rnd",
    "sampler": "sampler",
    "sampler.inner": "inner sampler",
    "run": "run",
}
_INDENT = 30


def settings_help(settings: Mapping[str, Any], whole: bool) -> str:
    """The options of settings by group, each with its type, text and default.

    Args:
        settings: algo, sampler and run, declared or real.
        whole: all of them with their full texts, instead of the most used ones with the first sentence.
    """
    groups: dict[str, list[str]] = {}
    left_out, seen = 0, dict[tuple[type, str], str]()
    for name, part in settings.items():
        for path, cls, value in _fields(part, name):
            if path == "algo.agent":  # an option of `train` itself
                continue
            at, _, leaf = path.rpartition(".")
            own = at == "algo" and leaf in vars(cls).get("__annotations__", ())
            if whole or own or leaf in _USUAL.get(at, ()):
                first = seen.setdefault((cls, leaf), path)
                text = texts(cls)[leaf] if first == path else f"As --{first}."
                hint = get_type_hints(cls)[leaf]
                groups.setdefault(at, []).append(
                    entry(f"--{path} {type_words(hint)}", text if whole else first_sentence(text), value)
                )
            else:
                left_out += 1
    lines: list[str] = []
    for at, entries in groups.items():
        kind = type(settings[at]).__name__ if at in settings else ""
        lines += ["", f"{_TITLES.get(at, at)}{f' ({kind})' if kind else ''}:", *entries]
    if left_out:
        lines += ["", f"{left_out} more settings, and all texts in full: --help-all"]
    return "\n".join(lines)


def _fields(settings: Any, path: str) -> list[tuple[str, type, Any]]:
    """(path, class, value) of each setting, those of settings inside them after the others."""
    found: list[tuple[str, type, Any]] = []
    below: list[tuple[str, Any]] = []
    for field in fields(settings):
        value, part = getattr(settings, field.name), part_at(settings, field.name)
        if is_dataclass(part):
            below.append((f"{path}.{field.name}", part))
        if part is not value or not is_dataclass(part):
            found.append((f"{path}.{field.name}", type(settings), value))
    return found + [one for where, value in below for one in _fields(value, where)]


def entry(option: str, text: str, default: Any) -> str:
    """An option and its text in two columns, with its default in brackets."""
    width = max(60, min(shutil.get_terminal_size().columns, 120)) - 1
    words = f"{text} [{shown(default)}]".strip() if default is not MISSING else text
    lines = textwrap.wrap(words, width - _INDENT)
    head = f"  {option}"
    first = [f"{head:<{_INDENT - 1}} {lines[0]}"] if len(head) < _INDENT else [head, " " * _INDENT + lines[0]]
    return "\n".join([*first, *(" " * _INDENT + line for line in lines[1:])])


def shown(value: Any) -> str:
    """A value as one types it."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(shown, value)) or "none"
    if isinstance(value, Mapping):
        return " ".join(f"{key} {shown(x)}" for key, x in value.items()) or "none"
    return getattr(value, "__name__", None) or str(value) or "''"


def first_sentence(text: str) -> str:
    """The text up to its first full stop or semicolon."""
    return re.split(r"(?<!et al)\. (?=[A-Z`])|; ", text, maxsplit=1)[0].rstrip(".")


def type_words(hint: Any) -> str:
    """A type as help shows it: INT, NUMBER|SCHEDULE, {max,agent}, INT ..."""
    args = get_args(hint)
    if get_origin(hint) is Literal:
        return f"{{{','.join(map(str, args))}}}"
    if get_origin(hint) in (Union, UnionType) and {float, str} <= set(args):
        return "NUMBER|SCHEDULE"
    if get_origin(hint) is tuple:
        return f"{type_words(args[0])} ..." if get_origin(args[0]) is not tuple else "JSON"
    if isinstance(get_origin(hint), type) and issubclass(get_origin(hint), Mapping):
        return "KEY VALUE ..."
    if get_origin(hint) in (Union, UnionType):
        return "|".join(dict.fromkeys(type_words(part) for part in args if part is not type(None)))
    plain = {int: "INT", float: "NUMBER", bool: "{True,False}", str: "TEXT"}
    return plain.get(hint) or ("JSON" if is_dataclass(hint) else "M:N" if "Callable" in str(hint) else "TEXT")
