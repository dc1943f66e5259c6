"""Parts of a stored experiment that are code of others, or name files: what opening it would import, call or touch.

Only the text is judged: nothing named in it is imported but modules of penstock, Gymnasium and ALE.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import legible
from penstock.envs.builtin import harmless_kwarg, is_builtin_env, is_builtin_module, is_builtin_wrapper

_ENVS, _KWARGS = ("env", "eval_env"), ("kwargs", "options", "env_kwargs", "env_options", "eval_env_kwargs")
_PLAIN = ("info_keys", "stop", "terminal_info")
"""Settings with keys and metrics as texts, which may hold slashes and colons."""
_FILES = ("dir", "dataset", "expert", "trace")
_DEVICE = re.compile(r"(cpu|mps|cuda)(:\d+)?")
_MOST, _LONGEST = 20, 300
"""Parts that a message names, and characters of each."""
_AGENTS = ("penstock.algos.", "penstock.agents.")


def foreign(plain: Any, where: str = "", *, files: bool = True) -> list[str]:
    """The parts of plain settings, as `to_plain` returns them or TOML holds them, that are not to be touched unasked.

    Args:
        where: dotted path of these settings, for the answer. files: settings that name files count, too.

    Returns:
        One text for each such as `env='os:system'`, in the order of the settings; [] if all of it is built in.
    """
    above, _, key = where.rpartition(".")
    if not set(_KWARGS).isdisjoint(above.split(".")):
        return [] if harmless_kwarg(plain) else [f"{where}={plain!r}"]
    if key in _ENVS and isinstance(plain, str):
        return [] if is_builtin_env(plain) else [f"{where}={plain!r}"]
    if key in _KWARGS and isinstance(plain, Mapping):
        return [f"{below(where, name)}={value!r}" for name, value in plain.items() if not harmless_kwarg(value)]
    if key in ("wrappers", "imports") and isinstance(plain, (list, tuple)):
        known = (lambda item: is_builtin_module(_imported(item))) if key == "imports" else is_builtin_wrapper
        return [f"{where}: {_imported(item)!r}" for item in plain if not known(item)]
    if isinstance(plain, Mapping):
        return _of_mapping(plain, where, files)
    if isinstance(plain, (list, tuple)):
        return [found for i, item in enumerate(plain) for found in foreign(item, f"{where}[{i}]", files=files)]
    return _of_text(plain, where, files) if isinstance(plain, str) else []


def refusal(path: Path, found: list[str]) -> str:
    """The first sentence about a file that names these parts; a stranger's words in it cannot be taken for ours."""
    parts = [text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in found[:_MOST]]
    more = f"; and {len(found) - _MOST:,} more" if len(found) > _MOST else ""
    return (
        f"{legible(path)} names what is not part of penstock and would be imported, called or opened: "
        f"{'; '.join(parts)}{more}. "
    )


def _of_mapping(plain: Mapping[str, Any], where: str, files: bool) -> list[str]:
    if "import" in plain:
        path, key = _imported(plain), where.rpartition(".")[2]
        known = is_builtin_env(path) if key in _ENVS and ":" in path else _is_agent_fn(path)
        known = known and all(harmless_kwarg(plain.get(part)) for part in ("args", "kwargs"))
        return [] if known else [f"{where}={path!r}"]
    found: list[str] = []
    if plain.get("class") is not None and not _is_settings(str(plain["class"])):
        found = [f"{where or 'experiment'} is a {str(plain['class'])!r}"]
    return found + [
        text
        for name, item in plain.items()
        if name != "class"
        for text in foreign(item, below(where, name), files=files)
    ]


def _of_text(text: str, where: str, files: bool) -> list[str]:
    key = where.rpartition(".")[2].partition("[")[0]
    if key in _PLAIN or (key == "device" and _DEVICE.fullmatch(text)):
        return []
    if key == "address":
        return [] if text == "local" else [f"{where}={text!r} (a cluster, which would run what this process sends it)"]
    known = {"reward_fn": is_builtin_env, "agent": _is_agent_fn, "name": _is_settings}.get(key)
    if ":" in text and (known is None or not known(text)):
        return [f"{where}={text!r}"]
    named = key in _FILES or "/" in text or "\\" in text or text.startswith(("~", ".."))
    return [f"{where}={text!r} (a file)"] if files and named and text and where != "run.dir" else []


def below(where: str, name: object) -> str:
    """The path of a setting below another; a key that is no plain word stands there as its `repr`."""
    word = str(name) if str(name).isidentifier() and str(name).isascii() else repr(name)
    return f"{where}.{word}" if where else word


def _imported(item: Any) -> str:
    """The import path that an item of a list is or holds."""
    return str(item.get("import", item) if isinstance(item, Mapping) else item)


def _is_settings(path: str) -> bool:
    """True for a frozen dataclass of penstock: settings, which do nothing when they are made."""
    found = _own(path, ("penstock.",))
    frozen = isinstance(found, type) and getattr(getattr(found, "__dataclass_params__", None), "frozen", False)
    return frozen and dataclasses.is_dataclass(found)


def _is_agent_fn(path: str) -> bool:
    return callable(_own(path, _AGENTS))


def _own(path: str, homes: tuple[str, ...]) -> Any:
    """The object at `module:name` if a module of these packages defines it under that very name, else None."""
    module, _, name = path.partition(":")
    if not module.startswith(homes) or not name.isidentifier():
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if getattr(found, "__module__", None) == module else None
