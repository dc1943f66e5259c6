"""Parts of a stored experiment that are code of others, or name files: what opening it would import, call or touch.

Only the text is judged: nothing named in it is imported but modules of penstock, Gymnasium and ALE.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from typing import Any

from penstock.envs.builtin import harmless_kwarg, is_builtin_env, is_builtin_module, is_builtin_wrapper

_ENVS, _KWARGS = ("env", "eval_env"), ("kwargs", "options", "env_kwargs", "env_options", "eval_env_kwargs")
_PLAIN = ("info_keys", "stop", "terminal_info")
"""Settings whose texts are keys and metrics, which may hold slashes and colons."""
_FILES = ("dir", "dataset", "trace")
_DEVICE = re.compile(r"(cpu|mps|cuda)(:\d+)?")
_AGENTS = ("penstock.algos.", "penstock.agents.")


def foreign(plain: Any, where: str = "", *, files: bool = True) -> list[str]:
    """The parts of plain settings, as `to_plain` returns them, that opening a stranger's run must not touch.

    Args:
        where: dotted path of these settings, for the answer. files: settings that name files count, too.

    Returns:
        One text for each such as `env=os:system`, in the order of the settings; [] if all of it is built in.
    """
    key = where.rpartition(".")[2]
    if key in _ENVS and isinstance(plain, str):
        return [] if is_builtin_env(plain) else [f"{where}={plain}"]
    if key in _KWARGS and isinstance(plain, Mapping):
        return [f"{where}.{name}={value!r}" for name, value in plain.items() if not harmless_kwarg(value)]
    if key in ("wrappers", "imports") and isinstance(plain, list):
        known = is_builtin_module if key == "imports" else is_builtin_wrapper
        names = [_imported(item) for item in plain]
        return [f"{where}: {name}" for name in names if not known(name)]
    if isinstance(plain, Mapping):
        return _of_mapping(plain, where, files)
    if isinstance(plain, list):
        return [found for i, item in enumerate(plain) for found in foreign(item, f"{where}[{i}]", files=files)]
    return _of_text(plain, where, files) if isinstance(plain, str) else []


def _of_mapping(plain: Mapping[str, Any], where: str, files: bool) -> list[str]:
    if "import" in plain:
        path, key = _imported(plain), where.rpartition(".")[2]
        known = is_builtin_env(path) if key in _ENVS and ":" in path else _is_agent_fn(path)
        return [] if known else [f"{where}={path}"]
    found: list[str] = []
    if plain.get("class") is not None and not _is_settings(str(plain["class"])):
        found = [f"{where or 'experiment'} is a {plain['class']}"]
    return found + [
        text
        for name, item in plain.items()
        if name != "class"
        for text in foreign(item, f"{where}.{name}".lstrip("."), files=files)
    ]


def _of_text(text: str, where: str, files: bool) -> list[str]:
    key = where.rpartition(".")[2].partition("[")[0]
    if key in _PLAIN or (key == "device" and _DEVICE.fullmatch(text)):
        return []
    if key == "address":
        return [] if text == "local" else [f"{where}={text} (a cluster, which would run what this process sends it)"]
    if ":" in text and not (key == "reward_fn" and is_builtin_env(text)):
        return [f"{where}={text}"]
    named = key in _FILES or "/" in text or "\\" in text or text.startswith(("~", ".."))
    return [f"{where}={text!r} (a file)"] if files and named and text and where != "run.dir" else []


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
